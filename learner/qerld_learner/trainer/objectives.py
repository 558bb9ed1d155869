"""Policy objectives: ratio × clip × aggregation × correction, each a pure function in a table.

Legend: T tokens of a micro-batch (trainable ones only, rollout after rollout), R rollouts. π: the policy being
trained, μ: the behaviour that sampled, A: advantage. The loss of a step is Σ_t weight_t · term_t over all its
micro-batches, where the weights of the whole step are fixed beforehand: accumulation is exact whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .messages import AlgorithmConfig

# exp(±20) is beyond any useful ratio and keeps 0 · ∞ out of the loss.
LOG_RATIO_LIMIT = 20.0


class ObjectiveError(ValueError):
    """A field of the algorithm names no known function or is outside its range."""


@dataclass(frozen=True)
class TokenBatch:
    """All fp32 [T]. `logprobs` carries the gradient; `reference`: the base's (adapter off), for the KL term."""

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class TokenTerms:
    """What the loss did with each token, without gradient: π/μ, whether the clip was active, the correction."""

    ratio: Tensor
    clipped: Tensor
    correction: Tensor


def behaviour_ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """Return π/μ: PPO's ratio with the sampler as the old policy."""
    return _exp(logprobs - behaviour)


def proximal_ratio(logprobs: Tensor, _behaviour: Tensor) -> Tensor:
    """Return π/π_old with π_old the parent's own log-probabilities: 1, with the score function as its gradient."""
    return torch.exp(logprobs - logprobs.detach())


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"behaviour": behaviour_ratio, "proximal": proximal_ratio}


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return −min(r·A, clip(r, 1−low, 1+high)·A) and where the clip was active (arXiv 1707.06347, eq. 7).

    low = high is GRPO's clip; high > low is DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(free, bounded), bounded < free


CLIPS: dict[str, Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]] = {"ppo": ppo_clip}


def token_mean(lengths: Tensor) -> Tensor:
    """Return one weight a rollout: every token of the step counts alike (DAPO, arXiv 2503.14476, eq. 12)."""
    return torch.full_like(lengths, 1 / float(lengths.sum()))


def sequence_mean(lengths: Tensor) -> Tensor:
    """Return one weight a rollout: every rollout counts alike, its tokens share (GRPO, arXiv 2402.03300, eq. 3)."""
    return 1 / (lengths * len(lengths))


AGGREGATIONS: dict[str, Callable[[Tensor], Tensor]] = {"token_mean": token_mean, "sequence_mean": sequence_mean}


def no_correction(log_ratio: Tensor, _cap: float) -> Tensor:
    """Return ones."""
    return torch.ones_like(log_ratio)


def truncated_importance(log_ratio: Tensor, cap: float) -> Tensor:
    """Return min(π/μ, cap) a token: truncated importance sampling (TIS) for a sampler that differs from the trainer."""
    return _exp(log_ratio).clamp(max=cap)


CORRECTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {"none": no_correction, "tis": truncated_importance}


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return exp(ref − π) − (ref − π) − 1 a token, an unbiased and non-negative estimate of KL(π ‖ ref)."""
    difference = (reference - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(difference) - difference - 1


def check(config: AlgorithmConfig) -> None:
    """Raise `ObjectiveError` for an unknown name or a number outside its range."""
    if config.aggregation not in AGGREGATIONS:
        raise ObjectiveError(f"algorithm.aggregation must be one of {sorted(AGGREGATIONS)}, got {config.aggregation!r}")
    if not 0 <= config.clip_low <= 1:
        raise ObjectiveError(f"algorithm.clip_low must be in [0, 1], got {config.clip_low}; a ratio is never below 0")
    if not 0 <= config.clip_high < float("inf"):
        raise ObjectiveError(f"algorithm.clip_high must be finite and ≥ 0, got {config.clip_high}")
    if not 0 <= config.kl_coef < float("inf"):
        raise ObjectiveError(f"algorithm.kl_coef must be finite and ≥ 0, got {config.kl_coef}; 0 switches the term off")
    if config.tis_cap is not None and not 0 < config.tis_cap < float("inf"):
        raise ObjectiveError(
            f"algorithm.tis_cap must be finite and > 0, got {config.tis_cap}; unset it for no correction"
        )


def policy_loss(config: AlgorithmConfig, batch: TokenBatch) -> tuple[Tensor, TokenTerms]:
    """Return this micro-batch's share of the step's loss (scalar) and what happened to each token.

    Behaviour, advantages, weights, reference and the correction carry no gradient.
    """
    corrected = config.tis_cap is not None
    log_ratio = (batch.logprobs - batch.behaviour).detach()
    ratio = RATIOS["proximal" if corrected else "behaviour"](batch.logprobs, batch.behaviour.detach())
    term, clipped = CLIPS["ppo"](ratio, batch.advantages.detach(), config.clip_low, config.clip_high)
    correction = CORRECTIONS["tis" if corrected else "none"](log_ratio, config.tis_cap or 0.0)
    term = term * correction
    if batch.reference is not None and config.kl_coef:
        term = term + config.kl_coef * kl_k3(batch.logprobs, batch.reference.detach())
    loss = (term * batch.weights.detach()).sum()
    return loss, TokenTerms(_exp(log_ratio), clipped.detach(), correction)


def mismatch_metrics(logprobs: Tensor, behaviour: Tensor) -> dict[str, float]:
    """Return how far the sampler's log-probabilities are from the trainer's, over fp32 [T] without gradient.

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


def tis_truncated_share(config: AlgorithmConfig, ratio: Tensor) -> float:
    """Return the share of tokens whose π/μ exceeds the cap; 0 without a correction."""
    return 0.0 if config.tis_cap is None else float((ratio > config.tis_cap).float().mean())


def _exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
