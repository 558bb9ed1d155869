"""Stream-K (Osama et al. 2023, arXiv:2301.03598): programs share the parts of all tiles, and shared tiles are added.

A tile's steps along K are a number of parts. Programs take parts in order; the first `with_slices` of them, which have
other work as well, share the first `their_parts`, the others the rest. What a program holds of a tile that others
worked on as well goes to a buffer, one place for the tile that it goes on with, one for the tile that it begins. The
pieces are added in order, so that results do not depend on timing.
"""

from __future__ import annotations

from functools import partial

from qerld_kernels.dependent_launch import wait_for_the_kernel_before
from qerld_kernels.jit import gl, gluon_jit, jit, tl

__all__ = ["add_pieces", "program_with", "share", "steps_of"]


@gluon_jit
def share(outputs, token_tiles, parts, with_slices, their_parts, GROUPS: gl.constexpr):
    """This program's range of the parts of all tiles."""
    work = gl.cdiv(outputs, 64 * GROUPS) * token_tiles * parts
    own = gl.program_id(0)
    programs = gl.num_programs(0)
    if own < with_slices:
        begin = own * their_parts // with_slices
        end = (own + 1) * their_parts // with_slices
    else:
        rest = work - their_parts
        begin = their_parts + (own - with_slices) * rest // (programs - with_slices)
        end = their_parts + (own + 1 - with_slices) * rest // (programs - with_slices)
    return begin, end


@gluon_jit
def steps_of(unit, end, columns, part, parts, CHUNK: gl.constexpr):
    """The tile of a part, the range's first and last (excluded) step in it, and where the range goes on."""
    tile = unit // parts
    following = gl.minimum(end, tile * parts + parts)
    first = (unit - tile * parts) * part
    last = gl.minimum((following - tile * parts) * part, gl.cdiv(columns, CHUNK))
    return tile, first, last, following


@jit
def program_with(unit, programs, work, with_slices, their_parts):
    """Whose range a part is in."""
    if unit < their_parts:
        return ((unit + 1) * with_slices - 1) // their_parts
    else:  # noqa: RET505
        return with_slices + ((unit - their_parts + 1) * (programs - with_slices) - 1) // (work - their_parts)


@partial(jit, do_not_specialize=["tokens", "parts", "token_tiles", "programs", "work", "with_slices", "their_parts"])
def add_pieces(
    pieces_ptr, y_ptr, factor, tokens, outputs, parts, token_tiles, programs, work, with_slices, their_parts,
    PDL: tl.constexpr, SCALED_HEAD: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of 64 outputs and ROWS tokens of a tile that several programs share; the first may have scaled its piece."""
    tile = tl.program_id(0)
    group, block = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    head = program_with(tile * parts, programs, work, with_slices, their_parts)
    tail = program_with(tile * parts + parts - 1, programs, work, with_slices, their_parts)
    if head != tail:
        if PDL:
            wait_for_the_kernel_before()
        m = block * ROWS + tl.arange(0, ROWS)[None, :]
        n = tl.arange(0, 64)[:, None]
        at = n * TOKENS + m
        first = tl.load(pieces_ptr + ((head * 2 + 1) * GROUPS + group).to(tl.int64) * (64 * TOKENS) + at)
        total = tl.zeros([64, ROWS], tl.float32)
        for program in range(head + 1, tail + 1):
            total += tl.load(pieces_ptr + (program * 2 * GROUPS + group).to(tl.int64) * (64 * TOKENS) + at)
        total = total * factor + first * (1.0 if SCALED_HEAD else factor)
        m += (tile % token_tiles) * TOKENS
        n += ((tile // token_tiles) * GROUPS + group) * 64
        y = total.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + m.to(tl.int64) * outputs + n, y, mask=(m < tokens) & (n < outputs))
