"""Log-probabilities of given tokens from hidden states, without keeping a [tokens, vocabulary] tensor.

With l = h Wᵀ / τ and p = softmax(l): log p_y = l_y − logsumexp(l), the entropy is logsumexp(l) − Σ_v p_v l_v, and
∂ log p_y / ∂h = (w_y − Σ_v p_v w_v) / τ. The last sum is one [d] vector a row, computed with the logits at hand: the
backward needs no logits and recomputes nothing. So for the entropy H: ∂H/∂h = −Σ_v p_v (log p_v + H) w_v / τ. The head
is frozen (LoRA leaves it alone), so W gets no gradient. A soft cap c (Gemma 2) maps a raw logit z to c·tanh(z/c), whose
slope 1 − tanh²(z/c) enters the sums and w_y's factor.

Rows are taken in chunks, so that the extra memory is a chunk's logits in fp32 and p in the hidden states' dtype. The
two products are the library's; one kernel reads the logits in between: normaliser and entropy by the online softmax
(arXiv 1805.02867) in one pass, p in a second one over a row that is still in the cache.

Legend: N rows, d hidden size, V vocabulary, P (row, target) pairs; n rows and m pairs of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerld_kernels.jit import can_launch, jit, next_power_of_2, tl

__all__ = ["Head", "pair_logprobs", "softmax_statistics", "softmax_statistics_reference"]

# Logits of one chunk in fp32. Large products pay on a GPU only, whose products are made of tiles of up to 256 rows.
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 640 << 20}
_TILE_ROWS = 256
_BLOCK = 4096


@dataclass(frozen=True)
class Head:
    """The frozen output head: weight [V, d], `temperature` folded into the logits, and the architecture's soft cap."""

    weight: Tensor
    temperature: float = 1.0
    softcap: float | None = None

    def logits(self, raw: Tensor) -> Tensor:
        """The logits, capped and over the temperature, of raw products."""
        capped = raw if self.softcap is None else self.softcap * torch.tanh(raw / self.softcap)
        return capped / self.temperature

    def slope(self, raw: Tensor) -> Tensor:
        """The derivative of the soft cap at raw products; ones without one."""
        return torch.ones_like(raw) if self.softcap is None else 1 - torch.tanh(raw / self.softcap).square()


