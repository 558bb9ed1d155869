"""Logits in fp32 from half-precision hidden states: the product accumulates in fp32 anyway, vLLM then rounds it.

A logit of 16 in bf16 is a multiple of 1/8. That rounding alone moved log-probabilities of SmolLM2 by 0.04 nats a token
against the trainer's; the trainer keeps fp32 logits, too (`qerld_kernels.linear_logprob`).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["register_fp32_logits", "wide_product"]


def wide_product(hidden_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """hidden · weightᵀ, [T, V] in fp32, without a rounding to the inputs' dtype in between."""
    return torch.mm(hidden_TD, weight_VD.T, out_dtype=torch.float32)


def register_fp32_logits() -> None:
    """Put it in the place of the output head's product, where that is in half precision on a GPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    stock = UnquantizedEmbeddingMethod.apply

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        weight = layer.weight
        if bias is not None or x.dim() != 2 or x.dtype == torch.float32 or x.dtype != weight.dtype:
            return stock(self, layer, x, bias)
        return wide_product(x, weight)

    UnquantizedEmbeddingMethod.apply = apply
