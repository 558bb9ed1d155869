"""Log-probabilities of given tokens from hidden states, without keeping a [tokens, vocabulary] tensor.

With p = softmax(h Wᵀ / τ): log p_y = (h·w_y)/τ − logsumexp, and ∂ log p_y / ∂h = (w_y − Σ_v p_v w_v) / τ. The sum is
one [d] vector a row, computed with the logits at hand: the backward needs no logits and recomputes nothing. The head is
frozen (LoRA leaves it alone), so W gets no gradient. Chunks of rows bound the logits. A soft cap c (Gemma 2) maps a raw
logit z to l = c·tanh(z/c), whose slope 1 − (l/c)² enters both terms.

Legend: N rows, d hidden size, V vocabulary, P (row, target) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Logits of one chunk in fp32; the chunk's peak is about three times that. Large products pay on a GPU only.
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class Head:
    """The frozen output head: weight [V, d], `temperature` folded into the logits, and the architecture's soft cap."""

    weight: Tensor
    temperature: float = 1.0
    softcap: float | None = None


def pair_logprobs(hidden: Tensor, head: Head, pair_row: Tensor, pair_target: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(target | row) fp32 [P] and the entropy fp32 [N] of each row's distribution (no gradient), in nats.

    hidden: [N, d]; pair_row, pair_target: int64 [P]. Only `hidden` gets a gradient.
    """
    want_gradient = hidden.requires_grad and torch.is_grad_enabled()
    out: tuple[Tensor, Tensor] = _PairLogprobs.apply(hidden, head, pair_row, pair_target, want_gradient)  # type: ignore[no-untyped-call]
    return out


class _PairLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, pair_row: Tensor, pair_target: Tensor, want_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        order = torch.argsort(pair_row, stable=True)
        rows, targets = pair_row[order], pair_target[order]
        step = max(1, CHUNK_BYTES[hidden.device.type] // (4 * head.weight.shape[0]))
        parts = []
        for start in range(0, len(hidden), step):
            block = hidden[start : start + step]
            edges = torch.tensor([start, start + len(block)], device=rows.device)
            first, last = torch.searchsorted(rows, edges).tolist()
            parts.append(_chunk(block, head, rows[first:last] - start, targets[first:last], want_gradient))
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        logprobs[order] = torch.cat([part[0] for part in parts])
        entropy = torch.cat([part[1] for part in parts])
        if want_gradient:
            ctx.save_for_backward(torch.cat([part[2] for part in parts if part[2] is not None]), order, rows)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        jacobian, order, rows = ctx.saved_tensors
        hidden_grad = torch.zeros(ctx.shape, dtype=torch.float32, device=rows.device)
        hidden_grad.index_add_(0, rows, jacobian.float() * grads[0][order, None])
        return hidden_grad.to(ctx.dtype), None, None, None, None


def _fp32_logits(block: Tensor, weight: Tensor) -> Tensor:
    """Without a rounding to the inputs' dtype: a logit of 16 in bf16 is a multiple of 1/8."""
    if block.dtype == torch.float32:
        return block @ weight.T
    if block.is_cuda:
        return torch.mm(block, weight.T, out_dtype=torch.float32)
    return block.float() @ weight.float().T


def _chunk(
    block: Tensor, head: Head, rows: Tensor, targets: Tensor, want_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities [p], entropies [n] and Jacobian rows [p, d] (in the block's dtype) of one chunk."""
    logits = _fp32_logits(block, head.weight)
    slope = None
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap)
        slope = 1 - logits.square()
        logits = logits * head.softcap
    logits /= head.temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    chosen = logits[rows, targets] - normaliser[rows]
    probabilities = torch.exp(logits - normaliser[:, None])
    entropy = normaliser - torch.einsum("nv,nv->n", probabilities, logits)
    if not want_gradient:
        return chosen, entropy, None
    own = head.weight[targets].float()
    if slope is not None:
        probabilities *= slope
        own = own * slope[rows, targets][:, None]
    expected = probabilities.to(block.dtype) @ head.weight
    jacobian = (own - expected[rows].float()) / head.temperature
    return chosen, entropy, jacobian.to(block.dtype)
