"""Every 4-bit code with every block scale, odd shapes, poisoned outputs, refused layouts."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels.dequantize import dequantize_reference, dequantize_unscaled
from qerld_kernels.formats import MXFP4, NVFP4, Format
from qerld_kernels.nvfp4 import E2M1_VALUES

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The rules of the format: 0, or 2⁻⁶ to 448.
SCALES = torch.tensor([0, *range(0x08, 0x7F)], dtype=torch.uint8)


def every_pair(format: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """One row a scale, in it all bytes; rows enough that the last program is not full."""
    codes = SCALES if format is NVFP4 else torch.arange(256, dtype=torch.uint8)
    packed = torch.arange(256, dtype=torch.uint8).repeat(len(codes), 1)
    scale = codes[:, None].repeat(1, 512 // format.block)
    return packed, scale.view(format.scale)


def expected(packed: torch.Tensor, scale: torch.Tensor, format: Format) -> torch.Tensor:
    """From the tables of the formats, in float64."""
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
    pairs = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], dim=2).flatten(1)
    wide = scale.double() if format is NVFP4 else torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
    return pairs * wide.repeat_interleave(format.block, dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_scale_is_exact(dtype: torch.dtype, device: str) -> None:
    packed, scale = every_pair(NVFP4)
    out = torch.full((len(packed), 512), torch.nan, dtype=dtype, device=device)
    result = dequantize_unscaled(packed.to(device), scale.to(device), out=out)
    assert result is out
    assert torch.equal(out.cpu().double(), expected(packed, scale, NVFP4))
    assert torch.equal(dequantize_reference(packed, scale, dtype=dtype), out.cpu())


def test_every_mxfp4_code_and_exponent(device: str) -> None:
    packed, scale = every_pair(MXFP4)
    found = dequantize_unscaled(packed.to(device), scale.to(device), format=MXFP4, dtype=torch.float32).cpu()
    wanted = expected(packed, scale, MXFP4).float()  # beyond fp32's largest number both are infinite
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(
        dequantize_reference(packed, scale, format=MXFP4, dtype=torch.float32).nan_to_num(7.0), found.nan_to_num(7.0)
    )


@pytest.mark.parametrize(("rows", "features"), [(1, 16), (3, 48), (7, 576), (123, 1104)])
def test_odd_shapes(rows: int, features: int, device: str) -> None:
    packed = torch.randint(0, 256, (rows, features // 2), dtype=torch.uint8)
    scale = SCALES[torch.randint(0, len(SCALES), (rows, features // 16))].view(torch.float8_e4m3fn)
    found = dequantize_unscaled(packed.to(device), scale.to(device)).cpu()
    assert torch.equal(found.double(), expected(packed, scale, NVFP4))


def test_what_does_not_fit_is_refused(device: str) -> None:
    packed = torch.zeros(4, 32, dtype=torch.uint8, device=device)
    scale = torch.zeros(4, 4, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="packed: must be contiguous"):
        dequantize_unscaled(torch.zeros(32, 4, dtype=torch.uint8, device=device).T, scale)
    with pytest.raises(ValueError, match=r"scale: must be torch.float8_e4m3fn \[4, 4\] for NVFP4, got torch.uint8"):
        dequantize_unscaled(packed, scale.view(torch.uint8))
    with pytest.raises(ValueError, match=r"in a multiple of 32 for MXFP4"):
        dequantize_unscaled(packed[:, :24].contiguous(), scale.view(torch.uint8), format=MXFP4)
    with pytest.raises(ValueError, match=r"out: must be bf16, fp16 or fp32 \[4, 64\]"):
        dequantize_unscaled(packed, scale, out=torch.empty(4, 63, device=device))
