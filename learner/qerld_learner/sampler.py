"""Sampling of groups on the attached policy servers: one task a group, which no client and no server can lose.

A server that dies mid-rollout costs only the unfinished rollouts, sampled again elsewhere or when a server is back;
there is no error budget. While no server serves the version, the group waits and the run says so.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing

import grpc
from sqlalchemy import Connection

from .errors import NotFoundError
from .feeds import GroupFeed
from .groups import closing_of
from .records import FinishReason, GroupOpened, NoiseRecord, RolloutState, RunState, SamplingSpec, SpanRecord
from .replicas import NewTokens, Replica, ReplicaLostError
from .shared import Shared
from .store import rollouts as stored
from .store.rewards import Closed, close_groups
from .store.rollouts import OpenGroup, Sampled
from .store.runs import find_run

_log = logging.getLogger(__name__)

# A server that is silent for so long in the middle of a stream is taken for hung.
IDLE_SECONDS = 300.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
# The request itself is wrong, on every server: the rollouts fail.
FATAL_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)


LOST_ERRORS = (grpc.aio.AioRpcError, ReplicaLostError, TimeoutError)


class Sampler:
    """Drives every group that is open for sampling."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._feeds: dict[str, GroupFeed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def feed(self, group_id: str) -> GroupFeed | None:
        """Return the feed of a group that is being sampled, None when it is not (any more)."""
        return self._feeds.get(group_id)

    def start(self, group: OpenGroup) -> GroupFeed:
        """Begin (or go on) sampling a group in its own task."""
        record = group.group
        self._shared.runs[record.run].buffer.add(record.group_id)
        opened = GroupOpened(record.group_id, record.rollout_ids, group.prompt_ids, record.version)
        feed = self._feeds[record.group_id] = GroupFeed(opened)
        task = asyncio.create_task(self._persist(group, feed), name=f"sample-{record.group_id}")
        self._tasks[record.group_id] = task
        task.add_done_callback(lambda done: self._ended(record.group_id, done))
        return feed

    async def close(self) -> None:
        """Stop sampling; unfinished rollouts are sampled again at the next start."""
        await self.cancel(list(self._tasks))

    async def cancel(self, group_ids: Collection[str]) -> None:
        """Stop sampling of some groups."""
        tasks = [self._tasks[group_id] for group_id in group_ids if group_id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, group_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(group_id, None)
        feed = self._feeds.pop(group_id, None)
        if feed is not None:
            feed.close()
        if not task.cancelled():  # else the learner stops
            task.exception()  # seen: the run was deleted

    async def _persist(self, group: OpenGroup, feed: GroupFeed) -> None:
        """Sample a group to its end: what fails beside the policy servers (a locked store, say) is tried again, too."""
        missing = set(group.missing)
        while True:
            try:
                return await self._drive(group, missing, feed)
            except NotFoundError:  # the run was deleted
                raise
            except Exception:
                _log.exception("sampling of group %s failed; it goes on", group.group.group_id)
                await asyncio.sleep(LAST_BACKOFF_SECONDS)

    async def _drive(self, group: OpenGroup, missing: set[int], feed: GroupFeed) -> None:
        version = group.group.version
        backoff = FIRST_BACKOFF_SECONDS
        while missing:
            target = await self._route(group, version, missing)
            if target is None:
                await self._fail(group, missing, feed, "its run has completed")
                return
            replica, version = target
            before = len(missing)
            try:
                await self._attempt(replica, version, group, missing, feed)
            except LOST_ERRORS as error:
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in FATAL_CODES:
                    await self._fail(group, missing, feed, error.details() or error.code().name)
                    return
                replica.avoid(LAST_BACKOFF_SECONDS)
                self._say_why(group, replica, error)
                backoff = FIRST_BACKOFF_SECONDS if len(missing) < before else min(2 * backoff, LAST_BACKOFF_SECONDS)
                await asyncio.sleep(backoff)

    def _say_why(self, group: OpenGroup, replica: Replica, error: BaseException) -> None:
        details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error) or type(error).__name__
        why = f"policy server {replica.hello.replica_id} lost a request: {details}"
        self._shared.runs[group.group.run].waiting_for = why
        _log.warning("group %s: %s; sampling again", group.group.group_id, why)

    async def _route(self, group: OpenGroup, version: int, missing: set[int]) -> tuple[Replica, int] | None:
        """Wait for a server with the group's version, or with the live one when that is gone. None: the run is over."""
        run, pool = group.group.run, self._shared.pool
        pulse = self._shared.runs[run]
        while True:
            seen = pool.changed.count
            if (replica := pool.best_for(run, version)) is not None:
                pulse.waiting_for = ""
                return replica, version
            record = await self._shared.store.read(lambda connection: find_run(connection, run))
            if record.state is RunState.COMPLETED:
                return None
            live = record.live_version
            if live != version and (replica := pool.best_for(run, live)) is not None:
                pulse.waiting_for = ""
                await self._resample_with(group, live, missing)
                return replica, live
            why = pool.obstacle() or f"{len(pool.all())} attached"
            pulse.waiting_for = f"a policy server that serves version {live}; {why}"
            await pool.changed.wait(seen, at_most=1.0)

    async def _resample_with(self, group: OpenGroup, version: int, missing: set[int]) -> None:
        # Only when no token of the old version is kept; otherwise the group stays as old as its oldest token.
        if len(missing) == len(group.group.rollout_ids):
            group_id = group.group.group_id
            await self._shared.write_patiently(lambda c: stored.begin_sampling(c, group_id, version))

    async def _attempt(
        self, replica: Replica, version: int, group: OpenGroup, missing: set[int], feed: GroupFeed
    ) -> None:
        indices = sorted(missing)
        if len(indices) == len(group.group.rollout_ids):
            await self._stream(replica, version, group, indices, missing, feed)
            return
        # Rollout i samples with seed + i, so a part of a group is one call a rollout.
        calls = [self._guarded(replica, version, group, index, missing, feed) for index in indices]
        errors = [error for error in await asyncio.gather(*calls) if error is not None]
        if errors:
            raise errors[0]

    async def _guarded(
        self, replica: Replica, version: int, group: OpenGroup, index: int, missing: set[int], feed: GroupFeed
    ) -> Exception | None:
        """One failed call must not cancel the others of the group."""
        try:
            await self._stream(replica, version, group, [index], missing, feed)
        except LOST_ERRORS as error:
            return error
        return None

    async def _stream(
        self,
        replica: Replica,
        version: int,
        group: OpenGroup,
        indices: list[int],
        missing: set[int],
        feed: GroupFeed,
    ) -> None:
        record = group.group
        collectors = {i: _Collector(feed, index, version) for i, index in enumerate(indices)}
        sampling = _with_seed(group.sampling, group.sampling.seed + indices[0])
        stream = replica.client.generate(record.run, version, record.group_id, group.prompt_ids, len(indices), sampling)
        # Not awaited one by one: the other rollouts go on while one becomes durable.
        writes: list[asyncio.Task[None]] = []
        replica.in_flight += len(indices)
        try:
            async for new in not_idle(stream):
                collector = collectors[new.index]
                collector.take(new)
                if collector.done:
                    sampled = collector.sampled(record.rollout_ids)
                    writes.append(asyncio.create_task(self._finish(group, sampled, missing, feed)))
        finally:
            replica.in_flight -= len(indices)
            await asyncio.gather(*writes)
        if not all(collector.done for collector in collectors.values()):
            raise ReplicaLostError("the stream ended before every rollout was finished")

    async def _finish(self, group: OpenGroup, sampled: Sampled, missing: set[int], feed: GroupFeed) -> None:
        run = group.group.run
        pulse = self._shared.runs[run]

        def mutation(connection: Connection) -> Closed:
            closed = Closed()
            if stored.store_sampled(connection, sampled):
                close_groups(connection, [group.group.group_id], closing_of(pulse.config), closed)
            return closed

        closed = await self._shared.write_patiently(mutation)
        rollout = await self._shared.store.read(lambda connection: stored.find_rollout(connection, sampled.rollout_id))
        missing.discard(rollout.index)
        reason = sampled.finish_reason.value if sampled.finish_reason else "failed"
        self._shared.observer.rollout_finished(run, len(sampled.completion_ids), reason)
        if rollout.state is RolloutState.FINISHED and pulse.leases_filled:
            pulse.leases.offer(rollout)
        feed.finish(rollout)
        self._shared.publish(run, closed)

    async def _fail(self, group: OpenGroup, missing: set[int], feed: GroupFeed, problem: str) -> None:
        for index in sorted(missing):
            rollout_id = group.group.rollout_ids[index]
            await self._finish(group, Sampled(rollout_id, problem=problem), missing, feed)


