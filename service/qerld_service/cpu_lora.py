"""LoRA products on the CPU, one pair of matrix products an adapter instead of a copy of its weights for every token.

vLLM's CPU path gathers [tokens, rank, width] copies of A and B for each layer: for 2,048 tokens of SmolLM2 16 GB are
copied, and the adapter takes many times longer than the model. A batch holds few adapters: its tokens are grouped by
slot, once a batch and not once a layer.
Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Group", "GroupedLora", "add_lora", "group_by_slot", "register_cpu_lora"]

Group = tuple[int, slice | torch.Tensor]
"""A slot and its tokens: a slice where they follow each other, which is nearly always, else their indices."""


def group_by_slot(slots_T: torch.Tensor) -> list[Group]:
    """The tokens of each slot; those without an adapter (slot −1) are in no group."""
    groups: list[Group] = []
    for slot in torch.unique(slots_T).tolist():
        if slot >= 0:
            rows = (slots_T == slot).nonzero().squeeze(1)
            first, last = int(rows[0]), int(rows[-1])
            groups.append((slot, slice(first, last + 1) if last - first + 1 == len(rows) else rows))
    return groups


def add_lora(
    outputs_TO: torch.Tensor,
    inputs_TI: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    widths: Sequence[int],
    groups: Sequence[Group],
    scale: float = 1.0,
) -> None:
    """Add scale · B · A · x to each token's outputs, in place.

    A fused layer (q, k, v) has one A [slots, 1, R, I] and one B [slots, 1, width, R] for each of its parts, whose
    outputs stand side by side, `widths` columns each.
    """
    for slot, rows in groups:
        inputs, begin = inputs_TI[rows], 0
        for a_i, b_i, width in zip(a, b, widths, strict=True):
            low_rank, up = inputs @ a_i[slot, 0].T, b_i[slot, 0].T
            columns = slice(begin, begin + width)
            if isinstance(rows, slice):
                outputs_TO[rows, columns].addmm_(low_rank, up, alpha=scale)
            else:
                outputs_TO[:, columns].index_add_(0, rows, low_rank @ up, alpha=scale)
            begin += width


class GroupedLora:
    """Mixin in front of vLLM's `PunicaWrapperCPU`, which knows the slot of each token of a batch."""

    token_lora_indices: torch.Tensor
    _groups: Sequence[Group] = ()

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM when the slots of a batch's tokens are others than in the batch before."""
        super().update_metadata(*args, **kwargs)  # type: ignore[misc]
        self._groups = group_by_slot(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """In the place of vLLM's method: the LoRA of a linear layer, y [T, O] in place."""
        add_lora(y, x, lora_a_stacked, lora_b_stacked, output_slices, self._groups, scale)


def register_cpu_lora() -> None:
    """vLLM looks its wrapper up by name when it makes the LoRA manager; from now on it finds ours."""
    from vllm.lora.punica_wrapper import punica_cpu

    stock = punica_cpu.PunicaWrapperCPU
    punica_cpu.PunicaWrapperCPU = type("GroupedPunicaWrapperCPU", (GroupedLora, stock), {})
