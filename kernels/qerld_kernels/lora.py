"""LoRA of tokens that belong to adapter slots, added in place to what a linear layer gave.

    y_t += B[slot_t] · (A[slot_t] · x_t);  y_t is not written where slot_t is no slot (−1: no adapter)

(Hu et al. 2021, arXiv:2106.09685, section 4.1, with α / r within B; many adapters in one batch as in Punica, Chen et
al. 2023, arXiv:2310.18547.) A fused layer (q, k, v) has one A and one B a piece, whose outputs stand side by side.

Two launches. `_shrink` writes A · x in fp32, K split among programs; `_expand` adds those parts in order, rounds the
sum to x's dtype, as PEFT and vLLM do, multiplies by B and adds to y in fp32, with one rounding. A tile of rows loads
its tokens' slots and passes over those it holds, one after the other: nothing is sorted, counted or zeroed beforehand,
nothing is added atomically, and the launches depend neither on the number of slots nor on who is in them, so a
captured graph serves every batch of its size. A row's result depends on no other row: not even an adapter full of NaN
reaches another's tokens. (Within the base product, `fused_product.py`, that holds for finite adapters.)

Legend: T tokens, K inputs, N outputs, R rank of the slots, L slots, S pieces of a fused layer, P parts of K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qerld_kernels.jit import INTERPRETED, can_launch, jit, next_power_of_2, tl

__all__ = ["MAX_PIECES", "MAX_RANK", "Plan", "add_lora", "check_lora", "lora_reference", "plan", "planned_lora"]

MAX_PIECES = 3
"""Pieces of a fused layer: each has an argument of its own in the kernels."""
MAX_RANK = 128
"""The whole rank lies in one tile."""


@dataclass(frozen=True)
class Plan:
    """How both kernels tile: rows are tokens. `split` and `programs` are upper bounds."""

    shrink_rows: int
    inputs: int
    """K of a step."""
    split: int
    """Parts of K. Each program of the expansion reads all of them for its rows."""
    shrink_warps: int
    stages: int
    expand_rows: int
    outputs: int
    programs: int
    """Programs of the expansion; where there are more tiles, each takes several of a row of tiles."""
    expand_warps: int


def plan(tokens: int, rank: int, inputs: int) -> Plan:
    """Tiles for T tokens: near the best of those tried on an H200 at rank 32, one adapter (benchmarks/README.md).

    Few tokens need many parts of K to fill the machine; many tokens do not, and pay for the parts' traffic. Other ranks
    than 32 were compiled for sm_90 (Triton 3.6) without spills and not timed.
    """
    deep = 256 if rank <= 32 else 128
    warps = 4 if rank <= 64 else 8
    long = inputs > 8192
    if tokens <= 16:
        return Plan(16, deep, 32 if long else 16, 4, 4, 16, 128, 528, warps)
    if tokens <= 64:
        return Plan(16, deep, 16 if long else 8, 4, 4, 32, 64, 1056, warps)
    if tokens <= 256:
        return Plan(16, deep, 8, 4, 4, 32, 64, 528, warps)
    return Plan(64, 128, 8 if tokens <= 2048 else 2, warps, 3, 64, 64, 528, warps)


def lora_reference(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], slots: Tensor) -> Tensor:
    """The new y [T, N] in plain torch, with the kernels' roundings; arguments as `add_lora`."""
    wide, own = y.float(), slots[: x.shape[0]]
    begin = 0
    for down, up in zip(a, b, strict=True):
        columns = slice(begin, begin + up.shape[2])
        for slot in range(down.shape[0]):
            rows = (own == slot).nonzero().squeeze(1)
            low = (x[rows].float() @ down[slot, 0].float().T).to(x.dtype)
            wide[rows, columns] += low.float() @ up[slot, 0].float().T
        begin += up.shape[2]
    return wide.to(y.dtype)


@torch.library.custom_op("qerld::add_lora", mutates_args=("y",))
def add_lora(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], slots: Tensor, none: Tensor) -> None:
    """Add the LoRA of x [T, K], bf16 or fp16, to y [T, N], in place.

    a: S of [L, 1, R, K]; b: S of [L, 1, width, R], whose widths add up to N; all in x's dtype. slots: int64 [≥ T], of
    which the first T count; what is not from 0 to L − 1 has no adapter. none: bool [1] on the host, true when no token
    has an adapter, in which case nothing is launched.

    One opaque op: `slots` is read by the kernels, `none` and the plan for T when the op runs, so a captured CUDA graph
    keeps the latter two.

    Raises:
        ValueError: a shape, dtype, layout or device does not fit.
    """
    check_lora(x, a, b, slots, none)
    outputs = sum(up.shape[2] for up in b)
    if y.dtype != x.dtype or y.shape != (x.shape[0], outputs) or y.stride(1) != 1 or y.device != x.device:
        raise ValueError(
            f"y: must be {x.dtype} [{x.shape[0]}, {outputs}] with contiguous rows on {x.device}, as x and b, "
            f"got {y.dtype} {tuple(y.shape)}, strides {y.stride()}, on {y.device}"
        )
    if x.shape[0] == 0 or none.item():
        return
    # The interpreter's products take the bits of bf16 for integers.
    if can_launch(x) and not (INTERPRETED and x.dtype == torch.bfloat16):
        planned_lora(y, x, a, b, slots, plan(x.shape[0], a[0].shape[2], x.shape[1]))
    else:
        y.copy_(lora_reference(y, x, a, b, slots))


