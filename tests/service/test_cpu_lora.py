"""Grouped LoRA products against one product a token."""

from __future__ import annotations

import pytest
import torch
from qerld_service import cpu_lora

SLOTS, RANK, WIDTH = 3, 4, 10


def stacked(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(SLOTS, 1, rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("slots", [[0, 2, 0, 1, 2, 2], [1] * 6, [2]], ids=["mixed", "one adapter", "one token"])
def test_same_as_a_product_for_each_token(slots: list[int]) -> None:
    indices = torch.tensor(slots)
    x = torch.randn(len(slots), WIDTH, generator=torch.Generator().manual_seed(2))
    down = torch.zeros(len(slots), RANK)
    cpu_lora.bgmv_shrink(x, stacked(RANK, WIDTH), down, indices, 0.5)
    expected_down = torch.stack([0.5 * stacked(RANK, WIDTH)[slot, 0] @ row for slot, row in zip(slots, x, strict=True)])
    torch.testing.assert_close(down, expected_down)
    up = torch.ones(len(slots), 16)
    cpu_lora.bgmv_expand_slice(down, stacked(WIDTH, RANK), up, indices, 3, WIDTH)
    expected_up = torch.ones(len(slots), 16)
    for row, slot in enumerate(slots):
        expected_up[row, 3 : 3 + WIDTH] += stacked(WIDTH, RANK)[slot, 0] @ down[row]
    torch.testing.assert_close(up, expected_up)


def test_tokens_without_an_adapter_get_nothing() -> None:
    out = cpu_lora.lora_product(torch.ones(3, WIDTH), stacked(RANK, WIDTH), torch.tensor([-1, 0, -1]))
    assert torch.equal(out[[0, 2]], torch.zeros(2, RANK))
    assert out[1].abs().sum() > 0
    only = cpu_lora.lora_product(torch.ones(2, WIDTH), stacked(RANK, WIDTH), torch.tensor([-1, -1]))
    assert torch.equal(only, torch.zeros(2, RANK))


def test_padded_outputs_are_cut() -> None:
    out = torch.zeros(2, 7)
    cpu_lora.bgmv_expand(torch.ones(2, RANK), stacked(WIDTH, RANK), out, torch.tensor([0, 0]), add_inputs=False)
    torch.testing.assert_close(out[0], stacked(WIDTH, RANK)[0, 0, :7].sum(1))
