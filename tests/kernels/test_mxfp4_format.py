"""The MXFP4 format: exactness, rounding, scales, and equality with the compressed-tensors library."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales
from qerld_kernels.errors import QuantizationError
from qerld_kernels.mxfp4 import Mxfp4Tensor, dequantize, quantize
from qerld_kernels.nvfp4 import E2M1_VALUES

SHAPES = [(1, 32), (3, 96), (7, 576), (130, 8192)]


def gaussian(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_those_of_compressed_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = gaussian(shape).to(dtype)
    made = quantize(weight)
    codes = generate_mx_scales(weight.float().view(shape[0], -1, 32).abs().amax(dim=-1)).to(torch.uint8)
    assert torch.equal(made.scale, codes)
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    state = {"weight": weight.float(), "weight_scale": torch.exp2(codes.float() - 127)}
    theirs = MXFP4PackedCompressor.compress(state, scheme)
    assert torch.equal(made.packed, theirs["weight_packed"])
    assert torch.equal(made.scale, theirs["weight_scale"])


@pytest.mark.parametrize("shape", SHAPES)
def test_every_weight_is_the_nearest_value_of_its_block(shape: tuple[int, int]) -> None:
    weight = gaussian(shape, seed=1)
    made = quantize(weight)
    step = torch.exp2(made.scale.double() - 127).repeat_interleave(32, dim=1)
    grid = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
    nearest = (weight.double()[..., None] - grid * step[..., None]).abs().amin(dim=-1)
    torch.testing.assert_close((dequantize(made).double() - weight.double()).abs(), nearest, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("amax", "power"), [(1.0, -2), (1.74, -2), (1.75, -1), (1.999, -1), (2.0, -1), (6.0, 0)])
def test_the_largest_of_a_block_chooses_its_power_of_two(amax: float, power: int) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 5] = -amax
    assert int(quantize(weight).scale) - 127 == power


def test_zeros_and_the_smallest_numbers_have_scales_that_are_numbers() -> None:
    weight = torch.zeros(3, 32)
    weight[1] = 1e-44
    weight[2] = 3e38
    made = quantize(weight)
    assert made.scale.flatten().tolist() == [127, 1, 252]
    assert torch.equal(dequantize(made)[:2], torch.zeros(2, 32))
    assert torch.isfinite(dequantize(made)).all()


def test_quantising_again_changes_nothing() -> None:
    first = quantize(gaussian((64, 256)))
    again = quantize(dequantize(first))
    assert torch.equal(dequantize(again), dequantize(first))
    assert (first.shape, float(first.global_scale)) == ((64, 256), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantised_weights_are_exact_in_sixteen_bits(dtype: torch.dtype) -> None:
    made = quantize(gaussian((16, 64)))
    assert torch.equal(dequantize(made, dtype).double(), dequantize(made).double())


BAD = [
    (torch.zeros(32), r"must be \[out, in\] with in a multiple of 32, got \(32,\)"),
    (torch.zeros(2, 48), r"got \(2, 48\)"),
    (torch.zeros(0, 32), r"got \(0, 32\)"),
    (torch.full((1, 32), torch.nan), "must be finite"),
    (torch.full((1, 32), torch.inf), "must be finite"),
]


@pytest.mark.parametrize(("weight", "message"), BAD)
def test_what_cannot_be_quantised_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        quantize(weight)


def test_a_scale_that_is_nan_is_nan() -> None:
    made = Mxfp4Tensor(torch.full((1, 16), 0x11, dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8))
    assert dequantize(made).isnan().all()
