"""LoRA products of a batch whose tokens are grouped by slot, against one product a token."""

from __future__ import annotations

import pytest
import torch
from qerld_service.cpu_lora import add_lora, group_by_slot

SLOTS, RANK, INPUTS, WIDTHS = 3, 4, 10, (7, 5)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "slots",
    [[0, 2, 0, 1, 2, 2], [0, 0, 2, 2, 2], [1] * 6, [2], [-1, 0, -1], [1, -1, -1, 1], [-1, -1]],
    ids=["mixed", "in turn", "one adapter", "one token", "beside none", "around none", "none"],
)
def test_same_as_a_product_for_each_token(slots: list[int]) -> None:
    x, start = random(len(slots), INPUTS, seed=1), random(len(slots), sum(WIDTHS), seed=2)
    a = [random(SLOTS, 1, RANK, INPUTS, seed=3 + part) for part in range(len(WIDTHS))]
    b = [random(SLOTS, 1, width, RANK, seed=5 + part) for part, width in enumerate(WIDTHS)]
    y = start.clone()
    add_lora(y, x, a, b, WIDTHS, group_by_slot(torch.tensor(slots)), scale=0.5)
    for token, slot in enumerate(slots):
        added = [0.5 * b_i[slot, 0] @ (a_i[slot, 0] @ x[token]) for a_i, b_i in zip(a, b, strict=True)]
        expected = start[token] + torch.cat(added) if slot >= 0 else start[token]
        torch.testing.assert_close(y[token], expected)
        assert slot >= 0 or torch.equal(y[token], start[token])


def test_tokens_that_follow_each_other_are_a_slice() -> None:
    assert group_by_slot(torch.tensor([-1, 2, 2, 0])) == [(0, slice(3, 4)), (2, slice(1, 3))]
