"""y = (x · W̃ᵀ) · g with W̃ decoded on its way into the tensor cores, for Hopper GPUs.

Written in Gluon, Triton's lower level (`triton.experimental.gluon`), since the products of `tl.dot` wait for each other
when an operand is made in registers. A program is one loading warp and some warpgroups, each with its own 64 outputs.
The loading warp moves tiles of W̃ (`tiles.py`) and of x through a ring in shared memory by TMA; a warpgroup decodes
64 × 64 weights into registers, where they are the left operand of `wgmma`, while its product before runs. The result is
W̃ · xᵀ: only the left operand may come from registers, and tokens may then be as few as 8. What is decoded is W̃ · 2⁻⁷
(`tile_operands.py`); the end multiplies by g · 2⁷.

The programs, as many as fit on the GPU at once, share the tiles by stream-K (`stream_k.py`); a second kernel adds the
pieces. Few parts of a tile spare pieces, many even out the work.

The kernel starts before the one before it has ended (`dependent_launch.py`), and waits for it before it reads x.

LoRA (`low_rank.py`) is part of the launch: slices of A · x before the shares, B · (A · x) at a tile's end. Whoever has
a tile's first part adds it: as programs take their parts in order, that is the last thing that they do.

Legend: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerld_kernels.dependent_launch import gluon_wait_for_the_kernel_before
from qerld_kernels.jit import INTERPRETED, compute_capability, copy_tile, gl, gluon_jit, hopper
from qerld_kernels.lora import three
from qerld_kernels.low_rank import (
    LOW_COLUMNS,
    NO_SLICES,
    Adapters,
    live_slots,
    load_slices,
    multiply_slices,
    reset_counters,
    slices,
)  # fmt: skip
from qerld_kernels.low_rank_end import add_lora, first_of_b, load_low
from qerld_kernels.stream_k import add_pieces, share, steps_of
from qerld_kernels.tile_operands import decode, fetch
from qerld_kernels.tiles import SIDE, Tiles, check_tiles

if hopper is not None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    mbarrier, fence_async_shared = hopper.mbarrier, hopper.fence_async_shared
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait

__all__ = ["Plan", "can_fuse", "fused_product"]

_LOADER_REGISTERS = 24
_REGISTER_FILE = 65536
_PIECE_TOKENS = 32


@dataclass(frozen=True)
class Plan:
    """How to share the work.

    tokens: of a tile, 8 to 256; groups: warpgroups of a program, 1, 2 or 4, 64 outputs each; inputs: of a step, 128 or
    256; stages: steps in flight; programs: on each multiprocessor, whose registers they divide among them; parts: of a
    tile, at most.
    """

    tokens: int
    groups: int
    inputs: int
    stages: int
    programs: int
    parts: int = 1 << 16

    def __post_init__(self) -> None:
        """With one product a step, its operand's registers would be given the next operand while it still reads them.

        A step's room is given back while the first product of the next one runs, which needs the one after.
        """
        if self.inputs not in (2 * SIDE, 4 * SIDE) or self.stages < 2:
            raise ValueError(f"a plan needs steps of 128 or 256 inputs and 2 stages, got {self.inputs}, {self.stages}")

    @property
    def registers(self) -> int:
        """A thread's, on average; the loading warp counts as a warpgroup, and leaves most of its own to the others."""
        return min(168, _REGISTER_FILE // (128 * (self.groups + 1) * self.programs) // 8 * 8)


def can_fuse(x: Tensor) -> bool:
    """Whether the kernel runs where x is: Hopper, with a Triton that has Gluon."""
    return hopper is not None and not INTERPRETED and x.is_cuda and compute_capability(x.device) == 9


def fused_product(
    x: Tensor,
    tiles: Tiles,
    outputs: int,
    scale: float,
    plan: Plan,
    adapters: Adapters | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return (x · W̃ᵀ) · scale [M, N], plus LoRA's share, for x [M, K] in bf16 or fp16; out: [M, N] to write it to.

    The launch before this one may still write x, but not the adapters or slots.

    Raises:
        ValueError: a shape, dtype or layout does not fit, or the product is too large for 32-bit places.
    """
    tokens, inputs = x.shape
    check_tiles(tiles, outputs, inputs)
    y = x.new_empty(tokens, outputs) if out is None else out
    if tokens == 0:
        return y
    x = _aligned(x)
    tile_rows, columns = -(-outputs // (SIDE * plan.groups)), tiles.words.shape[1]
    token_tiles, chunk = -(-tokens // plan.tokens), plan.inputs // SIDE
    steps = -(-columns // chunk)
    part = -(-steps // (adapters.sharing if adapters else plan).parts)
    parts = -(-steps // part)
    work = tile_rows * token_tiles * parts
    programs = _multiprocessors(x.device) * plan.programs
    own = NO_SLICES
    if adapters is not None:
        adapters.check(x)
        blocks = -(-adapters.low_steps // plan.groups)
        own = slices(adapters.sharing, token_tiles * blocks, steps, programs, work)
    programs = min(programs, work + own.programs)
    if work * (programs + 1) >= 1 << 31:
        raise ValueError(f"x: {tokens} tokens are too many for {outputs} outputs and {inputs} inputs; split x")
    swizzled, tile = gl.NVMMASharedLayout(128, 16, 2), plan.groups * SIDE * plan.tokens
    lora = _Lora.of(x, adapters, outputs, own.count * tile)
    pieces = torch.empty(programs * 2 * tile, dtype=torch.float32, device=x.device)
    _kernel[(programs,)](
        TensorDescriptor(x, [tokens, inputs], [x.stride(0), 1], [plan.tokens, SIDE], swizzled),
        _flat(tiles.words, 256 * chunk, 64),
        _flat(tiles.scale, SIDE * chunk, 32),
        TensorDescriptor(lora.low, [*lora.low.shape], [lora.low.stride(0), 1], [plan.tokens, LOW_COLUMNS], swizzled),
        y, pieces, *three(lora.a), *three(lora.b), lora.slots, lora.sums, lora.low, lora.counters,
        scale * 2**7, tokens, inputs, outputs, columns, token_tiles, part, parts, *lora.begins, lora.loras,
        own.count, own.splits, own.steps, own.programs, own.parts,
        PIECES=lora.pieces, RANK=lora.rank, LOW_STEPS=adapters.low_steps if adapters else 0,
        GROUPS=plan.groups, TOKENS=plan.tokens, CHUNK=chunk, STAGES=plan.stages, LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4 * plan.groups, maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip
    if parts > 1 and (adapters is not None or work % programs or work // programs % parts):  # some tile was shared
        rows = min(plan.tokens, _PIECE_TOKENS)
        add_pieces[(tile_rows * token_tiles, plan.groups * (plan.tokens // rows))](
            pieces, y, scale * 2**7, tokens, outputs, parts, token_tiles, programs, work,
            own.programs, own.parts,
            PDL=True, SCALED_HEAD=adapters is not None, GROUPS=plan.groups, TOKENS=plan.tokens, ROWS=rows,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return y


class _Lora(NamedTuple):
    """Arguments of the kernel."""

    a: list[Tensor]
    b: list[Tensor]
    slots: Tensor
    counters: Tensor
    sums: Tensor
    low: Tensor
    begins: list[int]
    loras: int
    pieces: int
    rank: int

    @classmethod
    def of(cls, x: Tensor, adapters: Adapters | None, outputs: int, sums: int) -> _Lora:
        """With room for that many sums, and for A · x as `low_rank_reference` has it; without LoRA, placeholders."""
        if adapters is None:
            return cls([x], [x], x, x, x, x, [outputs, outputs], 0, 0, 0)
        (loras, _, _, rank), pieces = adapters.b[0].shape, len(adapters.b)
        begins = [*accumulate(up.shape[2] for up in adapters.b), outputs][:2]
        low = x.new_empty(loras * x.shape[0], adapters.low_steps * LOW_COLUMNS)
        room = torch.empty(sums, dtype=torch.float32, device=x.device)
        return cls(adapters.a, adapters.b, adapters.slots, adapters.counters, room, low, begins, loras, pieces, rank)


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if its rows do not begin at multiples of 16 bytes, which TMA asks for."""
    fits = x.stride(1) == 1 and x.stride(0) % 8 == x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _flat(tensor: Tensor, block: int, bits: int) -> Any:
    return TensorDescriptor(tensor, [tensor.numel()], [1], [block], gl.NVMMASharedLayout(0, bits, 1))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@partial(
    gluon_jit,
    do_not_specialize=[
        "tokens", "token_tiles", "part", "parts", "loras",
        "slice_count", "splits", "slice_steps", "with_slices", "their_parts",
    ],
)  # fmt: skip
def _kernel(
    x_desc, words_desc, scale_desc, low_desc, y_ptr, pieces_ptr, a0_ptr, a1_ptr, a2_ptr, b0_ptr, b1_ptr, b2_ptr,
    slots_ptr, sums_ptr, low_ptr, counters_ptr, factor, tokens, inputs, outputs, columns, token_tiles, part, parts,
    begin1, begin2, loras, slice_count, splits, slice_steps, with_slices, their_parts,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Share the work among the warps."""
    BF16: gl.constexpr = y_ptr.dtype.element_ty == gl.bfloat16
    x_ring = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [STAGES * CHUNK, TOKENS, 64], x_desc.layout)
    words_ring = gl.allocate_shared_memory(gl.int64, [STAGES, GROUPS * CHUNK * 256], words_desc.layout)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, GROUPS * CHUNK * 64], scale_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 1)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (x_ring, words_ring, scale_ring, full, empty, y_ptr, pieces_ptr, a0_ptr, a1_ptr, a2_ptr,
                     b0_ptr, b1_ptr, b2_ptr, slots_ptr, sums_ptr, low_ptr, counters_ptr, factor, tokens, inputs,
                     outputs, columns, token_tiles, part, parts, begin1, begin2, loras, slice_count, splits,
                     slice_steps, with_slices, their_parts,
                     PIECES, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES, BF16)),
        (_load, (x_desc, words_desc, scale_desc, low_desc, x_ring, words_ring, scale_ring, full, empty, slots_ptr,
                 counters_ptr, tokens, outputs, columns, token_tiles, part, parts, begin1, begin2, loras,
                 slice_count, splits, slice_steps, with_slices, their_parts,
                 PIECES, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES)),
    ], [1], [LOADER_REGISTERS])  # fmt: skip


@gluon_jit
def _load(
    x_desc, words_desc, scale_desc, low_desc, x_ring, words_ring, scale_ring, full, empty, slots_ptr, counters_ptr,
    tokens, outputs, columns, token_tiles, part, parts, begin1, begin2, loras,
    slice_count, splits, slice_steps, with_slices, their_parts,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring, step after step, across tiles."""
    unit, end = share(outputs, token_tiles, parts, with_slices, their_parts, GROUPS)
    turn = 0
    known = -1  # the first of the tokens of which `live` tells the slots
    live = 0
    if PIECES > 0:
        turn = load_slices(
            x_desc, x_ring, full, empty, slots_ptr, turn, tokens, columns, slice_count, splits, slice_steps, loras,
            LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES,
        )  # fmt: skip
    while unit < end:
        begin = unit
        tile, first, last, unit = steps_of(begin, end, columns, part, parts, CHUNK)
        token = (tile % token_tiles) * TOKENS
        row = (tile // token_tiles) * GROUPS
        for step in range(first, last):
            column = step * CHUNK
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            arrived = full.index(stage)
            mbarrier.expect(arrived, CHUNK * TOKENS * 128 + GROUPS * CHUNK * (2048 + 256))
            for group in gl.static_range(GROUPS):
                at = (row + group) * columns + column
                words = words_ring.index(stage).slice(group * CHUNK * 256, CHUNK * 256, 0)
                copy_tile(words_desc, [at * 256], arrived, words)
                copy_tile(
                    scale_desc, [at * 64], arrived, scale_ring.index(stage).slice(group * CHUNK * 64, CHUNK * 64, 0)
                )
            gluon_wait_for_the_kernel_before()
            for place in gl.static_range(CHUNK):
                copy_tile(x_desc, [token, (column + place) * 64], arrived, x_ring.index(stage * CHUNK + place))
            turn += 1
        if PIECES > 0:  # noqa: SIM102 - the outer one is settled when it is compiled
            if begin == tile * parts:
                if token != known:
                    live = live_slots(slots_ptr, token, tokens, loras, TOKENS, 1)
                    known = token
                turn = load_low(
                    low_desc, x_ring, full, empty, counters_ptr, live, turn, tile % token_tiles, row * 64,
                    tokens, begin1, begin2, splits, loras, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES,
                )  # fmt: skip
    if PIECES > 0:
        reset_counters(counters_ptr, token_tiles)


@gluon_jit
def _multiply(
    x_ring, words_ring, scale_ring, full, empty, y_ptr, pieces_ptr, a0_ptr, a1_ptr, a2_ptr, b0_ptr, b1_ptr, b2_ptr,
    slots_ptr, sums_ptr, low_ptr, counters_ptr, factor, tokens, inputs, outputs, columns, token_tiles, part, parts,
    begin1, begin2, loras, slice_count, splits, slice_steps, with_slices, their_parts,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """All warpgroups, 64 outputs of each of the program's tiles each."""
    ROWS: gl.constexpr = 64 * GROUPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, TOKENS, 16])
    unit, end = share(outputs, token_tiles, parts, with_slices, their_parts, GROUPS)
    turn = 0
    known = -1
    live = 0
    if PIECES > 0:
        turn = multiply_slices(
            x_ring, full, empty, a0_ptr, a1_ptr, a2_ptr, slots_ptr, sums_ptr, low_ptr, counters_ptr,
            turn, tokens, inputs, columns, slice_count, splits, slice_steps, loras,
            PIECES, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES, mma,
        )  # fmt: skip
    while unit < end:
        begin = unit
        tile, first, last, unit = steps_of(begin, end, columns, part, parts, CHUNK)
        row = (tile // token_tiles) * ROWS
        token = (tile % token_tiles) * TOKENS
        if PIECES > 0:  # noqa: SIM102 - the outer one is settled when it is compiled
            if token != known:
                live = live_slots(slots_ptr, token, tokens, loras, TOKENS, 4 * GROUPS)
                known = token
        total = gl.zeros([ROWS, TOKENS], gl.float32, mma)
        mbarrier.wait(full.index(turn % STAGES), (turn // STAGES) & 1)
        words, scales = fetch(words_ring, scale_ring, turn % STAGES, GROUPS, CHUNK)
        weight = decode(words[0], scales[0], mma, BF16)
        for step in range(first, last - 1):
            for place in gl.static_range(CHUNK):
                if place == CHUNK - 1:
                    following = turn + 1
                    mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
                    words, scales = fetch(words_ring, scale_ring, following % STAGES, GROUPS, CHUNK)
                x = x_ring.index(turn % STAGES * CHUNK + place).permute((1, 0))
                total = warpgroup_mma(weight, x, total, is_async=True)
                # One product runs while the next operand is made and the product before it is waited for.
                after = decode(words[(place + 1) % CHUNK], scales[(place + 1) % CHUNK], mma, BF16)
                total, after = warpgroup_mma_wait(1, deps=[total, after])
                # No product reads the step before any more. Its place is no variable of the loop: one with the value of
                # another before the loop, that is given the other again at its end, Triton takes for one not changed.
                if place == 0:
                    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=step > first)
                weight = after
            turn += 1
        if PIECES > 0:
            b = first_of_b(
                begin == tile * parts, live, b0_ptr, b1_ptr, b2_ptr, row, outputs, begin1, begin2, loras,
                PIECES, RANK, LOW_STEPS, GROUPS, mma,
            )  # fmt: skip
        for place in gl.static_range(CHUNK):
            x = x_ring.index(turn % STAGES * CHUNK + place).permute((1, 0))
            total = warpgroup_mma(weight, x, total, is_async=True)
            if place < CHUNK - 1:
                after = decode(words[place + 1], scales[place + 1], mma, BF16)
                total, after = warpgroup_mma_wait(1, deps=[total, after])
                weight = after
            else:
                total, weight = warpgroup_mma_wait(0, deps=[total, weight])
            if place == 0:
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=last - first > 1)
        mbarrier.arrive(empty.index(turn % STAGES))
        turn += 1
        if PIECES > 0:  # noqa: SIM102 - the outer one is settled when it is compiled
            if begin == tile * parts:
                total, turn = add_lora(
                    total * factor, turn, live, b, x_ring, full, empty, b0_ptr, b1_ptr, b2_ptr, row, outputs,
                    begin1, begin2, loras, PIECES, RANK, LOW_STEPS, GROUPS, CHUNK, STAGES, mma,
                )  # fmt: skip
        if unit - begin == parts:
            _store(total, y_ptr, 1.0 if PIECES > 0 else factor, tokens, outputs, row, token, GROUPS, TOKENS)
        else:
            slot = gl.program_id(0) * 2 + (begin == tile * parts).to(gl.int32)  # 1: the tile's first part is here
            n = gl.arange(0, ROWS, gl.SliceLayout(1, mma))[:, None]
            m = gl.arange(0, TOKENS, gl.SliceLayout(0, mma))[None, :]
            gl.store(pieces_ptr + slot.to(gl.int64) * (ROWS * TOKENS) + n * TOKENS + m, total)


@gluon_jit
def _store(total, y_ptr, factor, tokens, outputs, output, token, GROUPS: gl.constexpr, TOKENS: gl.constexpr):
    """A whole tile, rounded."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [GROUPS, 4], [0, 1])
    value = gl.convert_layout((total * factor).to(y_ptr.dtype.element_ty), layout)
    n = (output + gl.arange(0, 64 * GROUPS, gl.SliceLayout(1, layout)))[:, None]
    m = (token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout)))[None, :]
    gl.store(y_ptr + m.to(gl.int64) * outputs + n, value, mask=(n < outputs) & (m < tokens))