@add_lora.register_fake
def _(y: Tensor, *_others: object) -> None:
    return None


def planned_lora(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], slots: Tensor, chosen: Plan) -> None:
    """`add_lora` by the kernels, T ≥ 1, tiled as chosen."""
    (tokens, inputs), (loras, _, rank, _), pieces = x.shape, a[0].shape, len(a)
    steps = -(-inputs // chosen.inputs)
    own = -(-steps // chosen.split)
    split = -(-steps // own)
    low = torch.empty(split, pieces, tokens, rank, dtype=torch.float32, device=x.device)
    padded = max(16, next_power_of_2(rank))  # tensor cores take no fewer
    _shrink[(-(-tokens // chosen.shrink_rows), split, pieces)](
        x, *three(a), low, slots, tokens, inputs, x.stride(0), loras, own,
        RANK=rank, PADDED=padded, BM=chosen.shrink_rows, BK=chosen.inputs,
        num_warps=chosen.shrink_warps, num_stages=chosen.stages,
    )  # fmt: skip
    widths = [up.shape[2] for up in b]
    tiles_m, tiles_n = -(-tokens // chosen.expand_rows), -(-max(widths) // chosen.outputs)
    each = -(-tiles_n // min(tiles_n, max(1, chosen.programs // (tiles_m * pieces))))  # tiles of a program
    _expand[(tiles_m, -(-tiles_n // each), pieces)](
        low, *three(b), y, slots, tokens, y.stride(0), *[*widths, 0, 0][:3], loras,
        RANK=rank, PADDED=padded, SPLIT=split, BM=chosen.expand_rows, BN=chosen.outputs,
        num_warps=chosen.expand_warps, num_stages=2,
    )  # fmt: skip


def three(pieces: list[Tensor]) -> list[Tensor]:
    """The kernels' arguments; no program of the grid reads those that fill up."""
    return [*pieces, pieces[0], pieces[0]][:MAX_PIECES]


# Numbers that change with the batch are not specialised: each value of a kind would compile anew amid serving.
@partial(jit, do_not_specialize=["tokens", "loras", "own"])
def _shrink(
    x_ptr, a0_ptr, a1_ptr, a2_ptr, low_ptr, slots_ptr, tokens, inputs, x_stride, loras, own,
    RANK: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile [BM, R] of x · Aᵀ over one part of K, for one piece; rows without an adapter are passed by."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part, piece = tl.program_id(1), tl.program_id(2)
    slot = slots_of(slots_ptr, rows, tokens, loras)
    total = shrunk(
        x_ptr, a0_ptr, a1_ptr, a2_ptr, slot, rows, part, piece, inputs, x_stride, loras, own, RANK, PADDED, BM, BK
    )
    ranks = tl.arange(0, PADDED)
    before = (part * tl.num_programs(2) + piece).to(tl.int64) * tokens
    low_at = (before + rows.to(tl.int64)[:, None]) * RANK + ranks[None, :]
    tl.store(low_ptr + low_at, total, mask=(slot < loras)[:, None] & (ranks < RANK)[None, :])


@jit
def shrunk(
    x_ptr, a0_ptr, a1_ptr, a2_ptr, slot, rows, part, piece, inputs, x_stride, loras, own,
    RANK: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The sums [BM, PADDED] of one part of K, zero in rows without an adapter."""
    a_ptr = a0_ptr
    if piece == 1:
        a_ptr = a1_ptr
    if piece == 2:
        a_ptr = a2_ptr
    owned = (slot < loras)[:, None]
    ranks = tl.arange(0, PADDED)
    real = (ranks < RANK)[None, :]
    row_at = rows.to(tl.int64)[:, None]
    last = tl.minimum(part * own + own, tl.cdiv(inputs, BK))
    total = tl.zeros([BM, PADDED], tl.float32)
    lora = tl.min(slot, axis=0)
    while lora < loras:
        a_at = a_ptr + lora.to(tl.int64) * RANK * inputs + ranks[None, :] * inputs
        found = tl.zeros([BM, PADDED], tl.float32)
        for step in range(part * own, last):
            k = step * BK + tl.arange(0, BK)
            inside = k < inputs
            x = tl.load(x_ptr + row_at * x_stride + k[None, :], mask=owned & inside[None, :], other=0.0)
            a = tl.load(a_at + k[:, None], mask=inside[:, None] & real, other=0.0)
            found = tl.dot(x, a, found)
        total = tl.where((slot == lora)[:, None], found, total)
        lora = tl.min(tl.where(slot > lora, slot, loras), axis=0)
    return total


@partial(jit, do_not_specialize=["tokens", "loras"])
def _expand(
    low_ptr, b0_ptr, b1_ptr, b2_ptr, y_ptr, slots_ptr, tokens, y_stride, width0, width1, width2, loras,
    RANK: tl.constexpr, PADDED: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y += low · Bᵀ for some column tiles of one piece."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    piece = tl.program_id(2)
    b_ptr, width, begin = b0_ptr, width0, 0
    if piece == 1:
        b_ptr, width, begin = b1_ptr, width1, width0
    if piece == 2:
        b_ptr, width, begin = b2_ptr, width2, width0 + width1
    slot = slots_of(slots_ptr, rows, tokens, loras)
    first = tl.min(slot, axis=0)
    owned = (slot < loras)[:, None]
    ranks = tl.arange(0, PADDED)
    row_at = rows.to(tl.int64)[:, None]
    # Unrolled, so that the parts are on their way at the same time.
    low = tl.zeros([BM, PADDED], tl.float32)
    for part in tl.static_range(SPLIT):
        low_at = ((part * tl.num_programs(2) + piece).to(tl.int64) * tokens + row_at) * RANK + ranks[None, :]
        low += tl.load(low_ptr + low_at, mask=owned & (ranks < RANK)[None, :], other=0.0)
    rounded = low.to(y_ptr.dtype.element_ty)
    tiles = tl.where(first < loras, tl.cdiv(width, BN), 0)
    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        columns = tile * BN + tl.arange(0, BN)
        inside = columns < width
        y_at = y_ptr + row_at * y_stride + begin + columns[None, :]
        old = tl.load(y_at, mask=owned & inside[None, :], other=0.0)
        total = tl.zeros([BM, BN], tl.float32)
        lora = first
        while lora < loras:
            b_at = b_ptr + lora.to(tl.int64) * width * RANK + columns[None, :] * RANK + ranks[:, None]
            b = tl.load(b_at, mask=inside[None, :] & (ranks < RANK)[:, None], other=0.0)
            total = tl.where((slot == lora)[:, None], tl.dot(rounded, b), total)
            lora = tl.min(tl.where(slot > lora, slot, loras), axis=0)
        tl.store(y_at, (old.to(tl.float32) + total).to(old.dtype), mask=owned & inside[None, :])


@jit
def slots_of(slots_ptr, rows, tokens, loras):
    """int32 slot of each row; `loras` for rows without one and beyond the batch."""
    slot = tl.load(slots_ptr + rows, mask=rows < tokens, other=-1)
    return tl.where((slot >= 0) & (slot < loras), slot, loras).to(tl.int32)


def check_lora(x: Tensor, a: list[Tensor], b: list[Tensor], slots: Tensor, none: Tensor) -> None:
    """Raise ValueError unless the arguments of `add_lora`, but for y, fit one another."""
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16) or x.stride(1) != 1:
        raise ValueError(
            f"x: must be bf16 or fp16 [T, K] with contiguous rows, got {x.dtype} {tuple(x.shape)}, strides {x.stride()}"
        )
    if not 1 <= len(a) <= MAX_PIECES or len(b) != len(a):
        raise ValueError(
            f"a, b: must be as many tensors each, 1 to {MAX_PIECES}, got {len(a)} and {len(b)}; "
            "call once for each few pieces, with their columns of y"
        )
    _check_weights(x, a, b)
    if slots.dtype != torch.int64 or slots.ndim != 1 or slots.shape[0] < x.shape[0] or not slots.is_contiguous():
        raise ValueError(
            f"slots: must be contiguous int64 with at least {x.shape[0]} entries, got {slots.dtype} "
            f"{tuple(slots.shape)}, strides {slots.stride()}"
        )
    if none.dtype != torch.bool or none.shape != (1,) or none.device.type != "cpu":
        raise ValueError(f"none: must be bool [1] on the host, got {none.dtype} {tuple(none.shape)} on {none.device}")
    if slots.device != x.device:
        raise ValueError(f"slots: must be on {x.device} as x, got {slots.device}")


def _check_weights(x: Tensor, a: list[Tensor], b: list[Tensor]) -> None:
    if a[0].ndim != 4 or a[0].numel() == 0 or a[0].shape[2] > MAX_RANK:
        raise ValueError(
            f"a: must be [L, 1, R, K] with R from 1 to {MAX_RANK}, not empty, got {tuple(a[0].shape)}; "
            "lower the rank, or leave the layer to vLLM's kernels"
        )
    loras, rank, inputs = a[0].shape[0], a[0].shape[2], x.shape[1]
    for down, up in zip(a, b, strict=True):
        if down.shape != (loras, 1, rank, inputs):
            raise ValueError(f"a: must be [{loras}, 1, {rank}, {inputs}] each, for x, got {tuple(down.shape)}")
        if up.ndim != 4 or up.shape != (loras, 1, up.shape[2], rank) or up.numel() == 0:
            raise ValueError(f"b: must be [{loras}, 1, width, {rank}] each, not empty, got {tuple(up.shape)}")
    for name, tensor in (*(("a", down) for down in a), *(("b", up) for up in b)):
        if tensor.dtype != x.dtype or tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: must be contiguous {x.dtype} on {x.device}, as x, got {tensor.dtype} on {tensor.device}, "
                f"strides {tensor.stride()}"
            )
