"""A · x of LoRA, for a base product that adds B · (A · x) by itself (`fused_product.py`).

As the first half of `lora.py`; but the last program of a tile to finish adds the parts of K, in order, and lays the
sums out as a right operand of that product, beside which this kernel runs.

Legend: as `lora.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qerld_kernels.dependent_launch import let_the_next_kernel_start, wait_for_the_kernel_before
from qerld_kernels.jit import INTERPRETED, jit, next_power_of_2, tl
from qerld_kernels.lora import plan, shrunk, slots_of, three

__all__ = ["LOW_COLUMNS", "LOW_TOKENS", "LowRank", "shrink_low", "shrink_low_reference", "tickets_for"]

LOW_TOKENS = 16
"""Tokens of a tile of `shrink_low`."""
LOW_COLUMNS = 64
"""Columns of a tile of the base product, to whose multiples the ranks of a fused layer's pieces are filled up."""


@dataclass(frozen=True)
class LowRank:
    """A · x of a batch, ready for the base product.

    low [L · T, C]: row l · T + t is what token t gives B[l], its pieces side by side, R columns each, zeros up to C, a
    multiple of `LOW_COLUMNS`; all zeros where t is not in slot l. live int32 [T / 16]: bit l says whether a tile of 16
    tokens has one in slot l. b: of `add_lora`. parts: what the kernel that makes it works in; the base product may run
    at the same time, so nothing else may be given this memory before that is launched.
    """

    low: Tensor
    live: Tensor
    b: list[Tensor]
    parts: Tensor | None = None


def tickets_for(tokens: int, pieces: int) -> int:
    """How many tickets `shrink_low` needs."""
    return -(-tokens // LOW_TOKENS) * pieces


def shrink_low(x: Tensor, a: list[Tensor], b: list[Tensor], slots: Tensor, tickets: Tensor) -> LowRank:
    """A · x for the base product; arguments as `add_lora`, T ≥ 1, at most 32 slots.

    tickets: int32, `tickets_for` of them or more, zero before and after; no other stream may use them meanwhile.

    Raises:
        ValueError: the tickets are too few, of another dtype or on another device.
    """
    needed = tickets_for(x.shape[0], len(a))
    if tickets.dtype != torch.int32 or tickets.device != x.device or tickets.numel() < needed:
        raise ValueError(
            f"tickets: must be {needed} int32 or more on {x.device}, got {tuple(tickets.shape)} {tickets.dtype} "
            f"on {tickets.device}"
        )
    (tokens, inputs), (loras, _, rank, _), pieces = x.shape, a[0].shape, len(a)
    chosen = plan(min(tokens, 256), rank, inputs)
    steps = -(-inputs // chosen.inputs)
    own = -(-steps // chosen.split)
    split, tiles = -(-steps // own), -(-tokens // LOW_TOKENS)
    columns = -(-pieces * rank // LOW_COLUMNS) * LOW_COLUMNS
    parts = torch.empty(split, pieces, tokens, rank, dtype=torch.float32, device=x.device)
    low = torch.empty(loras * tokens, columns, dtype=x.dtype, device=x.device)
    live = torch.empty(tiles, dtype=torch.int32, device=x.device)
    _shrink_low[(tiles, split, pieces)](
        x, *three(a), parts, low, live, tickets, slots, tokens, inputs, x.stride(0), loras, own, split, columns,
        RANK=rank, PADDED=max(16, next_power_of_2(rank)), TAIL=next_power_of_2(max(1, columns - pieces * rank)),
        PIECES=pieces, BM=LOW_TOKENS, BK=chosen.inputs, PDL=not INTERPRETED,
        num_warps=chosen.shrink_warps, num_stages=chosen.stages, launch_pdl=True,
    )  # fmt: skip
    return LowRank(low, live, b, parts)


def shrink_low_reference(x: Tensor, a: list[Tensor], b: list[Tensor], slots: Tensor) -> LowRank:
    """The same in plain torch."""
    (tokens, _), (loras, _, rank, _) = x.shape, a[0].shape
    columns = -(-len(a) * rank // LOW_COLUMNS) * LOW_COLUMNS
    low = torch.zeros(loras, tokens, columns, dtype=x.dtype, device=x.device)
    live = torch.zeros(-(-tokens // LOW_TOKENS), dtype=torch.int32, device=x.device)
    for lora in range(loras):
        rows = (slots[:tokens] == lora).nonzero().squeeze(1)
        for piece, down in enumerate(a):
            low[lora, rows, piece * rank : piece * rank + rank] = (x[rows].float() @ down[lora, 0].float().T).to(
                x.dtype
            )
        live[rows.unique() // LOW_TOKENS] |= 1 << lora
    return LowRank(low.view(loras * tokens, columns), live, b)


@partial(jit, do_not_specialize=["tokens", "loras", "own", "split"])
def _shrink_low(
    x_ptr, a0_ptr, a1_ptr, a2_ptr, parts_ptr, low_ptr, live_ptr, tickets_ptr, slots_ptr,
    tokens, inputs, x_stride, loras, own, split, columns,
    RANK: tl.constexpr, PADDED: tl.constexpr, TAIL: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_shrink`, and the last program of a tile and piece to come writes `LowRank`."""
    if PDL:
        wait_for_the_kernel_before()
        let_the_next_kernel_start()
    tile, part, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BM + tl.arange(0, BM)
    slot = slots_of(slots_ptr, rows, tokens, loras)
    total = shrunk(
        x_ptr, a0_ptr, a1_ptr, a2_ptr, slot, rows, part, piece, inputs, x_stride, loras, own, RANK, PADDED, BM, BK
    )
    ranks = tl.arange(0, PADDED)
    row_at, real = rows.to(tl.int64)[:, None], (rows < tokens)[:, None] & (ranks < RANK)[None, :]
    at = parts_ptr + (piece * tokens + row_at) * RANK + ranks[None, :]
    step = tl.cast(PIECES * RANK, tl.int64) * tokens
    tl.store(at + part * step, total, mask=real)
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets_ptr + tile * PIECES + piece, 1, sem="acq_rel", scope="gpu")
    if ticket == split - 1:
        tl.store(tickets_ptr + tile * PIECES + piece, 0)
        total = tl.zeros([BM, PADDED], tl.float32)
        for other in range(split):
            total += tl.load(at + other * step, mask=real, other=0.0, cache_modifier=".cg")
        live = tl.zeros([1], tl.int32)
        for lora in range(loras):
            mine = (slot == lora)[:, None]
            low_at = low_ptr + (tl.cast(lora, tl.int64) * tokens + row_at) * columns
            low = tl.where(mine, total, 0.0).to(low_ptr.dtype.element_ty)
            tl.store(low_at + piece * RANK + ranks[None, :], low, mask=real)
            if piece == PIECES - 1:
                filling = PIECES * RANK + tl.arange(0, TAIL)[None, :]
                zeros = tl.zeros([BM, TAIL], low_ptr.dtype.element_ty)
                tl.store(low_at + filling, zeros, mask=(rows < tokens)[:, None] & (filling < columns))
            live |= tl.where(tl.max((slot == lora).to(tl.int32), axis=0) > 0, 1 << lora, 0)
        if piece == 0:
            tl.store(live_ptr + tile + tl.arange(0, 1), live)
