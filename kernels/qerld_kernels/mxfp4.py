"""The MXFP4 format in torch: quantise and dequantise. Weights only.

    w = e2m1 · 2^(e8m0 − 127) a block of 32;  e8m0 = 127 + ⌊log₂ amax⌋ − 2, one more where amax ≥ 1.75 · 2^⌊log₂ amax⌋

2 is e2m1's largest exponent (OCP Microscaling Formats 1.0, section 6.3, which leaves the scale to the maker: without
"one more", which is compressed-tensors' rule, values up to 7.99 steps would be cut to 6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerld_kernels.dequantize import dequantize_unscaled
from qerld_kernels.errors import QuantizationError
from qerld_kernels.formats import MXFP4, Format
from qerld_kernels.nvfp4 import nearest_e2m1, pack, row_chunks

__all__ = ["Mxfp4Tensor", "dequantize", "quantize"]

_LARGEST_EXPONENT = 2
_ROUND_UP = 1 << 21  # a quarter in the mantissa of an fp32 number
_ONE = 127  # the code of 2⁰


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A quantised weight: packed uint8 [out, in / 2], scale uint8 [out, in / 32]."""

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def format(self) -> Format:
        """MXFP4."""
        return MXFP4

    @property
    def global_scale(self) -> torch.Tensor:
        """One: the format has none."""
        return torch.ones(())

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], self.packed.shape[1] * 2


def quantize(weight: torch.Tensor) -> Mxfp4Tensor:
    """Quantise weight [out, in], any float dtype, to the nearest values under its block scales.

    Raises:
        QuantizationError: not a matrix, `in` is no multiple of 32, or a weight is not finite.
    """
    if weight.ndim != 2 or weight.shape[1] % MXFP4.block or weight.numel() == 0:
        raise QuantizationError(
            f"weight: must be [out, in] with in a multiple of {MXFP4.block}, got {tuple(weight.shape)}"
        )
    out, features = weight.shape
    packed = torch.empty(out, features // 2, dtype=torch.uint8, device=weight.device)
    codes = torch.empty(out, features // MXFP4.block, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight):
        blocks = weight[rows].float().reshape(-1, MXFP4.block)
        if not torch.isfinite(blocks).all():
            raise QuantizationError("weight: must be finite to be quantised, it holds NaN or infinity")
        code = _codes(blocks.abs().amax(dim=1))
        values = nearest_e2m1(torch.ldexp(blocks, (_ONE - code)[:, None]))
        codes[rows] = code.to(torch.uint8).view(-1, features // MXFP4.block)
        packed[rows] = pack(values.view(-1, features))
    return Mxfp4Tensor(packed, codes)


def dequantize(tensor: Mxfp4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return w [out, in], exact unless it is beyond the dtype's range."""
    return dequantize_unscaled(tensor.packed, tensor.scale, format=MXFP4, dtype=dtype)


def _codes(amax: torch.Tensor) -> torch.Tensor:
    """int32 of fp32 [blocks], from 2⁻¹²⁶, where fp32 is still normal, to 2¹²⁵, of which six are finite; zeros: 2⁰."""
    exponent = (amax.view(torch.int32) + _ROUND_UP) >> 23
    return torch.where(amax == 0, _ONE, (exponent - _LARGEST_EXPONENT).clamp(1, 252))
