"""From a `papers.Problem` to the trainer's own types: what a preset makes of the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from qerld_learner.records import RunConfig
from qerld_learner.run_options import algorithm_config
from qerld_learner.trainer.algorithm import PRESETS
from qerld_learner.trainer.batch import advantages_of, kl_penalties, make_batch, plan_updates
from qerld_learner.trainer.messages import AlgorithmConfig, Group, Rollout
from qerld_learner.trainer.objectives import TokenBatch
from torch import Tensor

from .papers import Array, Problem


def preset(name: str, longest: int, **changes: Any) -> AlgorithmConfig:
    """The preset's algorithm as a run with `max_tokens = longest` has it, one update, without a correction."""
    derived = {"loss_divisor": float(longest), "overlong_buffer": longest // 5}
    config = replace(RunConfig(max_tokens=longest, preset=name), **{**derived, **PRESETS[name]})
    return msgspec.structs.replace(algorithm_config(config), **{"correction": "none", "epochs": 1, **changes})


def groups_of(x: Problem) -> list[Group]:
    """The problem's rollouts as messages; their tokens do not matter here."""
    rollouts = [
        Rollout(f"r{i}", [1] * n, x.mu[i, :n].tolist(), float(x.rewards[i]), 0, truncated=bool(x.truncated[i]))
        for i, n in enumerate(x.lengths.tolist())
    ]
    return [Group(f"g{i}", [1], rollouts[i : i + x.group]) for i in range(0, len(rollouts), x.group)]


def rows(x: Problem, matrix: Array) -> list[Tensor]:
    return [torch.tensor(matrix[i, :n]) for i, n in enumerate(x.lengths.tolist())]


def flat(x: Problem, matrix: Array) -> Tensor:
    return torch.cat(rows(x, matrix)).requires_grad_()


def token_batch(config: AlgorithmConfig, x: Problem) -> TokenBatch:
    """Advantages and weights by the trainer's own way, every tensor in float64 and asking for a gradient."""
    batch = make_batch(groups_of(x), config, 10)
    in_reward = config.kl_coef and config.kl_in == "reward"
    penalties = kl_penalties(config, rows(x, x.old), rows(x, x.ref)) if in_reward else None
    (update,) = plan_updates(batch, config)
    lengths = torch.tensor(x.lengths)
    return TokenBatch(
        logprobs=flat(x, x.pi),
        behaviour=flat(x, x.mu),
        advantages=torch.cat(advantages_of(batch, config, penalties)).double().requires_grad_(),
        weights=update.weights.double().repeat_interleave(lengths).requires_grad_(),
        owners=torch.arange(len(lengths)).repeat_interleave(lengths),
        entropy=flat(x, -x.pi / 3),
        old=flat(x, x.old),
        reference=flat(x, x.ref) if config.kl_coef else None,
    )


def padded(x: Problem, values: Tensor) -> Array:
    """[T] as a matrix [R, L], 0 where there is no token."""
    found = np.zeros_like(x.pi)
    found[x.mask > 0] = values.detach().numpy()
    return found
