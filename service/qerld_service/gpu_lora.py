"""LoRA products on a GPU by our kernels, which read each token's slot where vLLM's sort the batch by adapter first.

A layer whose weights are `TiledNvfp4` is one op with its LoRA; another adds it to what it gave, as in vLLM. Off unless
the setting `lora_kernel` says so. What our kernels do not take goes to vLLM's: decided by shapes and dtypes
alone, so that compiled code has one of the two in it, whatever the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from qerld_kernels.lora import MAX_PIECES, MAX_RANK, add_lora
from qerld_kernels.low_rank import counters_for
from qerld_kernels.matmul import lora_matmul

from qerld_service.fp4_scheme import TiledNvfp4

__all__ = ["SlotLora", "fits", "register_gpu_lora"]

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
Apply = Callable[..., torch.Tensor]


def fits(x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], outputs: int) -> bool:
    """Whether our kernels take a layer: x [T, I]; a: [slots, 1, R, I] and b: [slots, 1, width, R] each."""
    return (
        len(a) == len(b) <= MAX_PIECES
        and a[0].shape[2] == b[0].shape[3] <= MAX_RANK
        and x.ndim == 2
        and outputs == sum(b_i.shape[2] for b_i in b)
        and x.dtype in _DTYPES
        and all(tensor.dtype == x.dtype for tensor in (*a, *b))
    )


class SlotLora:
    """Mixin in front of vLLM's `PunicaWrapperGPU`."""

    _token_lora_indices: torch.Tensor
    """int64 [most tokens], the slot of each token of the batch, −1 without an adapter; one buffer for life."""
    token_mapping_meta: Any
    counters: torch.Tensor
    """Of `low_rank.Adapters`, one set for all layers, which run one after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        slots = self._token_lora_indices
        self.counters = torch.zeros(counters_for(len(slots)), dtype=torch.int32, device=slots.device)
        rank = kwargs["lora_config"].max_lora_rank
        if rank > MAX_RANK:
            logger.warning(
                "lora_kernel: qerld's kernels take ranks up to %d, and max_lora_rank makes slots of rank %d: "
                "vLLM's kernels serve; lower max_lora_rank or set lora_kernel to vllm",
                MAX_RANK,
                rank,
            )

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """In the place of vLLM's method: the LoRA of a linear layer, y [T, O] in place.

        vLLM's `add_inputs=False` comes with a y of zeros, to which adding is as good.
        """
        if scale != 1.0 or y.dtype != x.dtype or not fits(x, lora_a_stacked, lora_b_stacked, y.shape[-1]):
            super().add_lora_linear(  # type: ignore[misc]
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs
            )
            return
        # The flag is on the host: a graph captured for batches without an adapter has no launches in it.
        none = self.token_mapping_meta.no_lora_flag_cpu
        add_lora(y, x, list(lora_a_stacked), list(lora_b_stacked), self._token_lora_indices, none)


def register_gpu_lora() -> None:
    """vLLM looks its wrapper up by name when it makes the LoRA manager; from now on it finds ours."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.punica_wrapper import punica_gpu

    stock = punica_gpu.PunicaWrapperGPU
    punica_gpu.PunicaWrapperGPU = type("SlotPunicaWrapperGPU", (SlotLora, stock), {})
    BaseLinearLayerWithLoRA._apply_sync = _in_one(BaseLinearLayerWithLoRA._apply_sync)


def _in_one(two_steps: Apply) -> Apply:
    """vLLM's method, but in one op for a layer of ours."""

    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        base, wrapper, a, b = layer.base_layer, layer.punica_wrapper, layer.lora_a_stacked, layer.lora_b_stacked
        rows = x.reshape(-1, x.shape[-1])
        if not isinstance(getattr(base, "scheme", None), TiledNvfp4) or not fits(rows, a, b, base.outputs):
            return two_steps(layer, x, bias)
        y: torch.Tensor = lora_matmul(
            rows, base.weight_packed, base.weight_scale, base.weight_global_scale, base.outputs, list(a), list(b),
            wrapper._token_lora_indices, wrapper.token_mapping_meta.no_lora_flag_cpu, wrapper.counters,
        )  # fmt: skip
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    return apply
