"""The NVFP4 format: exactness, rounding, scale rules, and equality with the compressed-tensors library."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from hypothesis import given, settings
from hypothesis import strategies as st
from qerld_kernels.errors import QuantizationError
from qerld_kernels.nvfp4 import (
    BLOCK,
    MIN_SCALE,
    Nvfp4Tensor,
    Search,
    dequantize,
    dequantize_unscaled,
    flush_scales,
    global_scale_for,
    pack,
    quantize,
    unpack,
)

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
ALL_VALUES = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SHAPES = [(1, 16), (3, 48), (7, 576), (192, 64), (130, 16384)]


def gaussian(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


def test_every_pair_of_values_packs_low_nibble_first_and_unpacks() -> None:
    values = torch.cartesian_prod(ALL_VALUES, ALL_VALUES).reshape(16, -1)
    packed = pack(values)
    assert packed[0, 1].item() == 0x10, "the second value of a pair, 0.5 (code 1), is the high nibble"
    assert torch.equal(packed, pack_fp4_to_uint8(values))
    assert torch.equal(unpack(packed, dtype=torch.float32), values)
    assert torch.equal(unpack(packed), unpack_fp4_from_uint8(packed, 16, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_e2m1_times_e4m3_is_exact_in_sixteen_bits(dtype: torch.dtype) -> None:
    scales = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat_interleave(1).reshape(-1, 1)
    packed = pack(ALL_VALUES.repeat(len(scales), 1))
    exact = ALL_VALUES.double() * scales.double()
    assert torch.equal(dequantize_unscaled(packed, scales, dtype=dtype).double(), exact)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_requantising_dequantised_weights_changes_nothing(shape: tuple[int, int], search: Search) -> None:
    first = quantize(gaussian(shape), search=search)
    weight = dequantize(first)
    again = dequantize(quantize(weight, global_scale=first.global_scale, search="mse"))
    assert torch.equal(again, weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_equals_the_compressed_tensors_library(shape: tuple[int, int], dtype: torch.dtype, search: Search) -> None:
    weight = gaussian(shape, dtype)
    ours = quantize(weight, search=search)
    divisor = (1.0 / ours.global_scale).reshape(1)
    state = {"weight": weight.float(), "weight_scale": ours.scale.float(), "weight_global_scale": divisor}
    theirs = NVFP4PackedCompressor.compress(state, SCHEME)
    assert torch.equal(ours.packed, theirs["weight_packed"])
    assert torch.equal(ours.scale.view(torch.uint8), theirs["weight_scale"].view(torch.uint8))
    unpacked = NVFP4PackedCompressor.decompress(
        {"weight_packed": ours.packed, "weight_scale": ours.scale, "weight_global_scale": divisor}, SCHEME
    )["weight"]
    # The library multiplies e2m1 by (scale / divisor), rounded to bf16 in between: equal up to those roundings.
    torch.testing.assert_close(unpacked.float(), dequantize(ours), rtol=2**-7, atol=0)


def test_values_round_to_the_nearest_ties_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    block = torch.cat([ties, -ties]).reshape(1, BLOCK)
    result = quantize(block, global_scale=torch.tensor(1.0), search="absmax")
    assert torch.equal(unpack(result.packed, dtype=torch.float32), torch.cat([expected, -expected]).reshape(1, BLOCK))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_search_never_has_more_error_than_absmax(shape: tuple[int, int]) -> None:
    weight = gaussian(shape)
    error = {
        search: (dequantize(quantize(weight, search=search)) - weight).reshape(-1, BLOCK).square().sum(1)
        for search in ("absmax", "mse")
    }
    assert (error["mse"] <= error["absmax"] * (1 + 1e-5)).all()
    if shape[0] > 1:  # the block of the largest weight has no larger scale to try
        assert error["mse"].sum() < error["absmax"].sum()


def test_the_search_finds_the_best_scale_between_half_and_one_and_a_half_of_absmax() -> None:
    weight, g = gaussian((4, 64)), torch.tensor(0.01)
    found = quantize(weight, global_scale=g, search="mse")
    blocks = weight.reshape(-1, BLOCK)
    error = (dequantize(found).reshape(-1, BLOCK) - blocks).square().sum(1)
    grid, absmax = ALL_VALUES[:8], blocks.abs().amax(1) / 6
    for code in range(0x08, 0x7F):
        step = torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).float() * g
        by_hand = (blocks.abs().unsqueeze(2) - grid * step).abs().min(dim=2).values.square().sum(1)
        within = (step > absmax * 0.55) & (step < absmax * 1.5)
        assert (error[within] <= by_hand[within] * (1 + 1e-4)).all(), f"scale code {code:#x} is better"


def scales_are_lawful(tensor: Nvfp4Tensor) -> bool:
    scale = tensor.scale.float()
    return bool(((scale == 0) | (scale >= MIN_SCALE)).all()) and not bool(torch.signbit(scale).any())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 4),
    magnitude=st.floats(-40, 30),
    spread=st.floats(0, 12),
    search=st.sampled_from(["absmax", "mse"]),
)
def test_any_weight_gives_lawful_scales_and_bounded_error(
    seed: int, rows: int, blocks: int, magnitude: float, spread: float, search: Search
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exponents = magnitude + spread * torch.randn(rows, blocks * BLOCK, generator=generator).clamp(-4, 4)
    weight = torch.randn(rows, blocks * BLOCK, generator=generator) * torch.exp2(exponents)
    result = quantize(weight, search=search)
    assert scales_are_lawful(result)
    blockwise = weight.reshape(-1, BLOCK)
    error = (dequantize(result).reshape(-1, BLOCK) - blockwise).abs().amax(1)
    # Half the largest spacing (1 of 6), plus e4m3's rounding of the scale (1/16 of the largest value), plus the least
    # scale; the search may trade a larger single error for a smaller sum of squares, at most that of absmax.
    bound = blockwise.abs().amax(1) * (1 / 6 + 1 / 14) + MIN_SCALE * result.global_scale
    if search == "mse":
        bound = bound * BLOCK**0.5
    assert (error <= bound).all()


@settings(max_examples=200, deadline=None)
@given(amax=st.floats(2.0**-90, 2.0**100, width=32))
def test_the_global_scale_survives_its_stored_reciprocal(amax: float) -> None:
    g = global_scale_for([torch.tensor([[amax]])])
    assert torch.equal(1.0 / (1.0 / g), g)


def test_a_fused_group_shares_the_scale_of_its_largest_weight() -> None:
    small, large = gaussian((8, 32)), gaussian((16, 32)) * 30
    assert torch.equal(global_scale_for([small, large]), global_scale_for([large]))
    assert scales_are_lawful(quantize(small, global_scale=global_scale_for([small, large])))


def test_zero_weights_have_zero_scales_and_values() -> None:
    result = quantize(torch.zeros(2, 32))
    assert not result.scale.float().any()
    assert not dequantize(result).any()


def test_dequantising_into_a_scratch_writes_there() -> None:
    tensor = quantize(gaussian((5, 64)))
    scratch = torch.full((5, 64), float("nan"), dtype=torch.bfloat16)
    assert dequantize_unscaled(tensor.packed, tensor.scale, out=scratch) is scratch
    assert torch.equal(scratch, dequantize_unscaled(tensor.packed, tensor.scale))
    with pytest.raises(ValueError, match="contiguous"):
        dequantize_unscaled(tensor.packed, tensor.scale, out=torch.empty(64, 5).T)


def marlin_rule(scales: torch.Tensor) -> torch.Tensor:
    """vLLM's nvfp4_marlin_process_scales without the permutation, back in e4m3's units."""
    half = scales.to(torch.half)
    nonzero = half.float()[half > 0] * 2**7
    factor = (448 * 2**7 / nonzero.max()).log2().floor().exp2().item() if nonzero.max() < 448 * 2**7 else 1.0
    rescaled = (half.float() * factor).to(torch.half) * 2**7
    rescaled[rescaled < 2] = 0
    return rescaled.float() / 2**7 / factor


@pytest.mark.parametrize("largest", [448.0, 240.0, 224.0, 100.0, 1.0, 2.0**-5, 2.0**-9])
def test_foreign_scales_are_flushed_as_marlin_flushes_them(largest: float) -> None:
    every = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = every[every.float() <= largest]
    flushed, count = flush_scales([scales[:1], scales[1:]])
    expected = marlin_rule(scales)
    assert torch.equal(torch.cat([part.float() for part in flushed]), expected)
    assert count == int(((expected == 0) & (scales.float() > 0)).sum())


def test_our_own_scales_are_never_flushed() -> None:
    tensors = [quantize(gaussian((64, 576), seed=seed), global_scale=torch.tensor(1e-4)) for seed in range(3)]
    assert flush_scales([tensor.scale for tensor in tensors])[1] == 0


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 20), "multiple of 16"),
        (torch.zeros(32), "must be \\[out, in\\]"),
        (torch.full((2, 16), float("nan")), "finite"),
        (torch.full((2, 16), float("inf")), "finite"),
    ],
)
def test_weights_that_cannot_be_quantised_are_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        quantize(weight)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_global_scale_is_refused(scale: float) -> None:
    with pytest.raises(QuantizationError, match="global_scale"):
        quantize(torch.ones(1, 16), global_scale=torch.tensor(scale))