async def not_idle(stream: AsyncGenerator[NewTokens, None]) -> AsyncIterator[NewTokens]:
    """Yield from a stream, raising `TimeoutError` when it is silent for `IDLE_SECONDS`."""
    async with aclosing(stream):
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                new = await anext(stream, None)
            if new is None:
                return
            yield new


class _Collector:
    """Gathers one rollout from its stretches of tokens."""

    def __init__(self, feed: GroupFeed, index: int, version: int) -> None:
        self._feed = feed
        self._index = index
        self._version = version
        self._partial = feed.restart(index)
        self._noise = NoiseRecord()
        self._reason: FinishReason | None = None
        self._problem = ""

    @property
    def done(self) -> bool:
        """Whether the rollout is finished."""
        return self._reason is not None

    def take(self, new: NewTokens) -> None:
        """Add tokens. Raises `ReplicaLostError` when the server gave the rollout up."""
        if new.finish_reason is FinishReason.ABORTED:
            raise ReplicaLostError("the server aborted the rollout")
        if len(new.ids) != len(new.logprobs):
            self._problem = f"the server sent {len(new.ids)} tokens with {len(new.logprobs)} log-probabilities"
        elif not all(math.isfinite(value) for value in new.logprobs):
            self._problem = "the server sent a log-probability that is not finite"
        if new.ids or new.text:
            self._feed.grow(self._index, new.ids, new.logprobs, new.text)
            self._noise = new.noise
        self._reason = new.finish_reason or self._reason

    def sampled(self, rollout_ids: tuple[str, ...]) -> Sampled:
        """Return the rollout; it failed when the server's numbers cannot be trained on."""
        rollout_id = rollout_ids[self._index]
        ids, logprobs = tuple(self._partial.ids), tuple(self._partial.logprobs)
        problem = self._problem or ("" if ids else "the server sampled no token")
        if problem:
            return Sampled(rollout_id, problem=problem)
        spans = (SpanRecord(0, len(ids), self._version, self._noise),)
        return Sampled(rollout_id, ids, logprobs, spans, self._reason, "".join(self._partial.text))


def _with_seed(sampling: SamplingSpec, seed: int) -> SamplingSpec:
    # The wire's seed has 64 bits and wraps, as the server's seed + i does.
    return SamplingSpec(
        sampling.temperature, sampling.max_tokens, seed % (1 << 64), sampling.stop_ids, sampling.stop_strings
    )
