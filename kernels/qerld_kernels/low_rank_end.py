"""B · (A · x) of LoRA at the end of a tile of the fused product, in Gluon, once A · x is there (`low_rank.py`).

One more step or more for each adapter with a token in the tile: B is the left operand, read from where it lies, and
A · x the right one, through the ring. B must be finite: 0 · ∞ would reach tokens of other adapters.
"""

from __future__ import annotations

from qerld_kernels.jit import copy_tile, gl, gluon_jit, hopper
from qerld_kernels.low_rank import READY, STRIDE, await_warps, piece_of

if hopper is not None:
    mbarrier, warpgroup_mma, warpgroup_mma_wait = hopper.mbarrier, hopper.warpgroup_mma, hopper.warpgroup_mma_wait

__all__ = ["add_lora", "first_of_b", "load_low"]


@gluon_jit
def load_low(
    low_desc, x_ring, full, empty, counters_ptr, live, turn, tile, row, tokens, begin1, begin2, splits, loras,
    RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A · x for the end of a tile, once it is there."""
    blocks: gl.constexpr = (LOW_STEPS + GROUPS - 1) // GROUPS
    await_warps(counters_ptr + tile * STRIDE + READY, blocks * splits * (4 * GROUPS))
    first, last = _low_steps(row, begin1, begin2, RANK, LOW_STEPS, GROUPS)
    for lora in range(loras):
        if (live >> lora) & 1 != 0:
            for block in range(first, last):
                stage = turn % STAGES
                mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                arrived = full.index(stage)
                mbarrier.expect(arrived, TOKENS * 128)
                copy_tile(low_desc, [lora * tokens + tile * TOKENS, block * 64], arrived, x_ring.index(stage * CHUNK))
                turn += 1
    return turn


@gluon_jit
def _low_steps(row, begin1, begin2, RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr):
    """The range of blocks of 64 ranks that a tile of the base product needs: those of its outputs' pieces."""
    if LOW_STEPS == 1:
        return 0, 1
    else:  # noqa: RET505 - Gluon compiles what follows a return too
        end = row + 64 * GROUPS - 1
        head = (row >= begin1).to(gl.int32) + (row >= begin2).to(gl.int32)
        tail = (end >= begin1).to(gl.int32) + (end >= begin2).to(gl.int32)
        return head * RANK // 64, gl.minimum((tail * RANK + RANK + 63) // 64, LOW_STEPS)


@gluon_jit
def first_of_b(
    wanted, live, b0_ptr, b1_ptr, b2_ptr, row, outputs, begin1, begin2, loras,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The B that `add_lora` begins with, on its way."""
    lora = 0
    while (lora < loras - 1) & ((live >> lora) & 1 == 0):
        lora += 1
    block, _end = _low_steps(row, begin1, begin2, RANK, LOW_STEPS, GROUPS)
    return _rows_of_b(
        wanted & (live != 0), b0_ptr, b1_ptr, b2_ptr, lora, row, begin1, begin2, outputs, block * 64,
        PIECES, RANK, GROUPS, mma,
    )  # fmt: skip


@gluon_jit
def add_lora(
    total, turn, live, b, x_ring, full, empty, b0_ptr, b1_ptr, b2_ptr, row, outputs, begin1, begin2, loras,
    PIECES: gl.constexpr, RANK: gl.constexpr, LOW_STEPS: gl.constexpr, GROUPS: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """B · (A · x) of each adapter in the tile of tokens, and the turn of the ring after it."""
    begun = turn
    first, last = _low_steps(row, begin1, begin2, RANK, LOW_STEPS, GROUPS)
    for lora in range(loras):
        if (live >> lora) & 1 != 0:
            for block in range(first, last):
                if turn != begun:
                    b = _rows_of_b(
                        True, b0_ptr, b1_ptr, b2_ptr, lora, row, begin1, begin2, outputs, block * 64,
                        PIECES, RANK, GROUPS, mma,
                    )  # fmt: skip
                stage = turn % STAGES
                mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                total = warpgroup_mma(b, x_ring.index(stage * CHUNK).permute((1, 0)), total, is_async=True)
                total, b = warpgroup_mma_wait(0, deps=[total, b])
                mbarrier.arrive(empty.index(stage))
                turn += 1
    return total, turn


@gluon_jit
def _rows_of_b(
    wanted, b0_ptr, b1_ptr, b2_ptr, lora, row, begin1, begin2, outputs, column,
    PIECES: gl.constexpr, RANK: gl.constexpr, GROUPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Rows of B[lora] and 64 columns of all pieces, which lie along the diagonal: zeros elsewhere."""
    dot: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    n = (row + gl.arange(0, 64 * GROUPS, gl.SliceLayout(1, dot)))[:, None]
    r = (column + gl.arange(0, 64, gl.SliceLayout(0, dot)))[None, :]
    b_ptr = piece_of(b0_ptr, b1_ptr, b2_ptr, n, begin1, begin2, PIECES)
    piece = (n >= begin1).to(gl.int32) + (n >= begin2).to(gl.int32)
    begin = gl.where(piece == 0, 0, gl.where(piece == 1, begin1, begin2))
    end = gl.where(piece == 0, begin1, gl.where(piece == 1, begin2, outputs))
    own = r - piece * RANK
    at = (lora.to(gl.int64) * (end - begin) + n - begin) * RANK + own
    return gl.load(b_ptr + at, mask=wanted & (n < outputs) & (own >= 0) & (own < RANK), other=0.0)
