"""What comes in to be sampled or was sampled elsewhere: Sample, SubmitPrompts, ImportTrajectories."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Sequence
from contextlib import aclosing

from sqlalchemy import Connection

from .errors import InvalidRequestError, PreconditionError, RetryLaterError, Violation
from .groups import least_group
from .options import LearnerOptions
from .records import (
    GroupOpened,
    GroupRecord,
    GroupState,
    NoiseRecord,
    PromptSpec,
    RolloutFinished,
    RunRecord,
    RunState,
    SampleEvent,
    SegmentSpec,
    SpanRecord,
    TrajectorySpec,
)
from .sampler import Sampler
from .shared import RunPulse, Shared
from .store import rollouts as stored
from .store.requests import answered, once
from .store.rollouts import Sampled
from .store.rows import rollout_ids
from .store.runs import find_run, find_versions, next_version_number

_EMPTY = "must have at least one token, got none; send messages, text or ids"


class Intake:
    """Takes prompts and groups in; `Sampler` drives what is to be sampled."""

    def __init__(self, shared: Shared, sampler: Sampler) -> None:
        self._shared = shared
        self._sampler = sampler

    async def sample(self, run: str, request_id: str, body_hash: str, prompt: PromptSpec) -> AsyncIterator[SampleEvent]:
        """See `Learner.sample`."""
        before = await self._shared.store.read(lambda connection: self._earlier(connection, run, request_id, body_hash))
        group_id = before or await self._open(run, request_id, body_hash, prompt)
        feed = self._sampler.feed(group_id)
        events = self._replay(run, group_id) if feed is None else feed.events()
        seen = set()
        async with aclosing(events):
            async for event in events:
                if isinstance(event, RolloutFinished):
                    seen.add(event.rollout.rollout_id)
                yield event
        if feed is not None and len(seen) < len(feed.opened.rollout_ids):
            # Some were finished before the learner's start, or sampling ended early: with its run, or with the learner.
            async for event in self._replay(run, group_id):
                if isinstance(event, RolloutFinished) and event.rollout.rollout_id not in seen:
                    yield event

    def _earlier(self, connection: Connection, run: str, request_id: str, body_hash: str) -> str | None:
        find_run(connection, run)
        found = answered(connection, run, request_id, body_hash)
        return None if found is None else str(found[0])

    async def _open(self, run: str, request_id: str, body_hash: str, prompt: PromptSpec) -> str:
        record = await self._shared.store.read(lambda connection: find_run(connection, run))
        require_running(record)
        check_prompt(record, prompt, self._shared.pool.max_model_len())
        if obstacle := self._shared.pool.obstacle():
            raise PreconditionError(f"nothing can be sampled: {obstacle}; ListReplicas lists the policy servers")
        options = self._shared.options
        await self._shared.runs[run].buffer.reserve(options.admission_timeout, options.admission_retry)
        # To its end even when the caller goes away: a group that is stored is sampled.
        return await asyncio.shield(self._begin(run, request_id, body_hash, prompt))

    async def _begin(self, run: str, request_id: str, body_hash: str, prompt: PromptSpec) -> str:
        added = None
        try:
            group, repeated = await self._store(run, request_id, body_hash, prompt)
            added = None if repeated else group.group.group_id
        finally:
            self._shared.runs[run].buffer.settle(added)
        if not repeated:
            self._sampler.start(group)
        return group.group.group_id

    async def _store(
        self, run: str, request_id: str, body_hash: str, prompt: PromptSpec
    ) -> tuple[stored.OpenGroup, bool]:
        def mutation(connection: Connection) -> tuple[stored.OpenGroup, bool]:
            record = find_run(connection, run)

            def add() -> str:
                require_running(record)
                deadline, live = record.config.reward_deadline, record.live_version
                return stored.add_group(connection, run, prompt, deadline, live, GroupState.SAMPLING)

            group_id, repeated = once(connection, run, request_id, body_hash, add)
            return stored.find_open_group(connection, group_id), repeated

        return await self._shared.store.write(mutation)

    async def _replay(self, run: str, group_id: str) -> AsyncGenerator[SampleEvent, None]:
        def query(connection: Connection) -> list[SampleEvent]:
            find_run(connection, run)
            group = stored.find_group(connection, group_id)
            rollouts = stored.group_rollouts(connection, group_id)
            opened = GroupOpened(group_id, group.rollout_ids, rollouts[0].prompt_ids, group.version)
            return [opened, *(RolloutFinished(rollout) for rollout in rollouts if rollout.finished_at is not None)]

        for event in await self._shared.store.read(query):
            yield event

    async def submit_prompts(
        self, run: str, request_id: str, body_hash: str, prompts: Sequence[PromptSpec]
    ) -> list[str]:
        """See `Learner.submit_prompts`."""
        options = self._shared.options
        if len(prompts) > options.queue_limit:
            text = f"must be at most {options.queue_limit} (queue_limit), got {len(prompts)}; send several requests"
            raise InvalidRequestError([Violation("prompts", text)])
        record = await self._shared.store.read(lambda connection: find_run(connection, run))
        for index, prompt in enumerate(prompts):
            check_prompt(record, prompt, self._shared.pool.max_model_len(), f"prompts[{index}].")

        def mutation(connection: Connection) -> list[str]:
            def add() -> list[str]:
                require_running(find_run(connection, run))
                _check_queue(connection, run, len(prompts), options)
                deadline = record.config.reward_deadline
                return [
                    stored.add_group(connection, run, prompt, deadline, record.live_version, GroupState.QUEUED)
                    for prompt in prompts
                ]

            return list(once(connection, run, request_id, body_hash, add)[0])

        ids = await self._shared.store.write(mutation)
        self._shared.runs[run].queued.notify()
        return ids

    async def admit_queued(self, run: str) -> None:
        """Move queued groups into the buffer as it has room, oldest first, for ever."""
        pulse = self._shared.runs[run]
        while True:
            seen = pulse.queued.count
            if await self._shared.store.read(lambda connection: _has_queued(connection, run)):
                await pulse.buffer.reserve(None, 0.0)
                await self._admit_one(run, pulse)
            else:
                await pulse.queued.wait(seen, at_most=5.0)

    async def _admit_one(self, run: str, pulse: RunPulse) -> None:
        def mutation(connection: Connection) -> stored.OpenGroup | None:
            if not _has_queued(connection, run):
                return None
            group = stored.open_groups(connection, run, GroupState.QUEUED, limit=1)[0]
            stored.begin_sampling(connection, group.group.group_id, find_run(connection, run).live_version)
            return stored.find_open_group(connection, group.group.group_id)

        group = None
        try:
            group = await self._shared.write_patiently(mutation)
        finally:
            pulse.buffer.settle(group.group.group_id if group else None)
        if group is not None:
            self._sampler.start(group)

    async def import_group(
        self, run: str, request_id: str, body_hash: str, prompt: PromptSpec, trajectories: Sequence[TrajectorySpec]
    ) -> GroupRecord:
        """See `Learner.import_group`."""

        def mutation(connection: Connection) -> tuple[GroupRecord, bool]:
            record = find_run(connection, run)

            def add() -> str:
                require_running(record)
                noises = _noises(connection, run, trajectories)
                newest = next_version_number(connection, run) - 1
                check_trajectories(prompt, trajectories, noises, newest, least_group(record.config))
                return _store_import(connection, record, prompt, trajectories, noises)

            group_id, repeated = once(connection, run, request_id, body_hash, add)
            return stored.find_group(connection, group_id), repeated

        group, repeated = await self._shared.store.write(mutation)
        if not repeated:
            pulse = self._shared.runs[run]
            pulse.buffer.add(group.group_id)
            if pulse.leases_filled:
                rollouts = await self._shared.store.read(lambda c: stored.find_rollouts(c, group.rollout_ids))
                for rollout in rollouts.values():
                    pulse.leases.offer(rollout)
        return group


def _has_queued(connection: Connection, run: str) -> bool:
    return find_run(connection, run).state is RunState.RUNNING and stored.count_queued(connection, run, 1) > 0


def _check_queue(connection: Connection, run: str, more: int, options: LearnerOptions) -> None:
    queued = stored.count_queued(connection, run, options.queue_limit)
    if queued + more > options.queue_limit:
        raise RetryLaterError(
            f"run {run!r} has {queued} groups queued and would have {queued + more}, the limit is"
            f" {options.queue_limit} (queue_limit); they are sampled as outcomes make room: try again, or send fewer",
            retry_after=options.admission_retry,
        )


def _noises(connection: Connection, run: str, trajectories: Sequence[TrajectorySpec]) -> dict[int, NoiseRecord]:
    """Return the noise of the versions that made trajectories, by number; versions that never were are left out."""
    made_by = {segment.version for trajectory in trajectories for segment in trajectory.segments if segment.trainable}
    return {number: record.noise for number, (record, _folder) in find_versions(connection, run, made_by).items()}


def _store_import(
    connection: Connection,
    run: RunRecord,
    prompt: PromptSpec,
    trajectories: Sequence[TrajectorySpec],
    noises: dict[int, NoiseRecord],
) -> str:
    newest = max(s.version for trajectory in trajectories for s in trajectory.segments if s.trainable)
    group_id = stored.add_group(connection, run.name, prompt, run.config.reward_deadline, newest, GroupState.SAMPLING)
    for rollout_id, trajectory in zip(rollout_ids(group_id, len(trajectories)), trajectories, strict=True):
        sampled = Sampled(
            rollout_id,
            tuple(token for segment in trajectory.segments for token in segment.ids),
            tuple(value for segment in trajectory.segments for value in _aligned_logprobs(segment)),
            tuple(_spans(trajectory, noises)),
            trajectory.finish_reason,
            turns=sum(segment.trainable for segment in trajectory.segments),
        )
        stored.store_sampled(connection, sampled)
    return group_id


def _aligned_logprobs(segment: SegmentSpec) -> tuple[float, ...]:
    # One entry a token everywhere, so that nobody has to count: what the environment says is given, probability 1.
    return segment.logprobs if segment.trainable else (0.0,) * len(segment.ids)


def _spans(trajectory: TrajectorySpec, noises: dict[int, NoiseRecord]) -> Iterator[SpanRecord]:
    begin = 0
    for segment in trajectory.segments:
        end = begin + len(segment.ids)
        if segment.trainable:
            yield SpanRecord(begin, end, segment.version, noises[segment.version])
        else:
            yield SpanRecord(begin, end, 0, NoiseRecord(), environment=True)
        begin = end


def require_running(run: RunRecord) -> None:
    """Raise `PreconditionError` unless the run takes new groups."""
    if run.state is RunState.PAUSED:
        raise PreconditionError(
            f"run {run.name!r} is paused ({run.reason or 'no reason given'}); ResumeRun lets it go on"
        )
    if run.state is RunState.COMPLETED:
        raise PreconditionError(f"run {run.name!r} is completed ({run.reason}); it takes no new groups")


def check_prompt(run: RunRecord, prompt: PromptSpec, max_model_len: int | None, prefix: str = "") -> None:
    """Raise `InvalidRequestError` with everything wrong with a prompt that is to be sampled."""
    wrong = []
    length = len(prompt.prompt_ids)
    if length == 0:
        wrong.append(("prompt", _EMPTY))
    if max_model_len is not None and length >= max_model_len:
        text = f"must be shorter than the context of {max_model_len} tokens, got {length}; shorten it"
        wrong.append(("prompt", text))
    if prompt.group_size < (least := least_group(run.config)):
        text = f"must be at least {least}, got {prompt.group_size}; advantages are relative to the group"
        wrong.append(("group_size", text))
    if prompt.sampling.temperature != run.config.temperature:
        text = (
            f"must be the run's {run.config.temperature:g}, got {prompt.sampling.temperature:g}: a batch is trained"
            " at one temperature; leave it unset or create a run with the other one"
        )
        wrong.append(("sampling.temperature", text))
    if prompt.sampling.max_tokens < 1:
        wrong.append(("sampling.max_tokens", f"must be at least 1, got {prompt.sampling.max_tokens}; leave it unset"))
    if wrong:
        raise InvalidRequestError([Violation(prefix + field, text) for field, text in wrong])


def check_trajectories(
    prompt: PromptSpec, trajectories: Sequence[TrajectorySpec], known: Collection[int], newest: int, least: int
) -> None:
    """Raise `InvalidRequestError` with everything wrong with an imported group.

    `known`: those of its versions that exist; `least`: how many rollouts a group needs.
    """
    wrong = [] if prompt.prompt_ids else [Violation("prompt", _EMPTY)]
    if len(trajectories) < least:
        text = f"must be at least {least}, got {len(trajectories)}; advantages are relative to the group"
        wrong.append(Violation("trajectories", text))
    if len(trajectories) != prompt.group_size:
        text = f"must be the number of trajectories, {len(trajectories)}, got {prompt.group_size}; send all of them"
        wrong.append(Violation("group_size", text))
    for index, trajectory in enumerate(trajectories):
        wrong.extend(_wrong_segments(f"trajectories[{index}]", trajectory, known, newest))
    if wrong:
        raise InvalidRequestError(wrong)


def _wrong_segments(path: str, trajectory: TrajectorySpec, known: Collection[int], newest: int) -> list[Violation]:
    wrong = []
    if not any(segment.trainable and segment.ids for segment in trajectory.segments):
        text = "must hold at least one trainable token, got none: without one there is nothing to train; leave it out"
        wrong.append(Violation(f"{path}.segments", text))
    for number, segment in enumerate(trajectory.segments):
        at = f"{path}.segments[{number}]"
        if not segment.trainable:
            if segment.logprobs:
                text = f"must be empty, the environment has no policy to ask, got {len(segment.logprobs)}; leave it out"
                wrong.append(Violation(f"{at}.logprobs", text))
            continue
        if len(segment.logprobs) != len(segment.ids):
            text = f"must be one a token, {len(segment.ids)}, got {len(segment.logprobs)}; record them"
            wrong.append(Violation(f"{at}.logprobs", text))
        if not all(math.isfinite(value) and value <= 1e-6 for value in segment.logprobs):
            text = "must be finite and ≤ 0; send natural logarithms after temperature"
            wrong.append(Violation(f"{at}.logprobs", text))
        if segment.version not in known:
            text = f"must be a version of the run (0 to {newest}), got {segment.version}"
            wrong.append(Violation(f"{at}.version", f"{text}; ListVersions lists them"))
    return wrong
