"""The norm with slot noise against float64, alone and fused with the residual sum."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels.rmsnorm import add_rmsnorm_slots, rmsnorm, rmsnorm_slots, rmsnorm_slots_reference

# The interpreter cuts fp32 down to bf16 where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
SHAPES = [(1, 576), (3, 64), (17, 130), (123, 257), (5, 1)]


def inputs(tokens: int, channels: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    x, residual = (torch.randn(tokens, channels).to(dtype).to(device) for _ in range(2))
    weight = (1 + torch.randn(channels) / 4).to(dtype).to(device)
    table = 0.1 * torch.randn(4, channels, device=device)
    table[0] = 0
    slots = torch.randint(-1, 3, (tokens + 2,), device=device)
    return [x, residual, weight, table, slots]


def exact(
    x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, offset: float
) -> torch.Tensor:
    wide = x.double()
    scale = weight.double() + table.double()[slots[: len(x)].long() + 1] + offset
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "channels"), SHAPES)
def test_against_float64(tokens: int, channels: int, dtype: torch.dtype, unit_offset: bool, device: str) -> None:
    x, residual, weight, table, slots = inputs(tokens, channels, dtype, device)
    found = rmsnorm_slots(x, weight, table, slots, 1e-5, unit_offset)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        found.double(), exact(x, weight, table, slots, float(unit_offset)), rtol=tolerance, atol=tolerance
    )
    y, total = add_rmsnorm_slots(x, residual, weight, table, slots, 1e-5, unit_offset)
    torch.testing.assert_close(total, x + residual, rtol=tolerance, atol=0)
    torch.testing.assert_close(
        y.double(), exact(total, weight, table, slots, float(unit_offset)), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_clean_slot_beside_noise_is_bit_equal(dtype: torch.dtype, device: str) -> None:
    x, residual, weight, table, slots = inputs(64, 130, dtype, device)
    clean = torch.full_like(slots, -1)
    alone = add_rmsnorm_slots(x, residual, weight, table, clean, 1e-5)
    beside = add_rmsnorm_slots(x, residual, weight, table, slots, 1e-5)
    rows = slots[:64] == -1
    assert rows.any()
    assert not rows.all()
    for one, other in zip(alone, beside, strict=True):
        assert torch.equal(one[rows], other[rows])
    assert not torch.equal(alone[0][~rows], beside[0][~rows])


def test_rows_may_be_strided_and_channels_not(device: str) -> None:
    x, _, weight, table, slots = inputs(6, 64, torch.float32, device)
    wide = torch.cat([x, x], dim=1)
    torch.testing.assert_close(
        rmsnorm_slots(wide[:, :64], weight, table, slots, 1e-5),
        rmsnorm_slots_reference(x, weight, table, slots, 1e-5),
        rtol=2e-6,
        atol=2e-6,
    )
    with pytest.raises(ValueError, match="x: channels must be contiguous"):
        rmsnorm_slots(x.T.contiguous().T, weight, table, slots, 1e-5)
    with pytest.raises(ValueError, match=r"residual: must be torch\.float32"):
        add_rmsnorm_slots(x, x[:3], weight, table, slots, 1e-5)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_without_a_gradient_the_trainers_norm_is_the_kernel(noisy: bool, unit_offset: bool, device: str) -> None:
    x, _, weight, table, _ = inputs(6, 130, torch.float32, device)
    x, noise = x.view(2, 3, 130), table[1] if noisy else None
    by_torch = rmsnorm(x.requires_grad_(), weight, 1e-5, noise, unit_offset=unit_offset).detach()
    with torch.no_grad():
        found = rmsnorm(x, weight, 1e-5, noise, unit_offset=unit_offset)
    torch.testing.assert_close(found, by_torch, rtol=2e-6, atol=2e-6)
