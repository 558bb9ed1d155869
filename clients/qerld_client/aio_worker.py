"""The reward worker of the asyncio client; see `sync_worker`. The reward function may be a coroutine function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from qerld.v1 import common_pb2, reward_pb2

from qerld_client.channel import STREAM_SECONDS
from qerld_client.errors import DeadlineError, from_rpc
from qerld_client.requests import failed, scored
from qerld_client.retry import RetryPolicy
from qerld_client.worker import MAX_BATCH, WorkerState

Said = float | reward_pb2.Outcome
AsyncRewardFunction = Callable[[common_pb2.Rollout], "Said | Awaitable[Said]"]


async def score(reward: AsyncRewardFunction, rollout: common_pb2.Rollout) -> reward_pb2.Outcome:
    """Return the outcome of a rollout; an exception of the function is an error, never a zero."""
    try:
        said = reward(rollout)
        return scored(rollout.rollout_id, await said if inspect.isawaitable(said) else said)
    except Exception as error:
        return failed(rollout.rollout_id, error)


class AsyncWorker:
    """Runs until `stop` is set or `limit` outcomes are answered, over as many connections as it takes."""

    def __init__(
        self,
        open_call: Callable[..., Any],
        state: WorkerState,
        reward: AsyncRewardFunction,
        *,
        policy: RetryPolicy,
        limit: int | None,
        stop: asyncio.Event,
    ) -> None:
        self._open_call, self._state, self._reward = open_call, state, reward
        self._policy, self._limit, self._stop = policy, limit, stop
        self._changed = asyncio.Event()
        self._ready: list[reward_pb2.Outcome] = []
        self._freed = 0
        self._connection = 0
        self._scoring: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Score until the end; raises `QerldError` when the stream fails for good."""
        failures = 0
        watcher = asyncio.create_task(self._watch_stop())
        try:
            while not self._done():
                started = self._state.answered
                try:
                    await self._connect()
                except grpc.RpcError as rpc_error:
                    failures = 0 if self._state.answered > started else failures + 1
                    error = from_rpc(rpc_error)
                    delay = 0.0 if isinstance(error, DeadlineError) else self._policy.delay(error, failures)
                    if delay is None:
                        raise error from rpc_error
                    await asyncio.sleep(delay)
        finally:
            watcher.cancel()
            for task in self._scoring:
                task.cancel()

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        self._changed.set()

    async def _connect(self) -> None:
        self._freed = 0
        self._connection += 1
        call = self._open_call(self._requests(self._connection), timeout=STREAM_SECONDS)
        try:
            async for response in call:
                self._take(response)
        finally:
            self._connection += 1  # ends the generator of this connection, which must not take what is ready
            self._changed.set()
            call.cancel()

    def _take(self, response: reward_pb2.StreamRewardsResponse) -> None:
        if response.HasField("lease"):
            self._state.leased()
            task = asyncio.create_task(self._score(response.lease.rollout))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
            return
        self._freed += self._state.answer(response.answer)
        self._changed.set()

    async def _score(self, rollout: common_pb2.Rollout) -> None:
        self._ready.append(await score(self._reward, rollout))
        self._changed.set()

    async def _requests(self, connection: int) -> AsyncIterator[reward_pb2.StreamRewardsRequest]:
        """Yield messages of one connection; returning half-closes the stream, and the service answers the rest."""
        for message in list(self._state.opening()):
            yield message
        while self._connection == connection and (self._ready or not self._done()):
            if not (self._ready or self._freed):
                self._changed.clear()
                await self._changed.wait()
                continue
            for message in self._next_messages():
                yield message

    def _next_messages(self) -> list[reward_pb2.StreamRewardsRequest]:
        messages = []
        if self._ready:
            messages.append(self._state.batch(self._ready[:MAX_BATCH]))
            del self._ready[:MAX_BATCH]
        if self._freed and not self._ending():
            messages.append(self._state.credit(self._freed))
        self._freed = 0
        return messages

    def _ending(self) -> bool:
        return self._stop.is_set() or (self._limit is not None and self._state.answered >= self._limit)

    def _done(self) -> bool:
        """Whether to end: told so, and every rollout that is being scored has its outcome stored."""
        return self._ending() and self._state.idle
