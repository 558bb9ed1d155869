"""NF4 (Dettmers et al. 2023, arXiv:2305.14314, section 3) by bitsandbytes, in the layout of its checkpoints.

    w = nf4[code] · absmax a block of 64; absmax is stored in 8 bits a block of 256 of them, and their mean (3, "double
    quantization")

Here absmax is kept as the fp32 numbers that the library makes of those. Its bytes hold the lower index in the *high*
nibble, and blocks follow each other over the whole weight, which is the same as along rows where `in` is a multiple of
64.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qerld_kernels.errors import CheckpointError, QuantizationError
from qerld_kernels.formats import NF4, Format

__all__ = ["STATE", "Nf4Tensor", "dequantize", "dequantize_into", "quantize", "read", "stored_shapes"]

STATE = "quant_state.bitsandbytes__nf4"
_NESTED_BLOCK = 256
_STATE_BYTES = 256  # of JSON, filled up with spaces: a file's header is written before its tensors are made


@dataclass(frozen=True)
class Nf4Tensor:
    """A quantised weight: packed uint8 [out, in / 2], scale float32 [out, in / 64]."""

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def format(self) -> Format:
        """NF4."""
        return NF4

    @property
    def global_scale(self) -> torch.Tensor:
        """One: the format has none."""
        return torch.ones(())


def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of weight [out, in], by name after `weight` ("" is the packed bytes).

    Raises:
        QuantizationError: bitsandbytes is missing, not a matrix, `in` is no multiple of 64, or not finite.
    """
    if weight.ndim != 2 or weight.shape[1] % NF4.block or weight.numel() == 0:
        raise QuantizationError(
            f"weight: must be [out, in] with in a multiple of {NF4.block}, got {tuple(weight.shape)}"
        )
    if not torch.isfinite(weight).all():
        raise QuantizationError("weight: must be finite to be quantised, it holds NaN or infinity")
    rounded = weight.to(torch.bfloat16)
    packed, state = _library(QuantizationError).quantize_4bit(
        rounded, blocksize=NF4.block, quant_type="nf4", compress_statistics=True
    )
    stored = {"": packed, **state.as_dict(packed=True)}
    padded = bytes(stored[STATE].cpu().tolist()).ljust(_STATE_BYTES)
    stored[STATE] = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    return stored


def stored_shapes(out: int, features: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of what `quantize` returns."""
    blocks = out * features // NF4.block
    return {
        "": (torch.uint8, (out * features // 2, 1)),
        "absmax": (torch.uint8, (blocks,)),
        "quant_map": (torch.float32, (16,)),
        "nested_absmax": (torch.float32, (-(-blocks // _NESTED_BLOCK),)),
        "nested_quant_map": (torch.float32, (256,)),
        STATE: (torch.uint8, (_STATE_BYTES,)),
    }


def read(name: str, stored: Mapping[str, torch.Tensor], out: int, features: int) -> Nf4Tensor:
    """Return the weight [out, in] of what a checkpoint holds, by name as in `quantize`.

    Raises:
        CheckpointError: bitsandbytes is missing, or its state is not NF4 in blocks of 64 of that shape.
    """
    state = _state(name, stored)
    library = _library(CheckpointError)
    found = {key: state.get(key) for key in ("quant_type", "blocksize", "shape")}
    if found != {"quant_type": "nf4", "blocksize": NF4.block, "shape": [out, features]}:
        raise CheckpointError(f"{name}: must be nf4 in blocks of {NF4.block} of shape [{out}, {features}], got {found}")
    absmax = stored["absmax"]
    if "nested_absmax" in stored:
        nested = library.QuantState(
            absmax=stored["nested_absmax"],
            code=stored["nested_quant_map"],
            blocksize=state["nested_blocksize"],
            dtype=torch.float32,
        )
        absmax = library.dequantize_blockwise(absmax, nested) + state["nested_offset"]
    return Nf4Tensor(stored[""].view(out, features // 2), absmax.float().view(out, features // NF4.block))


def dequantize_into(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write nf4[code] · absmax to `out` [out, in], bf16, fp16 or fp32, rounded to it once; returns it."""
    library = _library(CheckpointError)
    state = library.QuantState(
        absmax=scale.view(-1), shape=out.shape, dtype=out.dtype, blocksize=NF4.block, quant_type="nf4"
    )
    if out.is_cuda:
        library.dequantize_4bit(packed.view(-1, 1), state, out=out)
    else:  # where the library cannot write into a tensor that is there
        out.copy_(library.dequantize_4bit(packed.view(-1, 1), state))
    return out


def dequantize(tensor: Nf4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return w [out, in]."""
    rows, pairs = tensor.packed.shape
    out = torch.empty(rows, 2 * pairs, dtype=dtype, device=tensor.packed.device)
    return dequantize_into(tensor.packed, tensor.scale, out)


def _state(name: str, stored: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored[STATE].tolist()))
    except ValueError as error:
        raise CheckpointError(
            f"{name}.weight.{STATE}: is not JSON ({error}); copy or download the model again"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name}.weight.{STATE}: must hold a JSON object, got {type(state).__name__}")
    return state


def _library(error: type[Exception]) -> Any:
    try:
        return importlib.import_module("bitsandbytes.functional")
    except ImportError as missing:
        raise error("NF4 needs bitsandbytes, which is not installed; pip install 'qerld[nf4]'") from missing
