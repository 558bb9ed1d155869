"""y = (x · W̃ᵀ) · g for tiled NVFP4 weights, W̃ = e2m1 · e4m3, with LoRA or without: the products that serving uses.

Two ways, chosen by the number of tokens M: fused (`fused_product.py`), or W̃ into a scratch and the library's product,
which is the better one for large M and the only one where the fused kernel does not run.

Training multiplies with the checkpoint's own layout, forward and backward, by the second way (the learner's
`nvfp4_linear.py`): its M is large.

Legend: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from functools import lru_cache
from math import log

import torch
from torch import Tensor

from qerld_kernels.fused_product import Plan, aligned, can_fuse, fused_product
from qerld_kernels.lora import add_lora, check_lora
from qerld_kernels.low_rank import shrink_low, tickets_for
from qerld_kernels.plans import PLANS
from qerld_kernels.tiles import SIDE, Tiles, dequantize_tiles, dequantize_tiles_reference

__all__ = ["MOST_FUSED", "dequantized_product", "lora_matmul", "matmul", "matmul_reference", "plan", "remember_scale"]

MOST_FUSED = max(most for plans in PLANS.values() for most, _ in plans)
"""Tokens up to which `plan` has one for some layer."""
_MOST_SLOTS = 32


@lru_cache(maxsize=4096)
def plan(tokens: int, outputs: int, inputs: int) -> Plan | None:
    """Return how to compute a product of this size; None: dequantise.

    By the table of the layer that is nearest in shape, in factors of outputs and inputs.
    """
    nearest = min(PLANS, key=lambda shape: abs(log(shape[0] / outputs)) + abs(log(shape[1] / inputs)))
    return next((chosen for most, chosen in PLANS[nearest] if tokens <= most), None)


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
    tickets: Tensor,
) -> Tensor:
    """`matmul`, and `add_lora` to its result, in one kernel beside another where that can be.

    a, b, slots, none: of `add_lora`; tickets: of `lora.shrink_low`, which is zero again afterwards.

    Raises:
        ValueError: a shape, dtype or layout does not fit.
    """
    check_lora(x, a, b, slots, none)
    widths, tokens = [up.shape[2] for up in b], x.shape[0]
    if sum(widths) != outputs:
        raise ValueError(f"b: must have {outputs} outputs in all, as the weight, got {widths}")
    chosen = plan(tokens, outputs, x.shape[1])
    whole = all(width % SIDE == 0 for width in widths[:-1])  # no tile of outputs lies in two pieces
    fits = b[0].shape[0] <= _MOST_SLOTS and tickets_for(tokens, len(a)) <= tickets.numel()
    if none.item() or tokens == 0 or chosen is None or not (can_fuse(x) and whole and fits):
        y: Tensor = matmul(x, words, scale, global_scale, outputs)
        add_lora(y, x, a, b, slots, none)
        return y
    x, factor = aligned(x), _on_host(global_scale)  # from here on nothing may come between the two launches
    low = shrink_low(x, a, b, slots, tickets)
    return fused_product(x, Tiles(words, scale), outputs, factor, chosen, low)


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
