"""Mismatch correction: what the loss weighs tokens with because the behaviour μ that sampled is not the trainer's.

μ differs from π_old by lag (an older version), by adaptive noise and by the server's arithmetic. All three are one
thing here: the log-ratio log π_old − log μ, with μ's log-probabilities as the server gave them. Weights carry no
gradient. A token that a mask leaves out still counts in the loss's denominator: the loss does not depend on the split.

Legend: T policy tokens of a micro-batch, rollout after rollout; R its rollouts; `owners` int64 [T].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .messages import AlgorithmConfig

# exp(±20) is beyond any useful ratio and keeps 0 · ∞ out of the loss.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Weights:
    """What tokens are weighed with, fp32 [T], and where a cap or a mask acted, bool [T]."""

    values: Tensor
    limited: Tensor


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp, with logarithms beyond ±`LOG_RATIO_LIMIT` taken for that."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sums(values: Tensor, owners: Tensor) -> Tensor:
    """Return at each token the sum over its rollout [T]."""
    total = torch.zeros(int(owners.max()) + 1, dtype=values.dtype, device=values.device)
    return total.index_add(0, owners, values)[owners]


def means(values: Tensor, owners: Tensor) -> Tensor:
    """Return at each token the mean over its rollout [T]."""
    return sums(values, owners) / sums(torch.ones_like(values), owners)


def no_correction(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Weights:
    """Return ones."""
    return Weights(torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool))


def token_truncate(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Weights:
    """Return min(π_old/μ, cap) a token: truncated importance sampling (TIS; IMPALA's ρ, arXiv 1802.01561)."""
    return _truncated(bounded_exp(log_ratio), config)


def token_mask(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Weights:
    """Return π_old/μ a token, 0 outside the bounds: masked importance sampling (MIS; IcePop, arXiv 2510.18855)."""
    return _masked(bounded_exp(log_ratio), bounded_exp(log_ratio), config)


def sequence_truncate(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Weights:
    """Return min(Π π_old/μ, cap), the weight of the whole rollout, at each of its tokens."""
    return _truncated(bounded_exp(sums(log_ratio, owners)), config)


def sequence_mask(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Weights:
    """Return Π π_old/μ at each token of a rollout, 0 for a rollout outside the bounds."""
    weights = bounded_exp(sums(log_ratio, owners))
    return _masked(weights, weights, config)


def geometric_mask(log_ratio: Tensor, owners: Tensor, config: AlgorithmConfig) -> Weights:
    """Return 1, or 0 for a rollout whose geometric mean of π_old/μ, (Π π_old/μ)^(1/tokens), is outside the bounds."""
    return _masked(torch.ones_like(log_ratio), bounded_exp(means(log_ratio, owners)), config)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, AlgorithmConfig], Weights]] = {
    "none": no_correction,
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}


def _truncated(weights: Tensor, config: AlgorithmConfig) -> Weights:
    return Weights(weights.clamp(max=config.tis_cap), weights > config.tis_cap)


def _masked(weights: Tensor, tested: Tensor, config: AlgorithmConfig) -> Weights:
    outside = (tested < config.mask_low) | (tested > config.mask_high)
    return Weights(weights.masked_fill(outside, 0.0), outside)


def mismatch_metrics(logprobs: Tensor, behaviour: Tensor) -> dict[str, float]:
    """Return how far the behaviour's log-probabilities are from the trainer's, over fp32 [T] without gradient.

    KL(μ ‖ π) by k1 (μ − π, signed) and k3 (non-negative), mean |Δ|, mean π/μ, and the effective sample size as a share:
    (Σw)² / (T·Σw²) with w = π/μ.
    """
    difference = (logprobs - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(difference)
    return {
        "mismatch_kl_k1": float(-difference.mean()),
        "mismatch_kl_k3": float((ratio - difference - 1).mean()),
        "logprob_abs_diff": float(difference.abs().mean()),
        "ratio_mean": float(ratio.mean()),
        "ess": float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
    }
