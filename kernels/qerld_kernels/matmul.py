"""y = (x · W̃ᵀ) · g for tiled NVFP4 weights, W̃ = e2m1 · e4m3, with LoRA or without: the products that serving uses.

Two ways, chosen by the number of tokens M: fused (`fused_product.py`), or W̃ into a scratch and the library's product,
which is the better one for large M and the only one where the fused kernel does not run.

Training multiplies with the checkpoint's own layout, forward and backward, by the second way (the learner's
`packed_linear.py`): its M is large.

Legend: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import TypeVar

import torch
from torch import Tensor

from qerld_kernels.fused_product import Plan, can_fuse, fused_product
from qerld_kernels.lora import add_lora, check_lora
from qerld_kernels.low_rank import Adapters, Sharing, counters_for
from qerld_kernels.plans import PLANS, SHARINGS
from qerld_kernels.tiles import Tiles, dequantize_tiles, dequantize_tiles_reference

__all__ = [
    "MOST_SHARED", "dequantized_product", "lora_matmul", "lora_plan", "matmul", "matmul_reference", "plan",
    "remember_scale",
]  # fmt: skip

MOST_SHARED = max(most for ways in SHARINGS.values() for most, _ in ways)
"""Tokens up to which a product with LoRA is one launch."""
_MOST_SLOTS = 32
T = TypeVar("T")


@lru_cache(maxsize=4096)
def plan(tokens: int, outputs: int, inputs: int) -> Plan | None:
    """Return how to compute a product of this size; None: dequantise.

    By the table of the layer that is nearest in shape, in factors of outputs and inputs.
    """
    return _first(PLANS[_nearest(outputs, inputs)], tokens)


@lru_cache(maxsize=4096)
def lora_plan(tokens: int, outputs: int, inputs: int) -> tuple[Plan, Sharing]:
    """Return how to compute a product with LoRA, of at most `MOST_SHARED` tokens at a time.

    Where it is better to dequantise, it is not with LoRA, which would read and write y once more: the last plan then.
    """
    nearest = _nearest(outputs, inputs)
    found, way = _first(PLANS[nearest], tokens), _first(SHARINGS[nearest], tokens)
    return found or PLANS[nearest][-1][1], way or SHARINGS[nearest][-1][1]


def _nearest(outputs: int, inputs: int) -> tuple[int, int]:
    return min(PLANS, key=lambda shape: abs(log(shape[0] / outputs)) + abs(log(shape[1] / inputs)))


def _first(rows: tuple[tuple[int, T], ...], tokens: int) -> T | None:
    return next((chosen for most, chosen in rows if tokens <= most), None)


def matmul_reference(x: Tensor, tiles: Tiles, outputs: int, global_scale: Tensor) -> Tensor:
    """y [M, N] in plain torch, in fp32 until the one rounding."""
    weight = dequantize_tiles_reference(tiles, outputs, x.shape[1], torch.float32)
    return ((x.float() @ weight.T) * global_scale).to(x.dtype)


@torch.library.custom_op("qerld::nvfp4_lora_matmul", mutates_args=())
def lora_matmul(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    outputs: int,
    a: list[Tensor],
    b: list[Tensor],
    slots: Tensor,
    none: Tensor,
    counters: Tensor,
) -> Tensor:
    """`matmul`, and `add_lora` to its result, in one kernel where that can be.

    a, b, slots, none: of `add_lora`; counters: of `low_rank.Adapters`.

    Raises:
        ValueError: a shape, dtype or layout does not fit.
    """
    check_lora(x, a, b, slots, none)
    widths, tokens = [up.shape[2] for up in b], x.shape[0]
    if sum(widths) != outputs:
        raise ValueError(f"b: must have {outputs} outputs in all, as the weight, got {widths}")
    pieces = -(-tokens // MOST_SHARED)
    each = -(-tokens // max(1, pieces))
    fits = b[0].shape[0] <= _MOST_SLOTS and counters_for(each) <= counters.numel()
    if none.item() or tokens == 0 or not (can_fuse(x) and fits):
        y: Tensor = matmul(x, words, scale, global_scale, outputs)
        add_lora(y, x, a, b, slots, none)
        return y
    y = x.new_empty(tokens, outputs)
    chosen, sharing = lora_plan(each, outputs, x.shape[1])
    for start in range(0, tokens, each):
        rows = slice(start, min(start + each, tokens))
        adapters = Adapters(a, b, slots[rows], counters, sharing)
        fused_product(x[rows], Tiles(words, scale), outputs, _on_host(global_scale), chosen, adapters, y[rows])
    return y


@lora_matmul.register_fake
def _(x: Tensor, words: Tensor, scale: Tensor, global_scale: Tensor, outputs: int, *_others: object) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


_host_scales: dict[int, float] = {}


def remember_scale(global_scale: Tensor) -> Tensor:
    """Read a global scale fp32 [] once, so that products need not ask the device; it must live as long as the process.

    A Python number would do, were it not a constant to torch.compile, which would compile each layer by itself.
    """
    _host_scales[global_scale.data_ptr()] = float(global_scale)
    return global_scale


@torch.library.custom_op("qerld::nvfp4_matmul", mutates_args=())
def matmul(x: Tensor, words: Tensor, scale: Tensor, global_scale: Tensor, outputs: int) -> Tensor:
    """Return y [M, N] of x [M, K] in bf16 or fp16; words and scale: of `Tiles`; global_scale: fp32 [].

    One opaque op: the way is chosen when it runs, so a captured CUDA graph keeps the one for its M. Capturing needs
    `remember_scale`.

    Raises:
        ValueError: a shape, dtype or layout does not fit.
    """
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x: must be bf16 or fp16 [M, K], got {x.dtype} {tuple(x.shape)}")
    tiles, factor = Tiles(words, scale), _on_host(global_scale)
    chosen = plan(x.shape[0], outputs, x.shape[1])
    if chosen is not None and can_fuse(x):
        return fused_product(x, tiles, outputs, factor, chosen)
    return dequantized_product(x, tiles, outputs, factor)


@matmul.register_fake
def _(x: Tensor, words: Tensor, scale: Tensor, global_scale: Tensor, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


def dequantized_product(x: Tensor, tiles: Tiles, outputs: int, factor: float) -> Tensor:
    """(x · W̃ᵀ) · factor by way of W̃, dequantised into a scratch; arguments as `matmul`."""
    weight = dequantize_tiles(tiles, outputs, x.shape[1], x.dtype)
    return torch.addmm(x.new_empty(1), x, weight.T, beta=0, alpha=factor)  # by g in fp32, before the rounding


def _on_host(global_scale: Tensor) -> float:
    found = _host_scales.get(global_scale.data_ptr())
    return float(global_scale) if found is None else found
