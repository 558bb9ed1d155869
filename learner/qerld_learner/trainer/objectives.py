"""Policy objectives: ratio × clip × aggregation × correction + KL − entropy, each a pure function in a table.

Legend: T policy tokens of a micro-batch, rollout after rollout, R rollouts; `owners` int64 [T]: whose each token is. π:
the policy being trained, π_old: the one that the step starts from, μ: the behaviour that sampled, A: advantage. The
loss of an update is Σ_t weight_t · term_t over all its micro-batches, where the weights are fixed beforehand:
accumulation is exact whatever the split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import algorithm
from .corrections import CORRECTIONS, LOG_RATIO_LIMIT, bounded_exp, means
from .messages import AlgorithmConfig


class ObjectiveError(ValueError):
    """A field of the algorithm names no known function or is outside its range."""


@dataclass(frozen=True)
class TokenBatch:
    """All fp32 [T] but `owners`. `logprobs` and `entropy` carry the gradient.

    `old`: π_old's log-probabilities, None in the first update, where they are the detached `logprobs`. `reference`: the
    base's (adapter off), for a KL term. `entropy`: of the distribution that each token was drawn from.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    owners: Tensor
    entropy: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True)
class TokenTerms:
    """What the loss did with each token, without gradient: π_old/μ, the correction, where clip and its bounds acted."""

    ratio: Tensor
    clipped: Tensor
    correction: Tensor
    limited: Tensor


def token_ratio(log_ratio: Tensor, owners: Tensor) -> Tensor:
    """Return π/π_old a token: PPO's ratio."""
    return bounded_exp(log_ratio)


def sequence_ratio(log_ratio: Tensor, owners: Tensor) -> Tensor:
    """Return (Π π/π_old)^(1/tokens) at each token of a rollout: GSPO (arXiv 2507.18071, eq. 7).

    In the form of its eq. 14, with a token's own gradient: where a rollout has one advantage, eq. 7's exactly.
    """
    mean = means(log_ratio.detach(), owners)
    return bounded_exp(mean + log_ratio - log_ratio.detach())


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratio, "sequence": sequence_ratio}

Clip = Callable[[Tensor, Tensor, Tensor, AlgorithmConfig], tuple[Tensor, Tensor]]


def ppo_clip(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return −min(r·A, clip(r, 1−low, 1+high)·A) and where the clip was active (arXiv 1707.06347, eq. 7).

    low = high is GRPO's clip; high > low is DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    """
    free = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return -torch.minimum(free, bounded), bounded < free


def dual_clip(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return `ppo_clip`, with r at most `dual_clip` where A < 0 (arXiv 1912.09729)."""
    term, clipped = ppo_clip(ratio, logprobs, advantages, config)
    most = -config.dual_clip * advantages
    dual = (advantages < 0) & (term > most)
    return torch.where(dual, most, term), clipped | dual


def cispo_clip(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return −sg(clip(r, 1−low, 1+high))·A·log π: CISPO (arXiv 2506.13585, eq. 4, 5). No token loses its gradient."""
    bounded = ratio.detach().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -bounded * advantages * logprobs, bounded != ratio.detach()


def no_clip(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return −r·A: at r = 1 the gradient of REINFORCE."""
    return -ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)


CLIPS: dict[str, Clip] = {"ppo": ppo_clip, "dual": dual_clip, "cispo": cispo_clip, "none": no_clip}


def token_mean(lengths: Tensor, divisor: float) -> Tensor:
    """Return one weight a rollout: every token of the update counts alike (DAPO, arXiv 2503.14476, eq. 12)."""
    return _where_tokens(lengths, torch.full_like(lengths, 1 / max(1.0, float(lengths.sum()))))


def sequence_mean(lengths: Tensor, divisor: float) -> Tensor:
    """Return one weight a rollout: every rollout counts alike, its tokens share (GRPO, arXiv 2402.03300, eq. 3)."""
    return _where_tokens(lengths, 1 / (lengths.clamp(min=1) * len(lengths)))


def constant(lengths: Tensor, divisor: float) -> Tensor:
    """Return 1 / (rollouts · divisor): Dr. GRPO (arXiv 2503.20783, listing 1). With 1: sums over whole completions."""
    return _where_tokens(lengths, torch.full_like(lengths, 1 / (len(lengths) * divisor)))


AGGREGATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
}


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return log π − log ref: unbiased. As a loss its gradient is zero on average; it is meant for the reward."""
    return (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return (log π − log ref)² / 2: biased, with the KL's own gradient when sampled on-policy."""
    return kl_k1(logprobs, reference).square() / 2


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return ref/π − log(ref/π) − 1: unbiased and non-negative (arXiv 2402.03300, eq. 4)."""
    difference = kl_k1(reference, logprobs)
    return torch.exp(difference) - difference - 1


KLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def check(config: AlgorithmConfig) -> None:
    """Raise `ObjectiveError` for an unknown name or a number outside its range."""
    for field, text in algorithm.problems(config):
        raise ObjectiveError(f"algorithm.{field} {text}")


def policy_loss(config: AlgorithmConfig, batch: TokenBatch) -> tuple[Tensor, TokenTerms]:
    """Return this micro-batch's share of the update's loss (scalar) and what happened to each token.

    Behaviour, π_old, advantages, weights, reference and the correction carry no gradient.
    """
    old = (batch.logprobs if batch.old is None else batch.old).detach()
    behaviour, advantages = batch.behaviour.detach(), batch.advantages.detach()
    anchor = behaviour if config.old_policy == "behaviour" else old
    ratio = RATIOS[config.ratio](batch.logprobs - anchor, batch.owners)
    term, clipped = CLIPS[config.clip](ratio, batch.logprobs, advantages, config)
    correction = CORRECTIONS[config.correction](old - behaviour, batch.owners, config)
    term = term * correction.values
    if batch.reference is not None and config.kl_coef and config.kl_in == "loss":
        term = term + config.kl_coef * KLS[config.kl_estimator](batch.logprobs, batch.reference.detach())
    if config.entropy_coef:
        term = term - config.entropy_coef * batch.entropy
    loss = (term * batch.weights.detach()).sum()
    return loss, TokenTerms(bounded_exp(old - behaviour), clipped.detach(), correction.values, correction.limited)


def _where_tokens(lengths: Tensor, weights: Tensor) -> Tensor:
    """A rollout without tokens, left out as overlong, has no weight; it still counts as a rollout."""
    return torch.where(lengths > 0, weights, 0.0)