def pair_logprobs(
    hidden: Tensor, head: Head, pair_row: Tensor, pair_target: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log p(target | row) fp32 [P] and the entropy fp32 [N] of each row's distribution, in nats.

    hidden: [N, d]; pair_row, pair_target: int64 [P]. Only `hidden` gets a gradient, of the entropy only when asked for:
    that costs one more product of the head's size.
    """
    want = hidden.requires_grad and torch.is_grad_enabled()
    wanted = _Wanted(want, want and entropy_gradient)
    out: tuple[Tensor, Tensor] = _PairLogprobs.apply(hidden, head, pair_row, pair_target, wanted)
    return out


@dataclass(frozen=True)
class _Wanted:
    """Which gradients a backward will ask for."""

    logprobs: bool
    entropy: bool


class _PairLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, pair_row: Tensor, pair_target: Tensor, wanted: _Wanted
    ) -> tuple[Tensor, Tensor]:
        order = torch.argsort(pair_row, stable=True)
        rows, targets = pair_row[order], pair_target[order]
        step = _chunk_rows(CHUNK_BYTES[hidden.device.type], head.weight.shape[0])
        if len(hidden) <= step:
            edges = [0, len(rows)]
        else:
            starts = torch.arange(0, len(hidden) + step, step, device=rows.device)
            edges = torch.searchsorted(rows, starts).tolist()  # one wait for the device, however many chunks
        parts = [_chunk(hidden[:0], head, rows[:0], targets[:0], wanted)]  # of no rows: there may be none
        for index, start in enumerate(range(0, len(hidden), step)):
            block, pairs = hidden[start : start + step], slice(edges[index], edges[index + 1])
            parts.append(_chunk(block, head, rows[pairs] - start, targets[pairs], wanted))
        logprobs = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        logprobs[order] = torch.cat([part[0] for part in parts])
        entropy = torch.cat([part[1] for part in parts])
        if wanted.logprobs:
            slopes = [torch.cat([part[3] for part in parts if part[3] is not None])] if wanted.entropy else []
            ctx.save_for_backward(torch.cat([part[2] for part in parts if part[2] is not None]), order, rows, *slopes)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        if not wanted.entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        jacobian, order, rows, *slopes = ctx.saved_tensors
        hidden_grad = torch.zeros(ctx.shape, dtype=torch.float32, device=rows.device)
        hidden_grad.index_add_(0, rows, jacobian.float() * grads[0][order, None])
        for slope in slopes:
            hidden_grad += slope.float() * grads[1][:, None]
        return hidden_grad.to(ctx.dtype), None, None, None, None


def _chunk_rows(bytes_: int, vocabulary: int) -> int:
    """As many as fit, in whole tiles where that is one or more."""
    rows = max(1, bytes_ // (4 * vocabulary))
    return rows // _TILE_ROWS * _TILE_ROWS or rows


def _chunk(
    block: Tensor, head: Head, rows: Tensor, targets: Tensor, wanted: _Wanted
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return log-probabilities [m], entropies [n] and, in the block's dtype, their Jacobian rows [m, d] and [n, d]."""
    raw = _fp32_product(block, head.weight)
    chosen = raw[rows, targets]
    normaliser, entropy, sloped = softmax_statistics(raw, head, block.dtype if wanted.logprobs else None)
    logprobs = head.logits(chosen) - normaliser[rows]
    if sloped is None:
        return logprobs, entropy, None, None
    own = head.weight[targets].float() * head.slope(chosen).unsqueeze(-1)
    expected = sloped @ head.weight
    jacobian = (own - expected[rows].float()) / head.temperature
    slopes = _entropy_slopes(raw, head, normaliser, entropy, block.dtype) if wanted.entropy else None
    return logprobs, entropy, jacobian.to(block.dtype), slopes


def _entropy_slopes(raw: Tensor, head: Head, normaliser: Tensor, entropy: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the entropy's derivative [n, d] by each row: −Σ_v p_v (log p_v + H) W_v, over the temperature.

    Plain torch on every device: few runs have an entropy bonus.
    """
    logprobs = head.logits(raw) - normaliser.unsqueeze(-1)
    terms = logprobs.exp() * (logprobs + entropy.unsqueeze(-1))
    if head.softcap is not None:
        terms *= head.slope(raw)
    return ((terms.to(dtype) @ head.weight).float() / -head.temperature).to(dtype)


def _fp32_product(block: Tensor, weight: Tensor) -> Tensor:
    """Without a rounding to the inputs' dtype: a logit of 16 in bf16 is a multiple of 1/8."""
    if block.dtype == torch.float32:
        return block @ weight.T
    if block.is_cuda:
        return torch.mm(block, weight.T, out_dtype=torch.float32)
    return block.float() @ weight.float().T


def softmax_statistics(raw: Tensor, head: Head, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of raw products fp32 [n, V]: logsumexp [n] and entropy [n] of the logits, and p × the soft cap's slope.

    The last, [n, V], is made in `dtype`, None to leave it out. Raises ValueError unless `raw` is fp32 with
    contiguous rows.
    """
    if raw.ndim != 2 or raw.dtype != torch.float32 or raw.stride(1) != 1:
        raise ValueError(
            f"raw: must be float32 [n, V] with contiguous rows, got {raw.dtype} {tuple(raw.shape)}, "
            f"strides {raw.stride()}; call contiguous()"
        )
    if not can_launch(raw):
        return softmax_statistics_reference(raw, head, dtype)
    rows, vocabulary = raw.shape
    normaliser, entropy = (torch.empty(rows, dtype=torch.float32, device=raw.device) for _ in range(2))
    sloped = None if dtype is None else torch.empty(rows, vocabulary, dtype=dtype, device=raw.device)
    if rows:
        _statistics_kernel[(rows,)](
            raw, normaliser, entropy, raw if sloped is None else sloped, raw.stride(0), vocabulary,
            1.0 / head.temperature, head.softcap or 0.0,
            CAPPED=head.softcap is not None, WITH_P=sloped is not None, BLOCK=min(_BLOCK, next_power_of_2(vocabulary)),
            num_warps=8,
        )  # fmt: skip
    return normaliser, entropy, sloped


def softmax_statistics_reference(
    raw: Tensor, head: Head, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same in plain torch, several passes over the logits; what the CPU uses."""
    logits = head.logits(raw)
    peak = logits.amax(-1, keepdim=True)
    below = logits.sub_(peak)
    share = torch.exp(below)
    mass = share.sum(-1, keepdim=True)
    # Σ p (l − peak) instead of Σ p l: large logits would cancel.
    entropy = mass.log().squeeze(-1) - torch.einsum("nv,nv->n", share, below) / mass.squeeze(-1)
    normaliser = (peak + mass.log()).squeeze(-1)
    if dtype is None:
        return normaliser, entropy, None
    share /= mass
    if head.softcap is not None:
        share *= head.slope(raw)
    return normaliser, entropy, share.to(dtype)


@jit
def _statistics_kernel(
    raw_ptr, normaliser_ptr, entropy_ptr, sloped_ptr, stride, vocabulary, inverse_temperature, softcap,
    CAPPED: tl.constexpr, WITH_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program. Lanes keep their own running maximum and sums over the blocks and join at the end."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        logit = tl.load(raw_ptr + row * stride + start + columns, mask=inside, other=float("-inf"))
        if CAPPED:
            logit = tl.where(inside, softcap * _tanh(logit / softcap), float("-inf"))
        logit *= inverse_temperature
        new = tl.maximum(largest, logit)
        # A lane's first block makes its maximum finite; a lane beyond a vocabulary smaller than BLOCK stays at −∞.
        sunk = tl.where(largest == float("-inf"), 0.0, largest - new)
        above = tl.where(inside, logit - new, 0.0)
        share = tl.where(inside, tl.exp(above), 0.0)
        weighted = (weighted + total * sunk) * tl.exp(sunk) + share * above
        total = total * tl.exp(sunk) + share
        largest = new
    peak = tl.max(largest, axis=0)
    sunk = tl.where(largest == float("-inf"), 0.0, largest - peak)
    mass = tl.sum(total * tl.exp(sunk), axis=0)
    tl.store(normaliser_ptr + row, peak + tl.log(mass))
    # Σ p (l − peak) instead of Σ p l: large logits would cancel.
    tl.store(entropy_ptr + row, tl.log(mass) - tl.sum((weighted + total * sunk) * tl.exp(sunk), axis=0) / mass)
    if WITH_P:
        for start in range(0, vocabulary, BLOCK):
            inside = start + columns < vocabulary
            logit = tl.load(raw_ptr + row * stride + start + columns, mask=inside, other=0.0)
            slope = 1.0
            if CAPPED:
                bent = _tanh(logit / softcap)
                slope = 1.0 - bent * bent
                logit = softcap * bent
            p = tl.exp(logit * inverse_temperature - peak) / mass * slope
            tl.store(sloped_ptr + row * vocabulary + start + columns, p.to(sloped_ptr.dtype.element_ty), mask=inside)


@jit
def _tanh(x):
    """By exp of a negative number, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    bent = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -bent, bent)
