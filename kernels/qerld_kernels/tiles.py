"""The layout in which NVFP4 weights are served: tiles of 64 outputs × 64 inputs, in the order of the tensor cores.

A tile is 1,024 words of 16 bits and 64 × 4 block scales. A word holds four weights of one output, 16 inputs apart,
hence one of each of the tile's four blocks ("planes"). Words lie in the order in which the 128 threads of a warpgroup
hold the left operand of `wgmma` (PTX ISA, "Register Fragments for wgmma.mma_async.m64k16"): a thread's eight words are
16 bytes in a row and become, plane by plane, its operands of four products. Within a word the nibbles are spread so
that a mask and at most one shift bring three of the four to where a bf16 number has sign, exponent and mantissa:

    plane   0    1    2    3
    sign    15   12   9    11
    e2m1    8-6  5-3  2-0  14, 13, 10

The four scales of an output are the bytes of one int32. Outputs and inputs are padded to multiples of 64 by zeros.
Zero scales are kept, and their blocks' nibbles cleared, so that a product need not look for them.

Legend: N outputs, K inputs, both padded where they count tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qerld_kernels.jit import can_launch, jit, tl

__all__ = ["SIDE", "Tiles", "dequantize_tiles", "dequantize_tiles_reference", "tile", "untile"]

SIDE = 64
"""Outputs and inputs of a tile."""

BLOCK = 16
PLANES = SIDE // BLOCK
_SIGN = (15, 12, 9, 11)
_MAGNITUDE = (6, 3, 0)  # plane 3's is in two parts
# Bits of a word's place in its tile, highest first, as dimensions of a [64, 16] view split into bits: rows 5 to 0 are
# dimensions 0 to 5, columns 3 to 0 dimensions 6 to 9.
_ORDER = (0, 1, 3, 4, 5, 7, 8, 6, 2, 9)
_SCALE_ORDER = (0, 1, 3, 4, 5, 2)
_BACK = tuple(_ORDER.index(place) for place in range(10))
_SCALE_BACK = tuple(_SCALE_ORDER.index(place) for place in range(6))


@dataclass(frozen=True)
class Tiles:
    """A tiled weight: words int64 [N / 64, K / 64, 256] of four each, scale int32 [N / 64, K / 64, 64]."""

    words: Tensor
    scale: Tensor


def tile(packed: Tensor, scale: Tensor) -> Tiles:
    """Tiles of a checkpoint's packed uint8 [N, K / 2] and scale e4m3 [N, K / 16], K a multiple of 16, scales ≥ 0."""
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    rows, columns = -(-outputs // SIDE), -(-inputs // SIDE)
    codes = torch.zeros(rows * SIDE, columns * SIDE, dtype=torch.uint8, device=packed.device)
    codes[:outputs, 0:inputs:2], codes[:outputs, 1:inputs:2] = packed & 15, packed >> 4
    bytes_ = torch.zeros(rows * SIDE, columns * PLANES, dtype=torch.uint8, device=packed.device)
    bytes_[:outputs, : inputs // BLOCK] = scale.view(torch.uint8)
    codes = codes.view(rows, SIDE, columns, PLANES, BLOCK)
    codes.masked_fill_(bytes_.view(rows, SIDE, columns, PLANES, 1) == 0, 0)
    words = _join(codes.permute(0, 2, 1, 3, 4)).view(rows, columns, *[2] * 10)
    words = words.permute(0, 1, *(2 + place for place in _ORDER)).contiguous()
    scales = bytes_.view(rows, SIDE, columns, PLANES).transpose(1, 2).contiguous().view(torch.int32)
    scales = scales.view(rows, columns, *[2] * 6).permute(0, 1, *(2 + place for place in _SCALE_ORDER))
    return Tiles(words.view(rows, columns, -1).view(torch.int64), scales.reshape(rows, columns, -1).contiguous())


def untile(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, K], one a weight, and scale e4m3 [N, K / 16], both with their padding."""
    rows, columns = tiles.words.shape[:2]
    words = tiles.words.view(torch.int16).view(rows, columns, *[2] * 10)
    words = words.permute(0, 1, *(2 + place for place in _BACK)).reshape(rows, columns, SIDE, BLOCK)
    codes = _part(words).permute(0, 2, 1, 3, 4).reshape(rows * SIDE, columns * SIDE)
    scales = tiles.scale.view(rows, columns, *[2] * 6).permute(0, 1, *(2 + place for place in _SCALE_BACK))
    bytes_ = scales.reshape(rows, columns, SIDE).contiguous().view(torch.uint8).view(rows, columns, SIDE, PLANES)
    scale = bytes_.transpose(1, 2).reshape(rows * SIDE, columns * PLANES)
    return codes, scale.view(torch.float8_e4m3fn)


def dequantize_tiles(tiles: Tiles, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return w̃ = e2m1 · e4m3 [outputs, inputs] in bf16, fp16 or fp32, without the global scale: exact.

    Raises:
        ValueError: a shape, dtype or layout does not fit.
    """
    check_tiles(tiles, outputs, inputs)
    if not can_launch(tiles.words):
        return dequantize_tiles_reference(tiles, outputs, inputs, dtype)
    out = torch.empty(outputs, inputs, dtype=dtype, device=tiles.words.device)
    rows, columns = tiles.words.shape[:2]
    _kernel[(columns, rows)](  # neighbours in a row of w̃ at the same time: memory likes long rows
        tiles.words.view(torch.int16), tiles.scale.view(torch.uint8), out, outputs, inputs, num_warps=4
    )
    return out


def dequantize_tiles_reference(tiles: Tiles, outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same in plain torch."""
    codes, scale = untile(tiles)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=codes.device)[(codes & 7).long()]
    values = torch.where(codes > 7, -magnitude, magnitude) * scale.float().repeat_interleave(BLOCK, 1)
    return values[:outputs, :inputs].to(dtype).contiguous()


def check_tiles(tiles: Tiles, outputs: int, inputs: int) -> None:
    """Raise ValueError unless the tiles are of this size, contiguous, and of their dtypes."""
    size = (-(-outputs // SIDE), -(-inputs // SIDE))
    for name, tensor, dtype, last in (
        ("words", tiles.words, torch.int64, 256),
        ("scale", tiles.scale, torch.int32, 64),
    ):
        if tensor.dtype != dtype or tensor.shape != (*size, last) or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: must be contiguous {dtype} [{size[0]}, {size[1]}, {last}] for {outputs} outputs and {inputs} "
                f"inputs, got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}; make it by tile()"
            )


def _join(codes: Tensor) -> Tensor:
    """Words int16 [..., 16] of codes [..., 4, 16]."""
    plane = [codes[..., place, :].int() for place in range(PLANES)]
    word = (plane[3] >> 1 & 3) << 13 | (plane[3] & 1) << 10
    for place, code in enumerate(plane):
        word |= (code >> 3) << _SIGN[place]
        if place < 3:
            word |= (code & 7) << _MAGNITUDE[place]
    return torch.where(word > 32767, word - 65536, word).to(torch.int16)


def _part(words: Tensor) -> Tensor:
    """Codes uint8 [..., 4, 16] of words [..., 16]."""
    word = words.int()
    magnitude = [word >> low & 7 for low in _MAGNITUDE] + [word >> 12 & 6 | word >> 10 & 1]
    codes = [(word >> sign & 1) << 3 | rest for sign, rest in zip(_SIGN, magnitude, strict=True)]
    return torch.stack(codes, -2).to(torch.uint8)


@jit
def _kernel(words_ptr, scale_ptr, out_ptr, outputs, inputs):
    """One tile."""
    row, column = tl.program_id(1), tl.program_id(0)
    at = row.to(tl.int64) * tl.num_programs(0) + column
    word = tl.load(words_ptr + at * 1024 + tl.arange(0, 1024)).to(tl.uint16).to(tl.uint32)
    # In the order of `_BACK`: rows (5, 4), 3, (2, 1, 0); columns 3, (2, 1), 0.
    word = tl.reshape(word, [4, 8, 4, 2, 2, 2])
    word = tl.reshape(tl.permute(word, (0, 4, 1, 3, 2, 5)), [64, 16])
    even = tl.join(_value(word, 15, 6), _value(word, 9, 0))
    split = (word >> 11 & 1) << 31 | (word >> 13 & 3) << 23 | (word >> 10 & 1) << 22
    odd = tl.join(_value(word, 12, 3), split.to(tl.float32, bitcast=True))
    # [64, 16, plane // 2, plane % 2] → [64, plane, 16]
    values = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [64, 4, 16])
    rows, planes = tl.arange(0, 64), tl.arange(0, 4)
    # A thread's two outputs, r and r + 8, have their scales side by side.
    place = (rows // 16) * 16 + (rows % 8) * 2 + rows % 16 // 8
    code = tl.load(scale_ptr + at * 256 + place[:, None] * 4 + planes[None, :]).to(tl.uint32)
    # 2^126 and 2^120: the biases of fp32 against those of e2m1 and e4m3.
    scale = (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    values = tl.reshape(values * 8.507059173023462e37 * scale[:, :, None], [64, 64])
    n, k = row * 64 + rows, column * 64 + tl.arange(0, 64)
    target = n.to(tl.int64)[:, None] * inputs + k[None, :]
    tl.store(out_ptr + target, values.to(out_ptr.dtype.element_ty), mask=(n[:, None] < outputs) & (k[None, :] < inputs))


@jit
def _value(word, sign: tl.constexpr, low: tl.constexpr):
    """e2m1 · 2⁻¹²⁶ in fp32 of one plane."""
    return ((word >> sign & 1) << 31 | (word >> low & 7) << 22).to(tl.float32, bitcast=True)
