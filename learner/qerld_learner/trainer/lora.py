"""LoRA on the frozen base through PEFT. The one place that touches PEFT's private registry of custom modules.

The masters are fp32; the forward uses them rounded to bf16, as they are published and served, with a straight-through
gradient. The rounded values are exact in bf16 and fp32; in fp16 those below 6e-5 lose bits, on both sides alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from .messages import LoraShape
from .packed_linear import PackedLinear

ADAPTER = "default"


class LoraError(ValueError):
    """The adapter's shape does not fit the model."""


class RoundedLora(PeftLinear):  # type: ignore[misc]
    """y = base(x) + s·B̂(Âx), s = α/r or α/√r, with Â, B̂ the masters rounded to bf16.

    Dropout, DoRA and merging are not offered.
    """

    bypassed = False

    def _get_in_out_features(self, module: PackedLinear | nn.Linear) -> tuple[int, int]:
        return module.in_features, module.out_features  # PEFT's own warns about a class it does not know

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the base's output plus the adapter's, or the base's alone while bypassed."""
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.bypassed:
            return y
        down = rounded(self.lora_A[ADAPTER].weight).to(x.dtype)
        up = rounded(self.lora_B[ADAPTER].weight).to(x.dtype)
        delta: Tensor = (x @ down.T @ up.T) * self.scaling[ADAPTER]
        return y + delta


def rounded(master: Tensor) -> Tensor:
    """Return the fp32 master rounded to bf16 precision; the gradient passes straight through."""
    rounding = (master.bfloat16().float() - master).detach()
    value: Tensor = master + rounding
    return value


def attach(model: nn.Module, shape: LoraShape) -> dict[str, nn.Parameter]:
    """Put LoRA of this shape on the model, in place, and return its fp32 masters by PEFT name.

    Raises `LoraError` when rank or alpha is out of range or a target names no linear layer.
    """
    _check(model, shape)
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        use_rslora=shape.rslora,
        target_modules=list(shape.target_modules),
        lora_dropout=0.0,
    )
    config._register_custom_module({PackedLinear: RoundedLora, nn.Linear: RoundedLora})
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    masters = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            masters[name.replace(f".{ADAPTER}.", ".")] = parameter
    return masters


def detach(model: nn.Module) -> None:
    """Take the adapter off the model, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, RoundedLora):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module.base_layer)
    del model.peft_config  # PEFT's note of the adapter; attaching again would warn about two


@contextlib.contextmanager
def bypassed(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off inside the block: the base policy."""
    layers = [module for module in model.modules() if isinstance(module, RoundedLora)]
    for layer in layers:
        layer.bypassed = True
    try:
        yield
    finally:
        for layer in layers:
            layer.bypassed = False


def first_weights(masters: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    """Return version 0's weights: B = 0 and A uniform in ±1/√in (PEFT's default), drawn in name order from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name in sorted(masters):
        shape = masters[name].shape
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(shape[1])
            weights[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        else:
            weights[name] = torch.zeros(shape)
    return weights


def check_weights(masters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    """Raise `LoraError` unless the weights have exactly the masters' names and shapes and are finite."""
    if odd := sorted(set(masters) ^ set(weights)):
        raise LoraError(
            f"the adapter and the run's LoRA differ in {len(odd)} tensors, first {odd[0]}; match target_modules"
        )
    for name, weight in weights.items():
        if weight.shape != masters[name].shape:
            raise LoraError(
                f"{name} has shape {list(weight.shape)}, the run's LoRA {list(masters[name].shape)}; match the rank"
            )
        if not torch.isfinite(weight).all():
            raise LoraError(f"{name} holds NaN or infinite values; give a healthy adapter")


def _check(model: nn.Module, shape: LoraShape) -> None:
    if shape.rank < 1 or not shape.alpha > 0:
        raise LoraError(f"lora.rank must be ≥ 1 and lora.alpha > 0, got {shape.rank} and {shape.alpha}")
    layers = [name for name, m in model.named_modules() if isinstance(m, PackedLinear | nn.Linear)]
    known = {name.rpartition(".")[2] for name in layers} - {"lm_head"}  # the head's log-probabilities assume it frozen
    if not shape.target_modules:
        raise LoraError(f"lora.target_modules is empty; choose from {sorted(known)}")
    if unknown := sorted(set(shape.target_modules) - known):
        raise LoraError(
            f"lora.target_modules: {unknown} are not linear layers of the model; choose from {sorted(known)}"
        )
