"""When a group is ready, and what its rollouts become when it is not: pure functions of its members and the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .records import OutcomeKind, ReceiptState, RolloutState, RunConfig
from .trainer.advantages import OF_BATCHES, OF_GROUPS, advantages_of


class Verdict(StrEnum):
    """What becomes of a group now."""

    WAIT = "wait"
    READY = "ready"
    ZERO_VARIANCE = "dropped_zero_variance"
    EXPIRED = "dropped_expired"
    STALE = "dropped_stale"


@dataclass(frozen=True)
class Closing:
    """When a run's groups are worth a step: from so many rewards on, and those of equal rewards only unless dropped."""

    drop_zero_variance: bool = True
    least_rewards: int = 2


def closing_of(config: RunConfig) -> Closing:
    """Return a run's rule. One reward alone has nothing to be compared with, except by estimators over a batch."""
    return Closing(config.drop_zero_variance, 1 if config.advantage in OF_BATCHES else 2)


def least_group(config: RunConfig) -> int:
    """Return the fewest rollouts that a group of the run may have: a group of one is one of equal rewards."""
    closing = closing_of(config)
    return 2 if closing.drop_zero_variance else closing.least_rewards


@dataclass(frozen=True)
class Member:
    """One rollout of a group; `kind` and `reward` are None without an outcome, `reward` also without a reward.

    `values`: the rewards by turn or token whose sum `reward` is; empty for one of the whole rollout.
    """

    rollout_id: str
    state: RolloutState
    kind: OutcomeKind | None = None
    reward: float | None = None
    values: tuple[float, ...] = ()

    @property
    def resolved(self) -> bool:
        """Whether nothing more is awaited of it."""
        return self.state is RolloutState.FAILED or self.kind is not None


def rewards_of(members: Sequence[Member]) -> list[float]:
    """Return the rewards of a group; errors, abstentions and failed rollouts are left out, never counted as zero."""
    return [member.reward for member in members if member.reward is not None]


def verdict(members: Sequence[Member], *, deadline: float | None, now: float, closing: Closing) -> Verdict:
    """Judge a group. `deadline` is None while it is still being sampled.

    Ready: every rollout is resolved, or the deadline has passed; either way with enough rewards.
    """
    complete = all(member.resolved for member in members)
    expired = deadline is not None and now >= deadline
    if not complete and not expired:
        return Verdict.WAIT
    rewards = rewards_of(members)
    if len(rewards) < closing.least_rewards:
        return Verdict.EXPIRED
    if closing.drop_zero_variance and len({value for member in members for value in _said(member)}) == 1:
        return Verdict.ZERO_VARIANCE
    return Verdict.READY


def _said(member: Member) -> tuple[float, ...]:
    return member.values or (() if member.reward is None else (member.reward,))


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


def batch_is_due(config: RunConfig, ready: int, dropped: int) -> bool:
    """Tell whether a step is to be taken: the batch is full, or its rounds are over and there is something in it.

    `dropped`: groups of equal rewards since the batch before.
    """
    return ready >= config.groups_per_step or (ready > 0 and rounds_are_over(config, ready, dropped))


def rounds_are_over(config: RunConfig, ready: int, dropped: int) -> bool:
    """Tell whether `max_sampling_rounds` rounds of groups have brought no full batch."""
    return 0 < config.max_sampling_rounds * config.groups_per_step <= ready + dropped


def would_be_advantages(config: RunConfig, rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the advantages of a group with these rewards by rollout id; empty with fewer than two.

    Empty, too, where a group and its rewards are not all that counts: estimators over a batch, a KL in the reward, an
    overlong penalty.
    """
    shaped = config.overlong == "penalty" or (config.kl_in == "reward" and config.kl_coef)
    if len(rewards) < 2 or config.advantage not in OF_GROUPS or shaped:
        return {}
    values = advantages_of(config.advantage, list(rewards.values()))
    return dict(zip(rewards, (float(value) for value in values), strict=True))
