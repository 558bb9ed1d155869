"""y = (x · W̃ᵀ) · g with W̃ decoded on its way into the tensor cores, for Hopper GPUs.

Written in Gluon, Triton's lower level (`triton.experimental.gluon`), since the products of `tl.dot` wait for each other
when an operand is made in registers. A program is one loading warp and some warpgroups, each with its own 64 outputs.
The loading warp moves tiles of W̃ (`tiles.py`) and of x through a ring in shared memory by TMA; a warpgroup decodes
64 × 64 weights into registers, where they are the left operand of `wgmma`, while its product before runs. The result is
W̃ · xᵀ: only the left operand may come from registers, and tokens may then be as few as 8. What is decoded is W̃ · 2⁻⁷
(`tile_operands.py`); the end multiplies by g · 2⁷.

Stream-K (arXiv 2301.03598): a tile's steps along K are a number of parts, and the programs, as many as fit on the GPU
at once, share the parts of all tiles evenly. What they hold of a tile that others worked on as well goes to a buffer,
and a second kernel adds the pieces in order, so that results do not depend on timing. Few parts spare pieces, many even
out the work.

Without LoRA, the kernel starts before the one before it has ended (`dependent_launch.py`), and waits for it before it
reads x. With it, A · x comes from a kernel (`low_rank.py`) that has waited for x already and runs beside this one until
this one comes to a tile's end. There B · (A · x) is one more step or more for each adapter with a token in the tile: B
is the left operand, read from where it lies, and A · x the right one, through the ring. B must be finite: 0 · ∞ would
reach tokens of other adapters.

Legend: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from qerld_kernels.dependent_launch import wait_for_the_kernel_before
from qerld_kernels.jit import INTERPRETED, compute_capability, gl, gluon_jit, hopper, jit, tl
from qerld_kernels.low_rank import LOW_COLUMNS, LowRank
from qerld_kernels.tile_operands import decode, fetch
from qerld_kernels.tiles import SIDE, Tiles, check_tiles

if hopper is not None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    mbarrier, fence_async_shared = hopper.mbarrier, hopper.fence_async_shared
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    # Named so since Triton 3.9.
    copy_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared

__all__ = ["Plan", "aligned", "can_fuse", "fused_product"]

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
    x: Tensor, tiles: Tiles, outputs: int, scale: float, plan: Plan, lora: LowRank | None = None
) -> Tensor:
    """Return (x · W̃ᵀ) · scale [M, N], plus LoRA's share, for x [M, K] in bf16 or fp16.

    `lora` must come from the launch just before this one, and x from before that, `aligned`: the two run at the same
    time.

    Raises:
        ValueError: a shape, dtype or layout does not fit, or the product is too large for 32-bit places.
    """
    tokens, inputs = x.shape
    check_tiles(tiles, outputs, inputs)
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return y
    if lora is None:
        x = aligned(x)
    tile_rows, columns = -(-outputs // (SIDE * plan.groups)), tiles.words.shape[1]
    token_tiles, chunk = -(-tokens // plan.tokens), plan.inputs // SIDE
    steps = -(-columns // chunk)
    part = -(-steps // plan.parts)
    parts = -(-steps // part)
    work = tile_rows * token_tiles * parts
    programs = min(_multiprocessors(x.device) * plan.programs, work)
    if work * (programs + 1) >= 1 << 31:
        raise ValueError(f"x: {tokens} tokens are too many for {outputs} outputs and {inputs} inputs; split x")
    b = [] if lora is None else lora.b
    begins = [*accumulate(up.shape[2] for up in b), outputs, outputs][:2]
    swizzled = gl.NVMMASharedLayout(128, 16, 2)
    low = x if lora is None else lora.low
    pieces = torch.empty(programs * 2 * plan.groups * SIDE * plan.tokens, dtype=torch.float32, device=x.device)
    _kernel[(programs,)](
        TensorDescriptor(x, [tokens, inputs], [x.stride(0), 1], [plan.tokens, SIDE], swizzled),
        _flat(tiles.words, 256 * chunk, 64),
        _flat(tiles.scale, SIDE * chunk, 32),
        TensorDescriptor(low, [*low.shape], [low.stride(0), 1], [plan.tokens, LOW_COLUMNS], swizzled),
        y, pieces, y if lora is None else lora.live, *[*b, y, y, y][:3],
        scale * 2**7, tokens, outputs, columns, token_tiles, part, parts, *begins, b[0].shape[0] if b else 0,
        PIECES=len(b), RANK=b[0].shape[3] if b else 0, LOW_STEPS=low.shape[1] // LOW_COLUMNS if b else 0,
        GROUPS=plan.groups, TOKENS=plan.tokens, CHUNK=chunk, STAGES=plan.stages, LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4 * plan.groups, maxnreg=plan.registers, launch_pdl=True,
    )  # fmt: skip
    if parts > 1 and (work % programs or work // programs % parts):  # some tile was shared
        rows = min(plan.tokens, _PIECE_TOKENS)
        _add_pieces[(tile_rows * token_tiles, plan.groups * (plan.tokens // rows))](
            pieces, y, scale * 2**7, tokens, outputs, parts, token_tiles, programs, work,
            PDL=True, SCALED_TAIL=lora is not None, GROUPS=plan.groups, TOKENS=plan.tokens, ROWS=rows,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return y


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if its rows do not begin at multiples of 16 bytes, which TMA asks for."""
    fits = x.stride(1) == 1 and x.stride(0) % 8 == x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _flat(tensor: Tensor, block: int, bits: int) -> Any:
    return TensorDescriptor(tensor, [tensor.numel()], [1], [block], gl.NVMMASharedLayout(0, bits, 1))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@partial(gluon_jit, do_not_specialize=["tokens", "token_tiles", "part", "parts", "loras"])
