"""Packed 4-bit weights to bf16, fp16 or fp32, without the global scale: exact, but for NF4, which bitsandbytes rounds.

    NVFP4: w̃ = e2m1 · e4m3 a block of 16       MXFP4: w̃ = e2m1 · 2^(e8m0 − 127) a block of 32

(OCP Microscaling Formats 1.0, sections 5.3 and 6.3.) The bits of an e2m1 or e4m3 number, moved to the exponent and
mantissa of an fp32 number, are that number times 2^(1 − 127) or 2^(7 − 127), subnormals included; a product with the
power of two undoes it. Two values a byte, the lower index in the low nibble.

Shapes: out, in: a linear layer's output and input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qerld_kernels import nf4, nvfp4
from qerld_kernels.formats import NF4, NVFP4, Format
from qerld_kernels.jit import can_launch, jit, tl

__all__ = ["dequantize_reference", "dequantize_unscaled"]

_BYTES = 2048


def dequantize_unscaled(
    packed: Tensor,
    scale: Tensor,
    *,
    format: Format = NVFP4,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """Return w̃ [out, in] of packed uint8 [out, in / 2] and scale [out, in / block], written into `out` when given.

    Raises:
        ValueError: a shape, dtype or layout does not fit.
    """
    if out is None:
        out = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=dtype, device=packed.device)
    _check(packed, scale, format, out)
    if format is NF4:
        return nf4.dequantize_into(packed, scale, out)
    if not can_launch(packed):
        if format is NVFP4:
            return nvfp4.dequantize_unscaled(packed, scale, out=out)
        return out.copy_(dequantize_reference(packed, scale, format=format, dtype=out.dtype))
    count = packed.numel()
    if count:
        _kernel[(-(-count // _BYTES),)](
            packed, scale.view(torch.uint8), out, count, HALF_BLOCK=format.block // 2, IS_E4M3=format is NVFP4,
            BYTES=_BYTES, num_warps=4,
        )  # fmt: skip
    return out


def dequantize_reference(
    packed: Tensor, scale: Tensor, *, format: Format = NVFP4, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The same in plain torch."""
    if format is NVFP4:
        return nvfp4.dequantize_unscaled(packed, scale, dtype=dtype)
    values = nvfp4.unpack(packed, dtype=torch.float32).view(packed.shape[0], -1, format.block)
    powers = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127).float())
    return (values * powers.unsqueeze(-1)).view(packed.shape[0], -1).to(dtype)


def _check(packed: Tensor, scale: Tensor, format: Format, out: Tensor) -> None:
    rows, features = packed.shape[0], packed.shape[1] * 2
    if packed.dtype != torch.uint8 or packed.ndim != 2 or features % format.block or packed.numel() == 0:
        raise ValueError(
            f"packed: must be uint8 [out, in / 2] with in a multiple of {format.block} for {format.name}, not empty, "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    if scale.dtype != format.scale or scale.shape != (rows, features // format.block):
        raise ValueError(
            f"scale: must be {format.scale} [{rows}, {features // format.block}] for {format.name}, "
            f"got {scale.dtype} {tuple(scale.shape)}"
        )
    if out.shape != (rows, features) or out.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"out: must be bf16, fp16 or fp32 [{rows}, {features}], got {out.dtype} {tuple(out.shape)}")
    for name, tensor in (("packed", packed), ("scale", scale), ("out", out)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()}; call contiguous()")


@jit
def _kernel(
    packed_ptr, scale_ptr, out_ptr, count,
    HALF_BLOCK: tl.constexpr, IS_E4M3: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """`BYTES` bytes a program; rows do not matter, since blocks do not cross them."""
    first = tl.program_id(0).to(tl.int64) * BYTES
    places = first + tl.arange(0, BYTES)
    inside = places < count
    byte = tl.load(packed_ptr + places, mask=inside, other=0).to(tl.uint32)
    code = tl.load(scale_ptr + places // HALF_BLOCK, mask=inside, other=0).to(tl.uint32)
    scale = _e4m3(code) if IS_E4M3 else _e8m0(code)
    values = tl.interleave(_e2m1(byte & 15) * scale, _e2m1(byte >> 4) * scale)
    outputs = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(out_ptr + outputs, values.to(out_ptr.dtype.element_ty), mask=outputs < 2 * count)


@jit
def _e2m1(code):
    """fp32 of 4-bit codes in uint32."""
    return ((code & 8) << 28 | (code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@jit
def _e4m3(code):
    """fp32 of e4m3 codes in uint32; NaN is not told apart, no scale is."""
    return ((code & 128) << 24 | (code & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@jit
def _e8m0(code):
    """fp32 of e8m0 codes in uint32: 2^(code − 127), of which the least is subnormal; 255 is NaN."""
    bits = tl.where(code == 0, 1 << 22, tl.where(code == 255, 0x7FC00000, code << 23))
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)
