"""Optimisers by name: each takes one step from a state with the masters' gradients and returns the state after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from .checkpoint import AdapterState
from .messages import OptimizerConfig

Masters = dict[str, nn.Parameter]


class OptimizerError(ValueError):
    """The optimiser does not run here."""


def adamw(masters: Masters, state: AdapterState, config: OptimizerConfig) -> AdapterState:
    """AdamW (arXiv 1711.05101) with fp32 moments."""
    optimizer = torch.optim.AdamW(list(masters.values()), **_options(config))
    for name, master in masters.items():
        optimizer.state[master] = {
            "step": torch.tensor(float(state.updates)),
            "exp_avg": state.first_moments[name].clone(),
            "exp_avg_sq": state.second_moments[name].clone(),
        }
    optimizer.step()
    return _after(
        masters,
        state,
        first_moments={name: optimizer.state[master]["exp_avg"] for name, master in masters.items()},
        second_moments={name: optimizer.state[master]["exp_avg_sq"] for name, master in masters.items()},
    )


# Names in bitsandbytes' state: moments of a master, and the largest |value| of each block of 256 of them.
_MOMENTS = {"first_moments": "state1", "second_moments": "state2"}
_ABSMAX = {"first": "absmax1", "second": "absmax2"}


def adamw_8bit(masters: Masters, state: AdapterState, config: OptimizerConfig) -> AdapterState:
    """AdamW whose moments are 8 bits, block by block (arXiv 2110.02861): bitsandbytes, on a GPU.

    It keeps moments of masters with fewer than 4096 elements in fp32. Before the first update a state's are not read.
    """
    from bitsandbytes.optim import AdamW8bit

    optimizer = AdamW8bit(list(masters.values()), **_options(config))
    for index, (name, master) in enumerate(masters.items()):
        optimizer.init_state(optimizer.param_groups[0], master, 0, index)
        if state.updates:
            _restore(optimizer.state[master], name, state)
    optimizer.step()
    kept = {name: optimizer.state[master] for name, master in masters.items()}
    return _after(
        masters,
        state,
        **{field: {name: one[key] for name, one in kept.items()} for field, key in _MOMENTS.items()},
        absmax={
            f"{which}/{name}": one[key] for which, key in _ABSMAX.items() for name, one in kept.items() if key in one
        },
    )


def _restore(fresh: dict[str, torch.Tensor | int], name: str, state: AdapterState) -> None:
    fresh["step"] = state.updates
    for field, key in _MOMENTS.items():
        fresh[key] = getattr(state, field)[name].clone()
    for which, key in _ABSMAX.items():
        if key in fresh:
            fresh[key] = state.absmax[f"{which}/{name}"].clone()


Step = Callable[[Masters, AdapterState, OptimizerConfig], AdapterState]
OPTIMIZERS: dict[str, Step] = {"adamw": adamw, "adamw_8bit": adamw_8bit}


def check(config: OptimizerConfig, device: str) -> None:
    """Raise `OptimizerError` when the optimiser is unknown or does not run on the device."""
    if config.kind not in OPTIMIZERS:
        raise OptimizerError(f"optimizer.kind must be one of {', '.join(OPTIMIZERS)}, got {config.kind!r}")
    if config.kind != "adamw_8bit":
        return
    if not device.startswith("cuda"):
        raise OptimizerError(f"optimizer.kind adamw_8bit needs a GPU, the trainer's device is {device!r}; use adamw")
    if find_spec("bitsandbytes") is None:
        raise OptimizerError("optimizer.kind adamw_8bit needs bitsandbytes: pip install 'qerld[nf4]', or use adamw")


def _options(config: OptimizerConfig) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def _after(masters: Masters, state: AdapterState, **moments: Any) -> AdapterState:
    weights = {name: master.detach().clone() for name, master in masters.items()}
    return replace(state, weights=weights, updates=state.updates + 1, **moments)
