"""The NVFP4 weight format in plain torch.

    w = e2m1 · scale · g
    e2m1 ∈ ±{0, .5, 1, 1.5, 2, 3, 4, 6}; scale: one e4m3 number a block of 16 inputs; g: one fp32 number a tensor

e2m1 · scale has at most 6 significant bits and is exact in bf16, so a product with the unscaled weight, multiplied by g
afterwards, is what the served kernels compute (FP4 Marlin on Hopper).

Scale rules: block scales are 0 or ≥ 2⁻⁶ and never negative. Marlin keeps scales as S0E5M3: it drops their sign and
flushes those below 2⁻⁶ (after a power-of-two rescale) to zero; such scales would be served unlike they were trained.

Shapes: out, in: a linear layer's output and input features. A byte holds two values, the lower index in its low nibble.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch.nn.functional import embedding

from qerld_kernels.errors import QuantizationError
from qerld_kernels.formats import NVFP4, Format

__all__ = [
    "BLOCK",
    "MIN_SCALE",
    "Nvfp4Tensor",
    "Search",
    "dequantize",
    "dequantize_unscaled",
    "flush_scales",
    "global_scale_for",
    "nearest_e2m1",
    "pack",
    "quantize",
    "row_chunks",
    "unpack",
]

BLOCK = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-6
"""The smallest normal e4m3 number, and the smallest non-zero block scale that Marlin keeps."""

Search = Literal["absmax", "mse"]

_MIN_SCALE_CODE, _MAX_SCALE_CODE = 0x08, 0x7E  # e4m3 bit patterns of 2⁻⁶ and 448; codes between are ordered by value
# Candidates of the search, in steps of one e4m3 code (8 to the octave) from the absmax scale: from 0.5 × (clipping the
# largest values) to 1.6 × (the largest value becomes 4, below which the grid is finer).
_SEARCH_STEPS = range(-8, 6)
_CPU_CHUNK, _GPU_CHUNK = 1 << 20, 1 << 24  # weights handled at once: bounds temporaries; near the cache on a CPU
_TINIEST_AMAX = 1e-30  # below it 2688 / amax would overflow fp32; such blocks become zero


@dataclass(frozen=True)
class Nvfp4Tensor:
    """A quantised weight: packed uint8 [out, in / 2], scale float8_e4m3fn [out, in / 16], global_scale float32 [].

    `global_scale` multiplies (ModelOpt's `weight_scale_2`); compressed-tensors stores its reciprocal.
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor

    @property
    def format(self) -> Format:
        """NVFP4."""
        return NVFP4

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.packed.shape[0], self.packed.shape[1] * 2


def global_scale_for(weights: Iterable[torch.Tensor]) -> torch.Tensor:
    """The float32 [] multiplier shared by a fused group: the largest |w| of all of them maps to 6 · 448.

    It is the fp32 reciprocal of an fp32 number, so writing 1 / g and reading it back gives g exactly.

    Raises:
        QuantizationError: no weights, or a weight is not finite.
    """
    maxima = [weight.detach().abs().max().float().cpu() for weight in weights]
    if not maxima:
        raise QuantizationError("weights: a fused group needs at least one weight, got none")
    amax = torch.stack(maxima).max()
    if not torch.isfinite(amax):
        raise QuantizationError(f"weight: must be finite to be quantised, its largest magnitude is {amax.item()}")
    if amax == 0:
        return torch.tensor(1.0)
    return 1.0 / (E2M1_MAX * E4M3_MAX / amax.clamp_min(_TINIEST_AMAX))


def quantize(
    weight: torch.Tensor, *, global_scale: torch.Tensor | None = None, search: Search = "absmax"
) -> Nvfp4Tensor:
    """Quantise weight [out, in], any float dtype, to the nearest values under the chosen block scales.

    `global_scale` is the group's (`global_scale_for`), else the weight's own. "absmax" maps each block's largest
    magnitude to 6; "mse" tries the e4m3 scales around that one and takes the one of least squared error. It has
    less weight error but no better held-out perplexity (docs/formats.md), and takes longer: not the default.

    Raises:
        QuantizationError: not a matrix, `in` is no multiple of 16, not finite, or a bad global scale.
    """
    g = check_quantizable(weight, global_scale)
    out, features = weight.shape
    packed = torch.empty(out, features // 2, dtype=torch.uint8, device=weight.device)
    codes = torch.empty(out, features // BLOCK, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight):
        blocks = weight[rows].float().reshape(-1, BLOCK)
        if not torch.isfinite(blocks).all():
            raise QuantizationError("weight: must be finite to be quantised, it holds NaN or infinity")
        scale_codes = _absmax_codes(blocks, g) if search == "absmax" else _searched_codes(blocks, g)
        values = nearest_e2m1(blocks / _step(scale_codes, g))
        # A block of zeros has scale 0, the only scale below 2⁻⁶ that is allowed.
        scale_codes = torch.where((values == 0).all(dim=1, keepdim=True), 0, scale_codes)
        codes[rows] = scale_codes.to(torch.uint8).view(-1, features // BLOCK)
        packed[rows] = pack(values.view(-1, features))
    return Nvfp4Tensor(packed, codes.view(torch.float8_e4m3fn), g)


def check_quantizable(weight: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    """Return the global scale float32 [] to use, on the weight's device. Raises `QuantizationError`, as `quantize`."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK or weight.numel() == 0:
        raise QuantizationError(f"weight: must be [out, in] with in a multiple of {BLOCK}, got {tuple(weight.shape)}")
    g = global_scale_for([weight]) if global_scale is None else global_scale.reshape(()).float()
    if not (torch.isfinite(g) and g > 0):
        raise QuantizationError(f"global_scale: must be finite and positive, got {g.item()}")
    return g.to(weight.device)


def pack(values: torch.Tensor) -> torch.Tensor:
    """Two e2m1 values a byte, low nibble first: values [out, in], exactly representable → uint8 [out, in / 2]."""
    magnitude = values.abs()
    code = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    nibbles = code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack(packed: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The e2m1 values, [out, in] in `dtype`, of packed uint8 [out, in / 2]."""
    pairs = embedding(packed.to(torch.int32), _byte_table(packed.device, dtype))
    return pairs.view(packed.shape[0], -1)


def dequantize_unscaled(
    packed: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """e2m1 · scale without g, [out, in]: exact in bf16, fp16 and fp32. Written into `out` (contiguous) when given."""
    rows, features = packed.shape[0], packed.shape[1] * 2
    if out is None:
        out = torch.empty(rows, features, dtype=dtype, device=packed.device)
    elif out.shape != (rows, features) or not out.is_contiguous():
        raise ValueError(f"out: must be a contiguous [{rows}, {features}], got {tuple(out.shape)}")
    for part in row_chunks(out):
        values = unpack(packed[part], dtype=out.dtype).view(-1, features // BLOCK, BLOCK)
        torch.mul(values, scale[part].to(out.dtype).unsqueeze(-1), out=out[part].view_as(values))
    return out


def dequantize(tensor: Nvfp4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """w = e2m1 · scale · g, [out, in], multiplied in fp32 and rounded once to `dtype`."""
    weight = dequantize_unscaled(tensor.packed, tensor.scale, dtype=torch.float32)
    return weight.mul_(tensor.global_scale).to(dtype)


def flush_scales(scales: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Marlin's rule for the block scales of one fused group: (scales, how many were flushed to zero).

    Marlin multiplies them by the largest power of two that keeps their maximum ≤ 448 and zeroes what is then below
    2⁻⁶. Applying it here keeps the CPU, the trainer and the GPU on the same weights. (vLLM: marlin_utils_fp4.py,
    `nvfp4_marlin_process_scales`.) Scales float8_e4m3fn, ≥ 0.
    """
    largest = max((scale.float().max().item() for scale in scales), default=0.0)
    if largest == 0:
        return list(scales), 0
    rescale = torch.tensor(E4M3_MAX / largest).log2().floor().exp2().item()
    flushed, count = [], 0
    for scale in scales:
        small = (scale.float() * rescale < MIN_SCALE) & (scale.float() > 0)
        hits = int(small.sum())
        count += hits
        flushed.append(scale if hits == 0 else torch.where(small, 0.0, scale.float()).to(scale.dtype))
    return flushed, count


def row_chunks(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices of rows, so many that temporaries stay small."""
    rows, features = matrix.shape
    step = max(1, (_CPU_CHUNK if matrix.device.type == "cpu" else _GPU_CHUNK) // features)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _absmax_codes(blocks: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """int16 [blocks, 1]: the e4m3 code, within [2⁻⁶, 448], that maps each block's largest magnitude to about 6."""
    amax = blocks.abs().amax(dim=1, keepdim=True)
    scale = (amax / (E2M1_MAX * g)).clamp(MIN_SCALE, E4M3_MAX)
    return scale.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)


def _searched_codes(blocks: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """int16 [blocks, 1]: of the codes around the absmax code, the one whose block has the least squared error."""
    start = _absmax_codes(blocks, g)
    best, least = start, _squared_error(blocks, _step(start, g))
    for offset in _SEARCH_STEPS:
        if offset == 0:
            continue
        code = (start + offset).clamp(_MIN_SCALE_CODE, _MAX_SCALE_CODE)
        error = _squared_error(blocks, _step(code, g))
        better = error < least
        best, least = torch.where(better, code, best), torch.where(better, error, least)
    return best


def _squared_error(blocks: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """float32 [blocks, 1]: squared error, in weight units, of rounding to multiples of step [blocks, 1].

    Halves are added to halves: an order that every device keeps, so that near-ties fall alike.
    """
    errors = (nearest_e2m1(blocks / step) * step).sub_(blocks).square_()
    while errors.shape[1] > 1:
        left, right = errors.chunk(2, dim=1)
        errors = left + right
    return errors


def _step(codes: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """float32 [blocks, 1]: scale / (1 / g), in the order of operations of the compressed-tensors library."""
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() / (1.0 / g)


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 value, ties to the even code, saturating at ±6; zero keeps its sign."""
    magnitude = x.abs()
    # The spacing is 0.5 below 2, 1 below 4 and 2 above; torch.round takes ties to even, which is the even code.
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return magnitude.div_(spacing).round_().mul_(spacing).clamp_(max=E2M1_MAX).copysign_(x)


@lru_cache(maxsize=16)
def _byte_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[256, 2]: the two values of each byte."""
    with torch.inference_mode(False):  # kept across calls, of which later ones may be under autograd
        table = torch.tensor(E2M1_VALUES, dtype=dtype)
        signed = torch.cat([table, -table])
        byte = torch.arange(256)
        return torch.stack([signed[byte & 15], signed[byte >> 4]], dim=1).to(device)
