"""The norm with noise by slot: against float64, bit-equality at σ = 0, slots, compilation."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels.rmsnorm import rmsnorm, rmsnorm_slots

EPS = 1e-5
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def inputs(
    tokens: int, channels: int, dtype: torch.dtype, rows: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * channels)
    x = (torch.randn(tokens, channels, generator=generator) * 3).to(dtype)
    weight = (torch.rand(channels, generator=generator) + 0.5).to(dtype)
    table = torch.randn(rows, channels, generator=generator) * 0.05
    table[0] = 0
    slots = torch.randint(-1, rows - 1, (tokens,), generator=generator)
    return x, weight, table, slots


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (3, 7), (5, 576), (17, 130)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_equals_the_equation_in_float64(tokens: int, channels: int, dtype: torch.dtype, unit_offset: bool) -> None:
    x, weight, table, slots = inputs(tokens, channels, dtype)
    scale = weight.double() + table.double()[slots + 1] + float(unit_offset)
    expected = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt() * scale
    result = rmsnorm_slots(x, weight, table, slots, EPS, unit_offset)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tokens_without_noise_are_bit_equal_beside_noisy_ones(dtype: torch.dtype) -> None:
    x, weight, table, _ = inputs(6, 64, dtype)
    table[2] = 0  # a loaded adapter with σ = 0
    slots = torch.tensor([-1, 0, 1, 2, 1, -1])
    result, clean = rmsnorm_slots(x, weight, table, slots, EPS), rmsnorm(x, weight, EPS)
    for token in (0, 2, 4, 5):
        assert torch.equal(result[token], clean[token])
    for token in (1, 3):
        assert not torch.equal(result[token], clean[token])


def test_noise_that_bf16_would_swallow_is_kept() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(256, dtype=torch.bfloat16)
    table = torch.zeros(2, 256)
    table[1] = 1e-3 * torch.randn(256, generator=torch.Generator().manual_seed(1))
    noisy = rmsnorm_slots(x, weight, table, torch.zeros(64, dtype=torch.int64), EPS)
    realised = (noisy / rmsnorm(x, weight, EPS) - 1).std()
    torch.testing.assert_close(realised, table[1].std(), rtol=0.02, atol=0)


def test_a_slot_buffer_longer_than_the_batch_is_cut() -> None:
    x, weight, table, slots = inputs(3, 8, torch.float32)
    long = torch.cat([slots, torch.full((5,), 2)]).to(torch.int32)
    assert torch.equal(rmsnorm_slots(x, weight, table, long, EPS), rmsnorm_slots(x, weight, table, slots, EPS))


def test_the_custom_op_passes_torchs_own_check() -> None:
    x, weight, table, slots = inputs(3, 8, torch.float32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(rmsnorm_slots, (x, weight, table, slots, EPS), test_utils=tests)


def test_it_is_one_opaque_op_under_compilation() -> None:
    """Compiled once without graph breaks, the table and the slots are read at run time."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        total = x * 2 + rmsnorm_slots(x, weight, table, slots, EPS)
        return rmsnorm_slots(total, weight, table, slots, EPS)

    x, weight, table, slots = inputs(4, 16, torch.float32)
    for change in range(3):
        table[1:] += change
        slots = slots.roll(1)
        total = x * 2 + rmsnorm_slots(x, weight, table, slots, EPS)
        assert torch.equal(block(x, weight, table, slots), rmsnorm_slots(total, weight, table, slots, EPS))


def test_the_trainers_norm_has_the_gradient_of_the_equation() -> None:
    x = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    weight, noise = torch.rand(8), torch.randn(8) * 0.1
    rmsnorm(x, weight, EPS, noise).square().sum().backward()
    copy = x.detach().double().requires_grad_()
    y = copy / (copy.square().mean(1, keepdim=True) + EPS).sqrt() * (weight + noise).double()
    y.square().sum().backward()
    torch.testing.assert_close(x.grad.double(), copy.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("weight", torch.ones(7)),
        ("noise_table", torch.zeros(2, 8, dtype=torch.bfloat16)),
        ("noise_table", torch.zeros(2, 7)),
        ("slots", torch.zeros(1, dtype=torch.int64)),
    ],
)
def test_misshapen_arguments_are_refused(name: str, replacement: torch.Tensor) -> None:
    x, weight, noise_table, slots = inputs(3, 8, torch.float32)
    arguments = {"weight": weight, "noise_table": noise_table, "slots": slots, name: replacement}
    with pytest.raises(ValueError, match=name):
        rmsnorm_slots(x, arguments["weight"], arguments["noise_table"], arguments["slots"], EPS)