def _kernel(
    x_desc, words_desc, scale_desc, low_desc, y_ptr, pieces_ptr, live_ptr, b0_ptr, b1_ptr, b2_ptr,
    factor, tokens, outputs, columns, token_tiles, part, parts, begin1, begin2, loras,
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
        (_multiply, (x_ring, words_ring, scale_ring, full, empty, y_ptr, pieces_ptr, live_ptr, b0_ptr, b1_ptr, b2_ptr,
                     factor, tokens, outputs, columns, token_tiles, part, parts, begin1, begin2, loras,
                     PIECES, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES, BF16)),
        (_load, (x_desc, words_desc, scale_desc, low_desc, x_ring, words_ring, scale_ring, full, empty, live_ptr,
                 tokens, outputs, columns, token_tiles, part, parts, loras,
                 PIECES, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES)),
    ], [1], [LOADER_REGISTERS])  # fmt: skip


@gluon_jit
def _share(outputs, token_tiles, parts, GROUPS: gl.constexpr):
    """Parts of all tiles, and this program's range of them."""
    work = gl.cdiv(outputs, 64 * GROUPS) * token_tiles * parts
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    return work, own * work // programs, (own + 1) * work // programs


@gluon_jit
def _steps(unit, end, columns, part, parts, CHUNK: gl.constexpr):
    """The tile of a part, the range's first and last (excluded) step in it, and where the range goes on."""
    tile = unit // parts
    following = gl.minimum(end, tile * parts + parts)
    first = (unit - tile * parts) * part
    last = gl.minimum((following - tile * parts) * part, gl.cdiv(columns, CHUNK))
    return tile, first, last, following


