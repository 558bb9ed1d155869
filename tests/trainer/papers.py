"""The papers' objectives in NumPy, on padded matrices: the reference that the trainer's are compared with.

Nothing here is shared with the trainer. R rollouts in groups of K, L tokens at most; matrices are [R, L], `mask` is 1
at the tokens of a rollout. A loss is a function of the policy's log-probabilities `pi`; `x.pi` is the point where a
stop-gradient holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
EPS = 1e-6


@dataclass(frozen=True)
class Problem:
    """Random numbers of one batch. `longest`: max_tokens of the run, `lengths`: of each completion [R]."""

    pi: Array
    old: Array
    mu: Array
    ref: Array
    mask: Array
    rewards: Array
    group: int
    longest: int
    lengths: NDArray[np.int64]
    truncated: NDArray[np.bool_]


def problem(seed: int, groups: int = 4, group: int = 5, longest: int = 9) -> Problem:
    """Ragged lengths from one token on, ratios up to e^±8, one group without variance."""
    rng = np.random.default_rng(seed)
    rows = groups * group
    lengths = rng.integers(1, longest + 1, rows)
    lengths[0], lengths[-1] = 1, longest
    mask = (np.arange(longest) < lengths[:, None]).astype(float)
    pi = -rng.exponential(1.0, (rows, longest))
    shift = rng.normal(0, 0.3, (rows, longest)) + 8.0 * rng.choice([-1, 0, 1], (rows, longest), p=[0.05, 0.9, 0.05])
    old = pi + shift
    mu = old + rng.normal(0, 0.4, (rows, longest))
    ref = old + rng.normal(0, 0.4, (rows, longest))
    rewards = rng.normal(0, 1, rows)
    rewards[group : 2 * group] = 0.7
    return Problem(pi, old, mu, ref, mask, rewards, group, longest, lengths, lengths == longest)


def of_group(x: Problem, rewards: Array) -> Array:
    return rewards.reshape(-1, x.group)


def normalised(x: Problem, rewards: Array) -> Array:
    """(r − mean) / std of the group; zero where the group has one reward only."""
    table = of_group(x, rewards)
    centred = table - table.mean(1, keepdims=True)
    std = table.std(1, ddof=1, keepdims=True)
    return np.where(np.ptp(table, axis=1, keepdims=True) > 0, centred / (std + EPS), 0.0).ravel()


def centred(x: Problem, rewards: Array) -> Array:
    table = of_group(x, rewards)
    return (table - table.mean(1, keepdims=True)).ravel()


def clipped_surrogate(ratio: Array, advantages: Array, low: float, high: float) -> Array:
    return np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


def grpo(x: Problem, pi: Array) -> float:
    """arXiv 2402.03300, eq. 3 with eq. 4's KL."""
    advantages = normalised(x, x.rewards)[:, None]
    kl = np.exp(x.ref - pi) - (x.ref - pi) - 1
    token = clipped_surrogate(np.exp(pi - x.old), advantages, 0.2, 0.2) - 0.04 * kl
    return -float(((token * x.mask).sum(1) / x.lengths).mean())


def dapo(x: Problem, pi: Array) -> float:
    """arXiv 2503.14476, eq. 8 and 12, with eq. 13's punishment of the rewards; a fifth of the longest is the buffer."""
    buffer = x.longest // 5
    free = x.longest - buffer
    length = np.where(x.lengths <= free, 0.0, np.where(x.lengths <= x.longest, (free - x.lengths) / buffer, -1.0))
    advantages = normalised(x, x.rewards + length)[:, None]
    token = clipped_surrogate(np.exp(pi - x.old), advantages, 0.2, 0.28)
    return -float((token * x.mask).sum() / x.lengths.sum())


def dr_grpo(x: Problem, pi: Array) -> float:
    """arXiv 2503.20783, section 3.2: no division by std or length; the constant is the longest completion."""
    token = clipped_surrogate(np.exp(pi - x.old), centred(x, x.rewards)[:, None], 0.2, 0.2)
    return -float((token * x.mask).sum(1).mean() / x.longest)


def gspo(x: Problem, pi: Array) -> float:
    """arXiv 2507.18071, eq. 5 with eq. 7's ratio: one number a rollout, no tokens."""
    ratio = np.exp(((pi - x.old) * x.mask).sum(1) / x.lengths)
    return -float(clipped_surrogate(ratio, normalised(x, x.rewards), 3e-4, 4e-4).mean())


def cispo(x: Problem, pi: Array) -> float:
    """arXiv 2506.13585, eq. 4 and 5: clipped weights without a gradient, not bounded below."""
    weights = np.minimum(np.exp(x.pi - x.old), 1 + 4.0)
    token = weights * normalised(x, x.rewards)[:, None] * pi
    return -float((token * x.mask).sum() / x.lengths.sum())


def rloo(x: Problem, pi: Array) -> float:
    """arXiv 2402.14740: R = r − β log(π/π_ref) of the completion, less the mean R of the others.

    The paper is on-policy; off it each token has its ratio, whose gradient at 1 is the paper's ∇ log π.
    """
    total = of_group(x, x.rewards - 0.03 * ((x.old - x.ref) * x.mask).sum(1))
    others = (total.sum(1, keepdims=True) - total) / (x.group - 1)
    return -float(((np.exp(pi - x.old) * (total - others).reshape(-1, 1)) * x.mask).sum(1).mean())


def reinforce_pp(x: Problem, pi: Array) -> float:
    """arXiv 2501.03262, eq. 8 to 10: A_t = r − β Σ_{i ≥ t} KL(i), normalised over all tokens of the batch."""
    kl = (x.old - x.ref) * x.mask
    advantages = x.rewards[:, None] - 0.01 * np.cumsum(kl[:, ::-1], 1)[:, ::-1]
    values = advantages[x.mask > 0]
    advantages = (advantages - values.mean()) / (values.std() + EPS)
    token = clipped_surrogate(np.exp(pi - x.old), advantages, 0.2, 0.2)
    return -float((token * x.mask).sum() / x.lengths.sum())


def ppo_clip(x: Problem, pi: Array) -> float:
    """arXiv 1707.06347, eq. 7, a mean over tokens; the group's mean reward is the value function."""
    token = clipped_surrogate(np.exp(pi - x.old), centred(x, x.rewards)[:, None], 0.2, 0.2)
    return -float((token * x.mask).sum() / x.lengths.sum())


PAPERS: dict[str, Callable[[Problem, Array], float]] = {
    "grpo": grpo,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "ppo_clip": ppo_clip,
}


def derivative(loss: Callable[[Array], float], at: Array, mask: Array) -> Array:
    """Central differences by each token's log-probability [R, L]."""
    found, step = np.zeros_like(at), 1e-5
    for index in np.argwhere(mask > 0):
        up, down = at.copy(), at.copy()
        up[tuple(index)] += step
        down[tuple(index)] -= step
        found[tuple(index)] = (loss(up) - loss(down)) / (2 * step)
    return found
