"""Advantage estimators: rewards of one group → one advantage a rollout.

Each is a pure function [n] → [n] of fp64 rewards; `ADVANTAGES` is the table of names. No estimator returns NaN: a group
whose rewards are all equal has advantage zero everywhere, and so has a group of one, whose baseline would be itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
STD_FLOOR = 1e-6


class AdvantageError(ValueError):
    """A reward is not finite, or a group is empty."""


def group_norm(rewards: Rewards) -> Rewards:
    """Return (r − mean) / (std + 1e-6) with the sample standard deviation: GRPO (arXiv 2402.03300, section 4.1.2)."""
    centred = mean_only(rewards)
    if not centred.any():
        return centred
    normalised: Rewards = centred / (rewards.std(ddof=1) + STD_FLOOR)
    return normalised


def mean_only(rewards: Rewards) -> Rewards:
    """Return r − mean: Dr. GRPO (arXiv 2503.20783, section 3.2), without the bias towards low-variance groups."""
    if is_zero_variance(rewards):
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


ADVANTAGES: dict[str, Callable[[Rewards], Rewards]] = {"group_norm": group_norm, "mean_only": mean_only}


def is_zero_variance(rewards: Rewards) -> bool:
    """Tell whether a group has no signal: one rollout, or all rewards equal."""
    return bool(len(rewards) < 2 or (rewards == rewards[0]).all())


def advantages_of(name: str, rewards: Sequence[float]) -> Rewards:
    """Return the advantages of one group.

    Raises `AdvantageError` for an unknown estimator, an empty group or a reward that is NaN or infinite.
    """
    if name not in ADVANTAGES:
        raise AdvantageError(f"algorithm.advantage must be one of {sorted(ADVANTAGES)}, got {name!r}")
    if not rewards:
        raise AdvantageError("a group needs at least one reward, got 0; drop the group instead")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise AdvantageError(
                f"reward {index} of the group must be finite, got {reward}; report an error outcome instead"
            )
    return ADVANTAGES[name](np.asarray(rewards, dtype=np.float64))