@gluon_jit
def _load(
    x_desc, words_desc, scale_desc, low_desc, x_ring, words_ring, scale_ring, full, empty, live_ptr,
    tokens, outputs, columns, token_tiles, part, parts, loras,
    PIECES: gl.constexpr, LOW_STEPS: gl.constexpr,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring, step after step, across tiles."""
    _work, unit, end = _share(outputs, token_tiles, parts, GROUPS)
    turn = 0
    while unit < end:
        tile, first, last, unit = _steps(unit, end, columns, part, parts, CHUNK)
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
            if PIECES == 0:
                _wait_for_the_kernel_before()
            for own in gl.static_range(CHUNK):
                copy_tile(x_desc, [token, (column + own) * 64], arrived, x_ring.index(stage * CHUNK + own))
            turn += 1
        if PIECES > 0:  # noqa: SIM102 - the outer one is settled when it is compiled
            if unit == tile * parts + parts:
                live = _live(live_ptr, token, tokens, TOKENS)
                for lora in range(loras):
                    if (live >> lora) & 1 != 0:
                        for block in gl.static_range(LOW_STEPS):
                            stage = turn % STAGES
                            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                            arrived = full.index(stage)
                            mbarrier.expect(arrived, TOKENS * 128)
                            place = [lora * tokens + token, block * 64]
                            copy_tile(low_desc, place, arrived, x_ring.index(stage * CHUNK))
                            turn += 1


@gluon_jit
def _multiply(
    x_ring, words_ring, scale_ring, full, empty, y_ptr, pieces_ptr, live_ptr, b0_ptr, b1_ptr, b2_ptr,
    factor, tokens, outputs, columns, token_tiles, part, parts, begin1, begin2, loras,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr,
    GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, BF16: gl.constexpr,
):  # fmt: skip
    """All warpgroups, 64 outputs of each of the program's tiles each."""
    ROWS: gl.constexpr = 64 * GROUPS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, TOKENS, 16])
    work, unit, end = _share(outputs, token_tiles, parts, GROUPS)
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    turn = 0
    while unit < end:
        begin = unit
        tile, first, last, unit = _steps(begin, end, columns, part, parts, CHUNK)
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
        row = (tile // token_tiles) * ROWS
        token = (tile % token_tiles) * TOKENS
        if PIECES > 0:  # noqa: SIM102 - the outer one is settled when it is compiled
            if unit == tile * parts + parts:
                total, turn = _add_lora(
                    total * factor, turn, x_ring, full, empty, live_ptr, b0_ptr, b1_ptr, b2_ptr, row, token, tokens,
                    outputs, begin1, begin2, loras, PIECES, RANK, LOW_STEPS, GROUPS, TOKENS, CHUNK, STAGES, mma,
                )  # fmt: skip
        if unit - begin == parts:
            _store(total, y_ptr, 1.0 if PIECES > 0 else factor, tokens, outputs, row, token, GROUPS, TOKENS)
        else:
            head = ((tile * parts + 1) * programs - 1) // work  # the program with the tile's first part
            slot = own * 2 + (head == own).to(gl.int32)
            n = gl.arange(0, ROWS, gl.SliceLayout(1, mma))[:, None]
            m = gl.arange(0, TOKENS, gl.SliceLayout(0, mma))[None, :]
            gl.store(pieces_ptr + slot.to(gl.int64) * (ROWS * TOKENS) + n * TOKENS + m, total)


@gluon_jit
def _add_lora(
    total, turn, x_ring, full, empty, live_ptr, b0_ptr, b1_ptr, b2_ptr, row, token, tokens,
    outputs, begin1, begin2, loras,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """B · (A · x) of each adapter in the tile of tokens, and the turn of the ring after it."""
    live = _live(live_ptr, token, tokens, TOKENS)
    for lora in range(loras):
        if (live >> lora) & 1 != 0:
            for block in gl.static_range(LOW_STEPS):
                b = _rows_of_b(
                    b0_ptr, b1_ptr, b2_ptr, lora, row, begin1, begin2, outputs, block * 64, PIECES, RANK, GROUPS, mma
                )
                stage = turn % STAGES
                mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                total = warpgroup_mma(b, x_ring.index(stage * CHUNK).permute((1, 0)), total, is_async=True)
                total, b = warpgroup_mma_wait(0, deps=[total, b])
                mbarrier.arrive(empty.index(stage))
                turn += 1
    return total, turn


@gluon_jit
def _wait_for_the_kernel_before():
    """For its end and all that it wrote; at once when that has been."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _live(live_ptr, token, tokens, TOKENS: gl.constexpr):
    """Bit l: a token of the tile is in slot l; read as soon as the kernel that says so is done."""
    _wait_for_the_kernel_before()
    live = 0
    for tile in gl.static_range((TOKENS + 15) // 16):
        at = token // 16 + tile
        live |= gl.load(live_ptr + at, mask=at * 16 < tokens, other=0)
    return live


@gluon_jit
def _rows_of_b(
    b0_ptr, b1_ptr, b2_ptr, lora, row, begin1, begin2, outputs, column,
    PIECES: gl.constexpr, RANK: gl.constexpr, GROUPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Rows of B[lora] and 64 columns of all pieces, which lie along the diagonal: zeros elsewhere."""
    dot: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    n = (row + gl.arange(0, 64 * GROUPS, gl.SliceLayout(1, dot)))[:, None]
    r = (column + gl.arange(0, 64, gl.SliceLayout(0, dot)))[None, :]
    lora = lora.to(gl.int64)
    b = gl.load(b0_ptr + (lora * begin1 + n) * RANK + r, mask=(n < begin1) & (r < RANK), other=0.0)
    if PIECES > 1:
        own = (n >= begin1) & (n < begin2) & (r >= RANK) & (r < 2 * RANK)
        b = gl.load(b1_ptr + (lora * (begin2 - begin1) + n - begin1) * RANK + r - RANK, mask=own, other=b)
    if PIECES > 2:
        own = (n >= begin2) & (n < outputs) & (r >= 2 * RANK) & (r < 3 * RANK)
        b = gl.load(b2_ptr + (lora * (outputs - begin2) + n - begin2) * RANK + r - 2 * RANK, mask=own, other=b)
    return b


@gluon_jit
def _store(total, y_ptr, factor, tokens, outputs, output, token, GROUPS: gl.constexpr, TOKENS: gl.constexpr):
    """A whole tile, rounded."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [GROUPS, 4], [0, 1])
    value = gl.convert_layout((total * factor).to(y_ptr.dtype.element_ty), layout)
    n = (output + gl.arange(0, 64 * GROUPS, gl.SliceLayout(1, layout)))[:, None]
    m = (token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout)))[None, :]
    gl.store(y_ptr + m.to(gl.int64) * outputs + n, value, mask=(n < outputs) & (m < tokens))


@partial(jit, do_not_specialize=["tokens", "parts", "token_tiles", "programs", "work"])
def _add_pieces(
    pieces_ptr, y_ptr, factor, tokens, outputs, parts, token_tiles, programs, work,
    PDL: tl.constexpr, SCALED_TAIL: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of 64 outputs and ROWS tokens of a tile that several programs worked on; the last may have scaled its piece."""
    tile = tl.program_id(0)
    group, block = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    head = ((tile * parts + 1) * programs - 1) // work
    tail = ((tile * parts + parts) * programs - 1) // work
    if head != tail:
        if PDL:
            wait_for_the_kernel_before()
        m = block * ROWS + tl.arange(0, ROWS)[None, :]
        n = tl.arange(0, 64)[:, None]
        at = n * TOKENS + m
        total = tl.load(pieces_ptr + ((head * 2 + 1) * GROUPS + group).to(tl.int64) * (64 * TOKENS) + at)
        for program in range(head + 1, tail):
            total += tl.load(pieces_ptr + (program * 2 * GROUPS + group).to(tl.int64) * (64 * TOKENS) + at)
        last = tl.load(pieces_ptr + (tail * 2 * GROUPS + group).to(tl.int64) * (64 * TOKENS) + at)
        total = total * factor + last * (1.0 if SCALED_TAIL else factor)
        m += (tile % token_tiles) * TOKENS
        n += ((tile // token_tiles) * GROUPS + group) * 64
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + m.to(tl.int64) * outputs + n, y, mask=(m < tokens) & (n < outputs))
