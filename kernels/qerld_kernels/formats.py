"""The 4-bit formats, two values a byte, with a scale a block of a row.

    NVFP4: w = e2m1 · e4m3 · g a block of 16, one g a weight       MXFP4: w = e2m1 · 2^(e8m0 − 127) a block of 32

    NF4: w = nf4[code] · absmax a block of 64 (`nf4.py`)

(OCP Microscaling Formats 1.0, sections 5.3 and 6.3, for MXFP4.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["FORMATS", "MXFP4", "NF4", "NVFP4", "Format", "PackedWeight"]


@dataclass(frozen=True)
class Format:
    """Its name, block length in weights, dtype of its block scales, and the name of its checkpoints."""

    name: str
    block: int
    scale: torch.dtype
    checkpoint: str


NVFP4 = Format("NVFP4", 16, torch.float8_e4m3fn, "nvfp4-pack-quantized")
MXFP4 = Format("MXFP4", 32, torch.uint8, "mxfp4-pack-quantized")
"""Its scales are the exponents themselves, e8m0; 255 is NaN."""
NF4 = Format("NF4", 64, torch.float32, "bitsandbytes")
"""Its scales are kept as fp32."""
FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "nf4": NF4}


class PackedWeight(Protocol):
    """packed uint8 [out, in / 2], scale [out, in / block] of the format's dtype, global_scale float32 []."""

    @property
    def format(self) -> Format: ...
    @property
    def packed(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    @property
    def global_scale(self) -> torch.Tensor: ...
