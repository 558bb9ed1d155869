"""A · x of LoRA within the launch of the fused product (`fused_product.py`), in Gluon.

As in `lora.py`, but rows of A are one more kind of left operand, and x comes through the ring: before its share of the
base product, a program may have a slice of A · x, some of K for 64 rows of A (or more, 64 a warpgroup) and a tile of
tokens. The fp32 sums of the slices meet in memory, where they are added in order and rounded to x's dtype, as PEFT and
vLLM do. Programs wait for them when they come to a tile's end (`low_rank_end.py`).

So programs wait for others: all must be on the GPU at once, or come in order. They do: slices belong to the first
programs, which a GPU starts first, and no slice waits for anything but slices.

Legend: as `lora.py`. The pieces' ranks are stacked: rank r of piece s is row s · R + r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qerld_kernels.dependent_launch import gluon_wait_for_the_kernel_before
from qerld_kernels.jit import constant, copy_tile, gl, gluon_jit, hopper

if hopper is not None:
    mbarrier, warpgroup_mma, warpgroup_mma_wait = hopper.mbarrier, hopper.warpgroup_mma, hopper.warpgroup_mma_wait

__all__ = [
    "LOW_COLUMNS", "NO_SLICES", "READY", "STRIDE", "Adapters", "Sharing", "Slices", "await_warps", "counters_for",
    "live_slots", "load_slices", "low_rank_reference", "multiply_slices", "piece_of", "reset_counters", "slices",
]  # fmt: skip

LOW_COLUMNS = 64
"""Ranks of a step of B · (A · x)."""
_COUNTERS = 8


@dataclass(frozen=True)
class Sharing:
    """How A · x shares the launch with the base product.

    splits: of a tile's K, at most, each a slice; parts: of a tile of the base product, at most, as of a plan without
    LoRA; share: what a program with a slice does of the base product, in shares of the others.
    """

    splits: int
    parts: int = 1 << 16
    share: float = 0.0


@dataclass(frozen=True)
class Adapters:
    """a, b, slots: of `add_lora`. No launch just before the product's may write them.

    counters: int32, `counters_for` of them or more, zero before and after; no other stream may use them meanwhile.
    """

    a: list[Tensor]
    b: list[Tensor]
    slots: Tensor
    counters: Tensor
    sharing: Sharing

    @property
    def low_steps(self) -> int:
        """Blocks of `LOW_COLUMNS` ranks of all pieces."""
        return -(-len(self.a) * self.a[0].shape[2] // LOW_COLUMNS)

    def check(self, x: Tensor) -> None:
        """Raises ValueError: the counters are too few, of another dtype or on another device than x."""
        needed, found = counters_for(x.shape[0]), self.counters
        if found.dtype != torch.int32 or found.device != x.device or found.numel() < needed:
            raise ValueError(
                f"counters: must be {needed} int32 or more on {x.device}, got {tuple(found.shape)} {found.dtype} "
                f"on {found.device}"
            )


@dataclass(frozen=True)
class Slices:
    """Who computes A · x: each tile of tokens and block of rows of A in `splits` slices of `steps` steps along K.

    programs: that have slices, the first ones; parts: of the base product that these share, the others the rest.
    """

    count: int
    splits: int
    steps: int
    programs: int
    parts: int


NO_SLICES = Slices(0, 1, 1, 0, 0)


def counters_for(tokens: int) -> int:
    """How many counters products of up to so many tokens need."""
    return _COUNTERS * -(-tokens // 8)


def slices(sharing: Sharing, tiles: int, steps: int, programs: int, work: int) -> Slices:
    """Slices of that many tiles of A · x, of so many steps along K; work: parts of the base product."""
    own = -(-steps // max(1, min(sharing.splits, steps, programs // tiles)))
    splits = -(-steps // own)
    ours = min(tiles * splits, programs)
    others = programs - ours
    parts = work if others == 0 else int(work * ours * sharing.share / (ours * sharing.share + others))
    return Slices(tiles * splits, splits, own, ours, parts)


def low_rank_reference(x: Tensor, a: list[Tensor], slots: Tensor) -> Tensor:
    """A · x [L, T, S · R] in plain torch: row t of slot l is zero where token t is not in it."""
    (tokens, _), (loras, _, rank, _) = x.shape, a[0].shape
    low = torch.zeros(loras, tokens, len(a) * rank, dtype=x.dtype, device=x.device)
    for lora in range(loras):
        rows = (slots[:tokens] == lora).nonzero().squeeze(1)
        for piece, down in enumerate(a):
            columns = slice(piece * rank, piece * rank + rank)
            low[lora, rows, columns] = (x[rows].float() @ down[lora, 0].float().T).to(x.dtype)
    return low


# One arrival a warp: additions to one address go one after the other.
_ARRIVE = constant("""{ .reg .pred p; .reg .b32 n;
    bar.warp.sync 0xffffffff; mov.u32 n, %laneid; setp.eq.u32 p, n, 0;
    @p red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0; }""")
_AWAIT = constant("""{ .reg .pred p; .reg .b32 n;
    again: ld.acquire.gpu.global.u32 n, [$1]; setp.lo.u32 p, n, $2; @p nanosleep.u32 32; @p bra again;
    fence.proxy.async.global; mov.u32 $0, 0; }""")
_EXITS = constant(7)  # of programs; in the first tile's counters
READY = constant(6)  # among the counters of a tile of tokens; those before are the tickets of its blocks of rows of A
STRIDE = constant(_COUNTERS)


@gluon_jit
def _arrive(counter_ptr):
    """What the warps wrote is there for whoever waits for the counter."""
    gl.inline_asm_elementwise(
        _ARRIVE, "=r,l", [counter_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon_jit
def await_warps(counter_ptr, warps):
    """Until so many warps have arrived."""
    gl.inline_asm_elementwise(
        _AWAIT, "=r,l,r", [counter_ptr.to(gl.int64), warps], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon_jit
def _or(a, b):
    return a | b


@gluon_jit
def live_slots(slots_ptr, token, tokens, loras, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Bit l: a token of the tile is in slot l; each warp finds it for itself."""
    bases: gl.constexpr = [[1], [2], [4], [0 if TOKENS < 16 else 8], [0 if TOKENS < 32 else 16]]
    more: gl.constexpr = (
        ([[32]] if TOKENS > 32 else []) + ([[64]] if TOKENS > 64 else []) + ([[128]] if TOKENS > 128 else [])
    )
    warps: gl.constexpr = (
        [] if WARPS == 1 else [[0], [0]] if WARPS == 4 else [[0], [0], [0]] if WARPS == 8 else [[0], [0], [0], [0]]
    )
    layout: gl.constexpr = gl.DistributedLinearLayout(more, bases, warps, [], [TOKENS])
    t = token + gl.arange(0, TOKENS, layout)
    slot = gl.load(slots_ptr + t, mask=t < tokens, other=-1).to(gl.int32)
    bit = gl.where((slot >= 0) & (slot < loras), 1 << (slot & 31), 0)
    # The turns of the ring follow from it. `redux` tells ptxas that all threads have the same: what is not uniform to
    # it, it computes in each thread, a fifth more instructions in the loops.
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [gl.reduce(bit, 0, _or)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon_jit
def _slice(unit, columns, splits, own, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, CHUNK: gl.constexpr):
    """The tile of tokens, block of rows of A, split, and first and last (excluded) step of a slice."""
    blocks: gl.constexpr = (LOW_STEPS + GROUPS - 1) // GROUPS
    tile = unit // (splits * blocks)
    block = unit // splits % blocks
    split = unit % splits
    return tile, block, split, split * own, gl.minimum(split * own + own, gl.cdiv(columns, CHUNK))


@gluon_jit
def load_slices(
    x_desc, x_ring, full, empty, slots_ptr, turn, tokens, columns, slice_count, splits, own, loras,
    LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """x for this program's slices, and the ring's turn after them."""
    for unit in range(gl.program_id(0), slice_count, gl.num_programs(0)):
        tile, _block, _split, first, last = _slice(unit, columns, splits, own, LOW_STEPS, GROUPS, CHUNK)
        live = live_slots(slots_ptr, tile * TOKENS, tokens, loras, TOKENS, 1)
        gluon_wait_for_the_kernel_before()
        for lora in range(loras):
            if (live >> lora) & 1 != 0:
                for step in range(first, last):
                    stage = turn % STAGES
                    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                    arrived = full.index(stage)
                    mbarrier.expect(arrived, CHUNK * TOKENS * 128)
                    for own_column in gl.static_range(CHUNK):
                        place = [tile * TOKENS, (step * CHUNK + own_column) * 64]
                        copy_tile(x_desc, place, arrived, x_ring.index(stage * CHUNK + own_column))
                    turn += 1
    return turn


@gluon_jit
def reset_counters(counters_ptr, token_tiles):
    """By the last program to come here, when nobody waits any more."""
    gluon_wait_for_the_kernel_before()  # which had these counters; a program without work has not waited yet
    before = gl.atomic_add(counters_ptr + _EXITS, 1, sem="acq_rel", scope="gpu")
    if before == gl.num_programs(0) - 1:
        place = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for at in range(0, token_tiles * STRIDE, 32):
            gl.store(counters_ptr + at + place, gl.zeros_like(place), mask=at + place < token_tiles * STRIDE)


@gluon_jit
def multiply_slices(
    x_ring, full, empty, a0_ptr, a1_ptr, a2_ptr, slots_ptr, sums_ptr, low_ptr, counters_ptr,
    turn, tokens, inputs, columns, slice_count, splits, own, loras,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """This program's slices of A · x, and the ring's turn after them."""
    ROWS: gl.constexpr = 64 * GROUPS
    for unit in range(gl.program_id(0), slice_count, gl.num_programs(0)):
        tile, block, split, first, last = _slice(unit, columns, splits, own, LOW_STEPS, GROUPS, CHUNK)
        live = live_slots(slots_ptr, tile * TOKENS, tokens, loras, TOKENS, 4 * GROUPS)
        for lora in range(loras):
            if (live >> lora) & 1 != 0:
                total = gl.zeros([ROWS, TOKENS], gl.float32, mma)
                for step in range(first, last):
                    a = _rows_of_a(
                        a0_ptr, a1_ptr, a2_ptr, lora, block * ROWS, step * (64 * CHUNK), inputs,
                        PIECES, RANK, GROUPS, CHUNK, mma,
                    )  # fmt: skip
                    stage = turn % STAGES
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                    for place in gl.static_range(CHUNK):
                        x = x_ring.index(stage * CHUNK + place).permute((1, 0))
                        total = warpgroup_mma(a[place], x, total, is_async=True)
                    if CHUNK == 2:
                        total, _a0, _a1 = warpgroup_mma_wait(0, deps=[total, a[0], a[1]])
                    else:
                        total, _a0, _a1, _a2, _a3 = warpgroup_mma_wait(0, deps=[total, a[0], a[1], a[2], a[3]])
                    mbarrier.arrive(empty.index(stage))
                    turn += 1
                n = gl.arange(0, ROWS, gl.SliceLayout(1, mma))[:, None]
                m = gl.arange(0, TOKENS, gl.SliceLayout(0, mma))
                t = tile * TOKENS + m
                slot = gl.load(slots_ptr + t, mask=t < tokens, other=-1)
                at = _sums_of(sums_ptr, unit, ROWS * TOKENS) + m[None, :] * ROWS + n
                gl.store(at, total, mask=(slot == lora)[None, :] & (block * ROWS + n < PIECES * RANK))
        gluon_wait_for_the_kernel_before()  # whose counters these were
        _arrive(counters_ptr + tile * STRIDE + block)
        CHUNK_TOKENS: gl.constexpr = 8 if TOKENS <= 64 else 16
        if split < TOKENS // CHUNK_TOKENS:
            await_warps(counters_ptr + tile * STRIDE + block, splits * (4 * GROUPS))
        for chunk in range(split, TOKENS // CHUNK_TOKENS, splits):
            _add_sums(
                _sums_of(sums_ptr, unit - split, ROWS * TOKENS), low_ptr, slots_ptr, live,
                tile, block, chunk, tokens, splits, loras,
                PIECES, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK_TOKENS, 128 // CHUNK_TOKENS,
            )  # fmt: skip
        _arrive(counters_ptr + tile * STRIDE + READY)
    return turn


@gluon_jit
def _sums_of(sums_ptr, unit, SIZE: gl.constexpr):
    return sums_ptr + unit.to(gl.int64) * SIZE


@gluon_jit
def _add_sums(
    sums_ptr, low_ptr, slots_ptr, live, tile, block, chunk, tokens, splits, loras,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr,
    CHUNK_TOKENS: gl.constexpr, CHUNK_PARTS: gl.constexpr,
):  # fmt: skip
    """A · x of some tokens: all slices' sums, in order."""
    ROWS: gl.constexpr = 64 * GROUPS
    lanes: gl.constexpr = 16 if GROUPS == 1 else 32
    layout: gl.constexpr = gl.BlockedLayout([CHUNK_PARTS, 1, 4], [1, 32 // lanes, lanes], [1, 4 * GROUPS, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(0, layout)
    p = gl.arange(0, CHUNK_PARTS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    m = gl.arange(0, CHUNK_TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    n = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    total = gl.zeros([CHUNK_TOKENS, ROWS], gl.float32, flat)
    for base in range(0, splits, CHUNK_PARTS):
        at = sums_ptr + (base + p) * (ROWS * TOKENS) + (chunk * CHUNK_TOKENS + m) * ROWS + n
        mask = (base + p < splits) & (block * ROWS + n < PIECES * RANK)
        total += gl.sum(gl.load(at, mask=mask, other=0.0, cache_modifier=".cg"), 0)
    t = tile * TOKENS + chunk * CHUNK_TOKENS + gl.arange(0, CHUNK_TOKENS, gl.SliceLayout(1, flat))
    rank = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, flat))[None, :]
    slot = gl.load(slots_ptr + t, mask=t < tokens, other=-1)[:, None]
    t = t[:, None].to(gl.int64)
    for lora in range(loras):
        if (live >> lora) & 1 != 0:
            value = gl.where(slot == lora, total, 0.0).to(low_ptr.dtype.element_ty)
            at = low_ptr + (lora * tokens + t) * (64 * LOW_STEPS) + rank
            gl.store(at, value, mask=(t < tokens) & (rank < 64 * LOW_STEPS))


@gluon_jit
def _rows_of_a(
    a0_ptr, a1_ptr, a2_ptr, lora, row, column, inputs,
    PIECES: gl.constexpr, RANK: gl.constexpr, GROUPS: gl.constexpr, CHUNK: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Rows of A[lora] of all pieces, on top of each other, and a step's columns, a tuple of 64 each."""
    one = _tile_of_a(a0_ptr, a1_ptr, a2_ptr, lora, row, column, inputs, PIECES, RANK, GROUPS, mma)
    two = _tile_of_a(a0_ptr, a1_ptr, a2_ptr, lora, row, column + 64, inputs, PIECES, RANK, GROUPS, mma)
    if CHUNK == 2:
        return (one, two)
    else:  # noqa: RET505 - Gluon compiles what follows a return too
        three = _tile_of_a(a0_ptr, a1_ptr, a2_ptr, lora, row, column + 128, inputs, PIECES, RANK, GROUPS, mma)
        four = _tile_of_a(a0_ptr, a1_ptr, a2_ptr, lora, row, column + 192, inputs, PIECES, RANK, GROUPS, mma)
        return (one, two, three, four)


@gluon_jit
def _tile_of_a(
    a0_ptr, a1_ptr, a2_ptr, lora, row, column, inputs,
    PIECES: gl.constexpr, RANK: gl.constexpr, GROUPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    dot: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    r = (row + gl.arange(0, 64 * GROUPS, gl.SliceLayout(1, dot)))[:, None]
    k = (column + gl.arange(0, 64, gl.SliceLayout(0, dot)))[None, :]
    a_ptr = piece_of(a0_ptr, a1_ptr, a2_ptr, r, RANK, 2 * RANK, PIECES)
    at = lora.to(gl.int64) * (RANK * inputs) + (r % RANK) * inputs + k
    return gl.load(a_ptr + at, mask=(r < PIECES * RANK) & (k < inputs), other=0.0)


@gluon_jit
def piece_of(ptr0, ptr1, ptr2, at, begin1, begin2, PIECES: gl.constexpr):
    """Of three, by where the pieces begin: one load is on its way, and not one that waits for another."""
    if PIECES == 1:
        return ptr0
    elif PIECES == 2:  # noqa: RET505 - Gluon compiles what follows a return too
        return gl.where(at < begin1, ptr0, ptr1)
    else:
        return gl.where(at < begin1, ptr0, gl.where(at < begin2, ptr1, ptr2))
