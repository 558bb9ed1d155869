"""Request messages from Python values; the one place where the sync and the asyncio client build them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from qerld.v1 import common_pb2, reward_pb2, rollout_pb2

from qerld_client.errors import OutcomesRejectedError

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]] | common_pb2.Prompt
"""Plain text, token ids, a chat as [{"role": …, "content": …}], or the wire message."""

Rewards = Mapping[str, float] | Iterable[reward_pb2.Outcome]
"""Rewards by rollout id, or outcomes."""


@dataclass(frozen=True)
class Task:
    """A prompt with the labels that its rollouts carry, for example the right answer."""

    prompt: PromptLike
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SampledGroup:
    """One prompt, sampled: every rollout is stored by the service."""

    group_id: str
    version: int
    prompt_ids: tuple[int, ...]
    rollouts: tuple[common_pb2.Rollout, ...]


def new_request_id() -> str:
    return str(uuid.uuid4())


def prompt(value: PromptLike) -> common_pb2.Prompt:
    """Return the wire form of a prompt. Raises `TypeError` for anything else than `PromptLike`."""
    if isinstance(value, common_pb2.Prompt):
        return value
    if isinstance(value, str):
        return common_pb2.Prompt(text=value)
    items = list(value)
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if ids and len(ids) == len(items):
        return common_pb2.Prompt(ids=common_pb2.TokenIds(ids=ids))
    turns = [
        common_pb2.Message(role=item["role"], content=item["content"])
        for item in items
        if isinstance(item, Mapping) and item.keys() >= {"role", "content"}
    ]
    if len(turns) != len(items):
        raise TypeError("a prompt is a str, token ids, or a chat of {'role': …, 'content': …}")
    return common_pb2.Prompt(messages=common_pb2.Messages(messages=turns))


def duration(seconds: float | None) -> Duration | None:
    """Return seconds as a Duration; None stays unset."""
    if seconds is None:
        return None
    message = Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def task(value: Task | PromptLike) -> Task:
    return value if isinstance(value, Task) else Task(value)


def sample(
    run: str,
    prompt_like: PromptLike,
    group_size: int | None,
    sampling: common_pb2.Sampling | None,
    labels: Mapping[str, str] | None,
    reward_deadline: float | None,
    *,
    stream_deltas: bool,
) -> rollout_pb2.SampleRequest:
    return rollout_pb2.SampleRequest(
        run=run,
        request_id=new_request_id(),
        prompt=prompt(prompt_like),
        group_size=group_size,
        sampling=sampling,
        labels=labels,
        reward_deadline=duration(reward_deadline),
        stream_deltas=stream_deltas,
    )


def sampled_group(events: Iterable[rollout_pb2.SampleResponse]) -> SampledGroup:
    """Return the group that a Sample stream without deltas told of."""
    opened, rollouts = rollout_pb2.GroupOpened(), []
    for event in events:
        if event.HasField("opened"):
            opened = event.opened
        else:
            rollouts.append(event.finished)
    rollouts.sort(key=lambda rollout: rollout.index)
    return SampledGroup(opened.group_id, opened.version, tuple(opened.prompt.ids), tuple(rollouts))


def submit_prompts(
    run: str, tasks: Iterable[Task | PromptLike], group_size: int | None, sampling: common_pb2.Sampling | None
) -> rollout_pb2.SubmitPromptsRequest:
    items = [
        rollout_pb2.PromptItem(prompt=prompt(item.prompt), group_size=group_size, sampling=sampling, labels=item.labels)
        for item in map(task, tasks)
    ]
    return rollout_pb2.SubmitPromptsRequest(run=run, request_id=new_request_id(), prompts=items)


def imported(
    run: str, groups: Iterable[tuple[Task | PromptLike, Sequence[rollout_pb2.Trajectory]]]
) -> list[rollout_pb2.ImportTrajectoriesRequest]:
    """Return one message a group, each with its own request id."""
    return [
        rollout_pb2.ImportTrajectoriesRequest(
            run=run,
            request_id=new_request_id(),
            prompt=prompt(task(item).prompt),
            trajectories=trajectories,
            labels=task(item).labels,
        )
        for item, trajectories in groups
    ]


def outcomes(rewards: Rewards) -> list[reward_pb2.Outcome]:
    if isinstance(rewards, Mapping):
        return [reward_pb2.Outcome(rollout_id=key, reward=value) for key, value in rewards.items()]
    return list(rewards)


def submit_rewards(run: str, rewards: Rewards) -> reward_pb2.SubmitRewardsRequest:
    return reward_pb2.SubmitRewardsRequest(run=run, request_id=new_request_id(), outcomes=outcomes(rewards))


def checked_answers(answers: Iterable[reward_pb2.OutcomeAnswer], *, strict: bool) -> list[reward_pb2.OutcomeAnswer]:
    """Return the answers. Raises `OutcomesRejectedError` when one is a rejection and `strict` is set."""
    found = list(answers)
    if strict and any(answer.answer == common_pb2.ANSWER_REJECTED for answer in found):
        raise OutcomesRejectedError(found)
    return found


def scored(rollout_id: str, said: float | reward_pb2.Outcome) -> reward_pb2.Outcome:
    """Return what a reward function returned as an outcome of the rollout."""
    if isinstance(said, reward_pb2.Outcome):
        said.rollout_id = rollout_id
        return said
    return reward_pb2.Outcome(rollout_id=rollout_id, reward=said)


def failed(rollout_id: str, error: Exception) -> reward_pb2.Outcome:
    """Return a failed scoring: an error, never a zero reward."""
    kind = (
        reward_pb2.OUTCOME_ERROR_KIND_TIMEOUT
        if isinstance(error, TimeoutError)
        else reward_pb2.OUTCOME_ERROR_KIND_SCORER
    )
    text = f"{type(error).__name__}: {error}"[:1000]
    return reward_pb2.Outcome(rollout_id=rollout_id, error=reward_pb2.OutcomeError(kind=kind, message=text))
