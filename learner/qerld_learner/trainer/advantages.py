"""Advantage estimators: rewards of a batch → one advantage a policy token. NumPy fp64, no torch: the API imports it.

A reward is a step: it ends somewhere in its rollout, and credits the tokens before. One reward for a whole rollout is
one step that ends with it, and gives all tokens the same advantage. An estimator of a group centres the step rewards of
the group; a token's advantage is the sum of the centred ones that end after it (GRPO's process supervision, arXiv
2402.03300, section 4.1.3, whatever the centring). An estimator of a batch normalises the tokens' returns, the sums of
the rewards that end after them.

No estimator returns NaN: without a signal (all rewards equal, or one rollout, whose baseline would be itself) the
advantages are zero.

Legend: S steps of a group, T policy tokens of a batch; `owners` int [S]: the rollout that each step is of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Indices = NDArray[np.int64]
STD_FLOOR = 1e-6


class AdvantageError(ValueError):
    """A reward is not finite, or a group is empty."""


@dataclass(frozen=True)
class Scored:
    """A rollout of `tokens` policy tokens: step rewards `values` [S] and `ends` [S], the policy tokens up to each end.

    1 ≤ ends ≤ tokens, ascending; the last one is `tokens` where there is a reward for the whole rollout.
    """

    values: Rewards
    ends: Indices
    tokens: int

    @property
    def returns(self) -> Rewards:
        """The sum of the rewards that end after each token [tokens]."""
        return spread(self.values, self.ends, self.tokens)


def group_norm(rewards: Rewards, owners: Indices) -> Rewards:
    """Return (r − mean) / (std + 1e-6) with the sample standard deviation: GRPO (arXiv 2402.03300, section 4.1.2)."""
    centred = mean_only(rewards, owners)
    if not centred.any():
        return centred
    normalised: Rewards = centred / (rewards.std(ddof=1) + STD_FLOOR)
    return normalised


def mean_only(rewards: Rewards, owners: Indices) -> Rewards:
    """Return r − mean: Dr. GRPO (arXiv 2503.20783, section 3.2), without the bias towards low-variance groups."""
    if not has_signal(rewards, owners):
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


def leave_one_out(rewards: Rewards, owners: Indices) -> Rewards:
    """Return r − the mean over the other rollouts: RLOO (arXiv 2402.14740)."""
    if not has_signal(rewards, owners):
        return np.zeros_like(rewards)
    sums, counts = np.bincount(owners, rewards), np.bincount(owners)
    baselines = (sums.sum() - sums) / (counts.sum() - counts)
    centred: Rewards = rewards - baselines[owners]
    return centred


def batch_norm(returns: Rewards) -> Rewards:
    """Return (R_t − mean) / (std + 1e-6) over all tokens of the batch [T]: REINFORCE++ (arXiv 2501.03262, eq. 10)."""
    if (returns == returns[0]).all():
        return np.zeros_like(returns)
    normalised: Rewards = (returns - returns.mean()) / (returns.std() + STD_FLOOR)
    return normalised


OF_GROUPS: dict[str, Callable[[Rewards, Indices], Rewards]] = {
    "group_norm": group_norm,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}
OF_BATCHES: dict[str, Callable[[Rewards], Rewards]] = {"batch_norm": batch_norm}


def has_signal(rewards: Rewards, owners: Indices) -> bool:
    """Tell whether step rewards of a group differ, and are of more than one rollout."""
    return bool((rewards != rewards[0]).any() and (owners != owners[0]).any())


def spread(values: Rewards, ends: Indices, tokens: int) -> Rewards:
    """Return [tokens]: at each token the sum of the values whose step ends after it."""
    at = np.zeros(tokens)
    np.add.at(at, ends - 1, values)
    return np.cumsum(at[::-1])[::-1].copy()


def token_advantages(name: str, groups: Sequence[Sequence[Scored]]) -> list[Rewards]:
    """Return the advantages of each rollout's tokens, rollout after rollout.

    Raises `AdvantageError` for an empty group or a reward that is NaN or infinite.
    """
    for group in groups:
        _check([scored.values for scored in group])
    if name in OF_BATCHES:
        returns = [scored.returns for group in groups for scored in group]
        return np.split(OF_BATCHES[name](np.concatenate(returns)), np.cumsum([len(one) for one in returns])[:-1])
    return [advantages for group in groups for advantages in _of_group(OF_GROUPS[name], group)]


def _of_group(estimator: Callable[[Rewards, Indices], Rewards], group: Sequence[Scored]) -> list[Rewards]:
    values = np.concatenate([scored.values for scored in group])
    owners = np.repeat(np.arange(len(group)), [len(scored.values) for scored in group])
    centred = np.split(estimator(values, owners), np.cumsum([len(scored.values) for scored in group])[:-1])
    return [replace(scored, values=part).returns for scored, part in zip(group, centred, strict=True)]


def advantages_of(name: str, rewards: Sequence[float]) -> Rewards:
    """Return the advantages of the rollouts of one group with one reward each; `name` is one of `OF_GROUPS`.

    Raises `AdvantageError` for an unknown estimator, an empty group or a reward that is NaN or infinite.
    """
    if name not in OF_GROUPS:
        raise AdvantageError(f"algorithm.advantage must be one of {sorted(OF_GROUPS)}, got {name!r}")
    _check([np.asarray([reward], dtype=np.float64) for reward in rewards])
    return OF_GROUPS[name](np.asarray(rewards, dtype=np.float64), np.arange(len(rewards)))


def _check(group: Sequence[Rewards]) -> None:
    if not group:
        raise AdvantageError("a group needs at least one reward, got 0; drop the group instead")
    for index, rewards in enumerate(group):
        for reward in rewards[~np.isfinite(rewards)]:
            raise AdvantageError(
                f"reward {index} of the group must be finite, got {reward}; report an error outcome instead"
            )
