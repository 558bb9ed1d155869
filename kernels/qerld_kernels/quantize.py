"""Weights to NVFP4 on the GPU, bit for bit what `nvfp4.quantize` makes.

    code = e4m3(amax / (6 g)), within [2⁻⁶, 448];  step = e4m3 value / (1 / g);
    q = nearest e2m1 of w / step, ties to even

"mse" tries the fourteen codes around that one and keeps the one of least Σ (q · step − w)². Everything is fp32 with
divisions rounded to nearest, no fused multiply-add, and sums of 16 in a fixed order: halves added to halves.
(`nvfp4` says where the rules come from.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerld_kernels import nvfp4
from qerld_kernels.errors import QuantizationError
from qerld_kernels.jit import can_launch, jit, tl
from qerld_kernels.nvfp4 import BLOCK, Nvfp4Tensor, Search

__all__ = ["quantize"]

_BLOCKS = 128
_ROUND = 12582912.0
"""1.5 · 2²³: an fp32 number below 2²² plus this, minus this, is rounded to an integer, ties to even."""


def quantize(weight: Tensor, *, global_scale: Tensor | None = None, search: Search = "absmax") -> Nvfp4Tensor:
    """As `nvfp4.quantize`, which takes over where kernels cannot run.

    Raises:
        QuantizationError: as there, or rows that are not contiguous.
    """
    if not can_launch(weight):
        return nvfp4.quantize(weight, global_scale=global_scale, search=search)
    g = nvfp4.check_quantizable(weight, global_scale)
    if not weight.is_contiguous():
        raise QuantizationError(f"weight: must be contiguous, got strides {weight.stride()}; call contiguous()")
    out, features = weight.shape
    packed = torch.empty(out, features // 2, dtype=torch.uint8, device=weight.device)
    codes = torch.empty(out, features // BLOCK, dtype=torch.uint8, device=weight.device)
    finite = torch.ones(1, dtype=torch.int32, device=weight.device)
    count = codes.numel()
    _kernel[(-(-count // _BLOCKS),)](
        weight, g, packed, codes, finite, count, ROUND=_ROUND, SEARCH=search == "mse", BLOCKS=_BLOCKS, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    if not finite.item():
        raise QuantizationError("weight: must be finite to be quantised, it holds NaN or infinity")
    return Nvfp4Tensor(packed, codes.view(torch.float8_e4m3fn), g)


@jit
def _kernel(
    weight_ptr, g_ptr, packed_ptr, codes_ptr, finite_ptr, count,
    ROUND: tl.constexpr, SEARCH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """`BLOCKS` blocks of 16 weights a program; rows do not matter, since blocks do not cross them."""
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = blocks < count
    places = blocks[:, None] * 16 + tl.arange(0, 16)[None, :]
    w = tl.load(weight_ptr + places, mask=places < count * 16, other=0.0).to(tl.float32)
    bits = w.to(tl.uint32, bitcast=True)
    if tl.max(((bits >> 23) & 255).to(tl.int32).reshape(BLOCKS * 16), axis=0) == 255:
        tl.store(finite_ptr, 0)
    g = tl.load(g_ptr)
    inverse = tl.div_rn(1.0, g)
    code = _absmax_code(tl.max(tl.abs(w), axis=1), g)
    if SEARCH:
        start, best = code, code
        least = _error(w, _step(code, inverse), ROUND)
        for offset in range(-8, 6):
            tried = tl.minimum(tl.maximum(start + offset, 0x08), 0x7E)
            error = _error(w, _step(tried, inverse), ROUND)
            better = error < least
            best, least = tl.where(better, tried, best), tl.where(better, error, least)
        code = best
    nibbles = _nibbles(_nearest(tl.div_rn(tl.abs(w), _step(code, inverse)[:, None]), ROUND), bits)
    code = tl.where(tl.max((nibbles & 7).to(tl.int32), axis=1) == 0, 0, code)
    tl.store(codes_ptr + blocks, code.to(tl.uint8), mask=inside)
    low, high = tl.split(nibbles.reshape(BLOCKS, 8, 2))
    bytes_at = blocks[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(packed_ptr + bytes_at, (low | (high << 4)).to(tl.uint8), mask=bytes_at < count * 8)


@jit
def _absmax_code(amax, g):
    """The e4m3 code int32 of amax / (6 g) within [2⁻⁶, 448], where e4m3 has no subnormals; ties to even."""
    scale = tl.minimum(tl.maximum(tl.div_rn(amax, 6.0 * g), 0.015625), 448.0)
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)


@jit
def _step(code, inverse):
    """scale / (1 / g) of e4m3 codes that are normal."""
    return tl.div_rn(((code + (120 << 3)) << 20).to(tl.float32, bitcast=True), inverse)


@jit
def _nearest(magnitude, ROUND: tl.constexpr):
    """The nearest e2m1 magnitude, ties to the even code, saturating at 6."""
    spacing = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    steps = (tl.minimum(magnitude / spacing, 1024.0) + ROUND) - ROUND  # a division by a power of two is exact
    return tl.minimum(steps * spacing, 6.0)


@jit
def _error(w, step, ROUND: tl.constexpr):
    """Σ over a block of (q · step − w)², in weight units."""
    q = _nearest(tl.div_rn(tl.abs(w), step[:, None]), ROUND)
    difference = q * step[:, None] - tl.abs(w)
    square = difference * difference
    for half in tl.static_range(3, -1, -1):
        square = tl.sum(square.reshape(square.shape[0], 2, 1 << half), axis=1)
    return square.reshape(square.shape[0])


@jit
def _nibbles(magnitude, bits):
    """4-bit codes uint32 of e2m1 magnitudes with the signs of the weights."""
    code = tl.where(magnitude < 2.0, magnitude * 2.0, tl.where(magnitude < 4.0, magnitude + 2.0, magnitude / 2.0 + 4.0))
    return code.to(tl.uint32) | ((bits >> 31) << 3)
