"""RMSNorm whose weight carries the noise of each token's adapter slot.

    y_t = x_t / sqrt(mean(x_t²) + ε) · (w + Z[slot_t + 1])

Z [max_loras + 1, d] is fp32 and its row 0 is zero (slot −1: no adapter), so a token without noise, or with σ = 0, is
bit-equal to one in a server without noise. Everything is computed in fp32 and cast once: in bf16 a weight near 1
swallows σ ≤ 1e-3 completely.

Shapes: T tokens, d channels, S = max_loras + 1 slot rows.
"""

from __future__ import annotations

import torch

__all__ = ["rmsnorm", "rmsnorm_slots"]


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, noise: torch.Tensor | None = None, *, unit_offset: bool = False
) -> torch.Tensor:
    """The differentiable norm of the trainer: x [..., d], weight [d], noise fp32 [d] or [..., d] or None.

    Returns x's shape and dtype. With `unit_offset` it multiplies by 1 + w (Gemma).
    """
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
    rows = noise_table.index_select(0, slots[: x.shape[0]].long() + 1)
    return rmsnorm(x, weight, eps, rows, unit_offset=unit_offset)


@rmsnorm_slots.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    noise_table: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


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
