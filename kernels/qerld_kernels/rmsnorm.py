"""RMSNorm whose weight carries the noise of each token's adapter slot.

    y_t = x_t / sqrt(mean(x_t²) + ε) · (w + Z[slot_t + 1])

Z [max_loras + 1, d] is fp32 and its row 0 is zero (slot −1: no adapter), so a token without noise, or with σ = 0, is
bit-equal to one in a server without noise. Everything is computed in fp32 and cast once: in bf16 a weight near 1
swallows σ ≤ 1e-3 completely.

Shapes: T tokens, d channels, S = max_loras + 1 slot rows.
"""

from __future__ import annotations

import torch

from qerld_kernels.dependent_launch import can_depend, let_the_next_kernel_start
from qerld_kernels.jit import can_launch, jit, next_power_of_2, tl

__all__ = ["add_rmsnorm_slots", "rmsnorm", "rmsnorm_slots", "rmsnorm_slots_reference"]


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, noise: torch.Tensor | None = None, *, unit_offset: bool = False
) -> torch.Tensor:
    """The differentiable norm of the trainer: x [..., d], weight [d], noise fp32 [d] or [..., d] or None.

    Returns x's shape and dtype. With `unit_offset` it multiplies by 1 + w (Gemma). Where no gradient is wanted, as when
    a version is evaluated with its noise, and noise is one for all tokens, the server's kernel computes it.
    """
    if can_launch(x) and not torch.is_grad_enabled() and (noise is None or noise.ndim == 1):
        rows = x.reshape(-1, x.shape[-1])
        table = weight.new_zeros(2, x.shape[-1], dtype=torch.float32)
        if noise is not None:
            table[1] = noise
        slots = torch.full((rows.shape[0],), -1 if noise is None else 0, dtype=torch.int32, device=x.device)
        y: torch.Tensor = rmsnorm_slots(rows, weight, table, slots, eps, unit_offset)
        return y.view(x.shape)
    scale = weight.float()
    if noise is not None:
        scale = scale + noise
    if unit_offset:
        scale = scale + 1.0
    return (torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=eps) * scale).to(x.dtype)


@torch.library.custom_op("qerld::rmsnorm_slots", mutates_args=())
def rmsnorm_slots(
    x: torch.Tensor,
    weight: torch.Tensor,
    noise_table: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    """`rmsnorm` with a row of the table for each token, as one opaque op: compiled code and CUDA graphs read it anew.

    x [T, d], weight [d], noise_table fp32 [S, d], slots int [≥ T] with values ≥ −1. `slots` may be longer than T:
    vLLM's buffer is as long as the largest batch, and only its first T entries count.
    """
    _check_shapes(x, weight, noise_table, slots)
    if can_launch(x):
        return _launch(x, None, weight, noise_table, slots, eps, unit_offset)[0]
    return rmsnorm_slots_reference(x, weight, noise_table, slots, eps, unit_offset)


@torch.library.custom_op("qerld::add_rmsnorm_slots", mutates_args=())
def add_rmsnorm_slots(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    noise_table: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rmsnorm_slots` of x + residual, and that sum, rounded to x's dtype before the norm sees it; both [T, d]."""
    _check_shapes(x, weight, noise_table, slots)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual: must be {x.dtype} {tuple(x.shape)} as x, got {residual.dtype} {tuple(residual.shape)}"
        )
    if can_launch(x):
        y, total = _launch(x, residual, weight, noise_table, slots, eps, unit_offset)
        assert total is not None
        return y, total
    total = x + residual
    return rmsnorm_slots_reference(total, weight, noise_table, slots, eps, unit_offset), total


@rmsnorm_slots.register_fake
def _(x: torch.Tensor, *_others: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@add_rmsnorm_slots.register_fake
def _(x: torch.Tensor, *_others: object) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)


def rmsnorm_slots_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    noise_table: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    """The same in plain torch, several kernels a call."""
    rows = noise_table.index_select(0, slots[: x.shape[0]].long() + 1)
    return rmsnorm(x, weight, eps, rows, unit_offset=unit_offset)


@jit
def _kernel(
    x_ptr, residual_ptr, weight_ptr, noise_ptr, slots_ptr, y_ptr, total_ptr,
    x_stride, residual_stride, channels, eps,
    UNIT_OFFSET: tl.constexpr, WITH_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One token a program. Its row stays in registers between the sum of squares and the product.

    EARLY: a product that comes next may fetch weights meanwhile.
    """
    if EARLY:
        let_the_next_kernel_start()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < channels
    x = tl.load(x_ptr + token * x_stride + columns, mask=inside, other=0.0)
    if WITH_RESIDUAL:
        other = tl.load(residual_ptr + token * residual_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + token * channels + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token) + 1
    noisy = columns < tl.where(slot > 0, channels, 0)  # row 0 is zero: tokens without an adapter read nothing
    scale += tl.load(noise_ptr + slot.to(tl.int64) * channels + columns, mask=noisy, other=0.0)
    if UNIT_OFFSET:
        scale += 1.0
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / channels + eps)
    tl.store(y_ptr + token * channels + columns, (wide * inverse * scale).to(x.dtype), mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    noise_table: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of x and residual may be strided (a slice of a fused projection); channels may not."""
    tokens, channels = x.shape
    for name, tensor in (("x", x), ("residual", x if residual is None else residual)):
        if tensor.stride(1) != 1:
            raise ValueError(f"{name}: channels must be contiguous, got strides {tensor.stride()}")
    for name, tensor in (("weight", weight), ("noise_table", noise_table), ("slots", slots)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()}")
    y = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    if tokens:
        block = next_power_of_2(channels)
        other = x if residual is None else residual
        _kernel[(tokens,)](
            x, other, weight, noise_table, slots, y, y if total is None else total,
            x.stride(0), other.stride(0), channels, eps,
            UNIT_OFFSET=unit_offset, WITH_RESIDUAL=residual is not None, BLOCK=block, EARLY=can_depend(x.device),
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return y, total


def _check_shapes(x: torch.Tensor, weight: torch.Tensor, noise_table: torch.Tensor, slots: torch.Tensor) -> None:
    tokens, channels = x.shape
    if weight.shape != (channels,) or noise_table.ndim != 2 or noise_table.shape[1] != channels:
        raise ValueError(
            f"weight {tuple(weight.shape)} and noise_table {tuple(noise_table.shape)} must be [{channels}] and "
            f"[slots, {channels}] for x {tuple(x.shape)}"
        )
    if noise_table.dtype != torch.float32:
        raise ValueError(f"noise_table: must be float32 (bf16 swallows small σ), got {noise_table.dtype}")
    if slots.ndim != 1 or slots.shape[0] < tokens:
        raise ValueError(f"slots: must be one-dimensional with at least {tokens} entries, got {tuple(slots.shape)}")
