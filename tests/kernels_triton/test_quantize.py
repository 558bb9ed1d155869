"""Bit for bit the torch reference: random and hostile weights, both searches."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels import nvfp4
from qerld_kernels.errors import QuantizationError
from qerld_kernels.nvfp4 import Search
from qerld_kernels.quantize import quantize


def hostile(rows: int, features: int) -> torch.Tensor:
    """Rows of very different size, outliers, zeros of both signs, and values halfway between two codes."""
    weight = torch.randn(rows, features) * torch.exp(4 * torch.randn(rows, 1))
    weight[0, :16] = 0.0
    weight[-1, :8], weight[-1, 8:16] = -0.0, 0.0
    weight[rows // 2, 0] = 1e4
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight[rows // 3, :16] = torch.cat([halves, -halves])
    return weight


@pytest.mark.parametrize("search", ["absmax", "mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "features"), [(1, 16), (3, 48), (131, 64), (64, 576)])
def test_equals_the_reference(rows: int, features: int, dtype: torch.dtype, search: Search, device: str) -> None:
    weight = hostile(rows, features).clamp(-6e4, 6e4).to(dtype).to(device)
    found, wanted = quantize(weight, search=search), nvfp4.quantize(weight, search=search)
    assert torch.equal(found.packed, wanted.packed)
    assert torch.equal(found.scale.view(torch.uint8), wanted.scale.view(torch.uint8))
    assert found.global_scale == wanted.global_scale


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_refused(bad: float, device: str) -> None:
    weight = torch.randn(40, 64, device=device)
    weight[33, 5] = bad
    with pytest.raises(QuantizationError, match="must be finite"):
        quantize(weight, global_scale=torch.tensor(0.01))


def test_a_transposed_weight_is_refused(device: str) -> None:
    with pytest.raises(QuantizationError, match="must be contiguous"):
        quantize(torch.randn(64, 32, device=device).T)
