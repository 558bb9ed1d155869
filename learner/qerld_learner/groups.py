"""When a group is ready, and what its rollouts become when it is not: pure functions of its members and the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .records import OutcomeKind, ReceiptState, RolloutState
from .trainer.advantages import ADVANTAGES, advantages_of

# The advantage of a rollout is relative to its group: one reward alone has nothing to be compared with.
LEAST_REWARDS = 2


class Verdict(StrEnum):
    """What becomes of a group now."""

    WAIT = "wait"
    READY = "ready"
    ZERO_VARIANCE = "dropped_zero_variance"
    EXPIRED = "dropped_expired"
    STALE = "dropped_stale"


@dataclass(frozen=True)
class Member:
    """One rollout of a group; `kind` and `reward` are None without an outcome, `reward` also without a reward."""

    rollout_id: str
    state: RolloutState
    kind: OutcomeKind | None = None
    reward: float | None = None

    @property
    def resolved(self) -> bool:
        """Whether nothing more is awaited of it."""
        return self.state is RolloutState.FAILED or self.kind is not None


def rewards_of(members: Sequence[Member]) -> list[float]:
    """Return the rewards of a group; errors, abstentions and failed rollouts are left out, never counted as zero."""
    return [member.reward for member in members if member.reward is not None]


def verdict(members: Sequence[Member], *, deadline: float | None, now: float, drop_zero_variance: bool) -> Verdict:
    """Judge a group. `deadline` is None while it is still being sampled.

    Ready: every rollout is resolved, or the deadline has passed; either way with at least two rewards.
    """
    complete = all(member.resolved for member in members)
    expired = deadline is not None and now >= deadline
    if not complete and not expired:
        return Verdict.WAIT
    rewards = rewards_of(members)
    if len(rewards) < LEAST_REWARDS:
        return Verdict.EXPIRED
    if drop_zero_variance and len(set(rewards)) == 1:
        return Verdict.ZERO_VARIANCE
    return Verdict.READY


def receipts_on(verdict: Verdict, members: Sequence[Member]) -> dict[str, ReceiptState]:
    """Return the final receipts that a verdict brings, by rollout id.

    Failed and abstained rollouts have theirs already. In a group that is ready by its deadline, the rollouts without an
    outcome expire alone.
    """
    if verdict is Verdict.WAIT:
        return {}
    if verdict is Verdict.READY:
        return {m.rollout_id: ReceiptState.DROPPED_EXPIRED for m in members if not m.resolved}
    state = ReceiptState(verdict.value)
    return {m.rollout_id: state for m in members if m.reward is not None or not m.resolved}


def lag(learner_version: int, made_by: int) -> int:
    """Return the lag, in versions, of tokens of the version `made_by` when `learner_version` is trained on.

    A version that a rollback published counts like any other, although its weights are an ancestor's.
    """
    return max(0, learner_version - made_by)


def would_be_advantages(advantage: str, rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the advantages of a group with these rewards by rollout id; empty with fewer than two.

    Estimators over a whole batch have no value for one group: empty, too.
    """
    if len(rewards) < LEAST_REWARDS or advantage not in ADVANTAGES:
        return {}
    values = advantages_of(advantage, list(rewards.values()))
    return dict(zip(rewards, (float(value) for value in values), strict=True))
