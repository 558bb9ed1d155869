"""From stored groups to what the trainer gets, and what a step's report says beyond the trainer's own metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sqlalchemy import Connection

from .groups import Member, lag
from .records import FinishReason, NoiseRecord, OutcomeKind, RolloutRecord
from .store.rewards import rewarded_members
from .store.rollouts import group_rollouts
from .store.runs import find_version
from .store.steps import Batch
from .trainer.messages import Group, NoiseSpec, Rollout


@dataclass(frozen=True)
class BatchData:
    """A batch with everything that training needs; `outcomes`: what was said of each rollout, by id."""

    batch: Batch
    groups: tuple[tuple[RolloutRecord, ...], ...]
    outcomes: Mapping[str, Member]
    parent_folder: str


def load(connection: Connection, batch: Batch) -> BatchData:
    """Read a batch: its rewarded rollouts only, in the batch's order."""
    rewarded = rewarded_members(connection, batch.group_ids)
    by_rollout = {member.rollout_id: member for members in rewarded.values() for member in members}
    groups = []
    for group_id in batch.group_ids:
        members = group_rollouts(connection, group_id)
        groups.append(tuple(member for member in members if member.rollout_id in by_rollout))
    _parent, folder = find_version(connection, batch.run, batch.parent)
    return BatchData(batch, tuple(groups), by_rollout, folder)


def trainer_groups(data: BatchData) -> list[Group]:
    """Return the batch as the trainer's messages."""
    return [
        Group(
            group_id=members[0].group_id,
            prompt_ids=list(members[0].prompt_ids),
            rollouts=[_rollout(member, data.outcomes[member.rollout_id]) for member in members],
        )
        for members in data.groups
    ]


def _rollout(record: RolloutRecord, said: Member) -> Rollout:
    assert said.reward is not None
    return Rollout(
        rollout_id=record.rollout_id,
        completion_ids=list(record.completion_ids),
        logprobs=list(record.logprobs),
        reward=said.reward,
        version=min(span.version for span in record.spans if not span.environment),
        trainable=trainable_mask(record),
        steps=_steps(record, said),
        truncated=record.finish_reason is FinishReason.LENGTH,
        noises=[(span.end, noise_spec(span.noise)) for span in record.spans],
    )


def noise_spec(record: NoiseRecord) -> NoiseSpec:
    """Return a noise as the trainer's messages have it."""
    return NoiseSpec(record.sigma, record.seed, record.relative, record.dtype)


def _steps(record: RolloutRecord, said: Member) -> list[tuple[int, float]] | None:
    """Return rewards by turn or token with the ends of their stretches of the completion; None for one of the whole."""
    if said.kind is OutcomeKind.TURN_REWARDS:
        return list(zip((span.end for span in record.spans if not span.environment), said.values, strict=True))
    if said.kind is OutcomeKind.TOKEN_REWARDS:
        return list(zip(range(1, len(record.completion_ids) + 1), said.values, strict=True))
    return None


def trainable_mask(record: RolloutRecord) -> list[bool] | None:
    """Return the trainer's mask of a rollout: None, which costs nothing, when the policy made all of it."""
    return list(record.trainable) if any(span.environment for span in record.spans) else None


def lags(data: BatchData) -> list[int]:
    """Return the lag of every span that a policy made, in versions."""
    spans = [span for group in data.groups for record in group for span in record.spans if not span.environment]
    return [lag(data.batch.parent, span.version) for span in spans]


def report_metrics(
    data: BatchData, trained: Mapping[str, float], sigma: float, groups_per_step: int, seconds: float
) -> dict[str, float]:
    """Return the metrics of `qerld.v1.RunReport`: the trainer's, and what only the learner knows.

    `seconds` is how long the trainer took.
    """
    zero_variance = data.batch.zero_variance
    found = lags(data)
    rollouts = [record for group in data.groups for record in group]
    tokens = float(sum(record.trainable_tokens for record in rollouts))
    # The trainer sees those of the batch only: most are dropped before there is one.
    equal = zero_variance + trained["zero_variance_share"] * len(data.groups)
    truncated = sum(record.finish_reason == "length" for record in rollouts)
    return {
        "tokens": tokens,
        **trained,
        "mismatch_kl": trained["mismatch_kl_k3"],
        "rollouts": float(len(rollouts)),
        "groups": float(len(data.groups)),
        "truncated_share": truncated / len(rollouts),
        "completion_length_mean": sum(len(record.completion_ids) for record in rollouts) / len(rollouts),
        "lag_mean": sum(found) / len(found),
        "lag_max": float(max(found)),
        "sigma": sigma,
        "groups_zero_variance": float(zero_variance),
        "sampling_rounds": float(math.ceil((zero_variance + len(data.groups)) / groups_per_step)),
        "zero_variance_share": equal / (zero_variance + len(data.groups)),
        "tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
    }


def probes(groups: Sequence[Sequence[RolloutRecord]], count: int) -> list[RolloutRecord]:
    """Return a few rollouts of a batch for the canary: one a group in turn, so that prompts differ."""
    by_turn = [record for turn in zip_longest(*groups) for record in turn if record is not None]
    return by_turn[:count]
