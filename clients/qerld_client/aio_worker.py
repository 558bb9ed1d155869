"""The reward worker of the asyncio client; see `sync_worker`. The reward function may be a coroutine function."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from qerld.v1 import common_pb2, reward_pb2

from qerld_client.channel import STREAM_SECONDS
from qerld_client.requests import failed, scored
from qerld_client.retry import Attempts, RetryPolicy
from qerld_client.worker import WorkerState

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
    """Runs until `stop` is set or the state's limit is answered, over as many connections as it takes."""

    def __init__(
        self,
        open_call: Callable[..., Any],
        state: WorkerState,
        reward: AsyncRewardFunction,
        policy: RetryPolicy,
        stop: asyncio.Event,
    ) -> None:
        self._open_call, self._state, self._reward = open_call, state, reward
        self._attempts, self._stop = Attempts(policy, None, STREAM_SECONDS), stop
        self._changed = asyncio.Event()
        self._connection = 0
        self._scoring: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Score until the end; raises `QerldError` when the stream fails for good."""
        watcher = asyncio.create_task(self._watch_stop())
        try:
            while not self._state.done(self._stop.is_set()):
                try:
                    await self._connect()
                except grpc.RpcError as error:
                    await asyncio.sleep(self._attempts.wait_after(error))
        finally:
            watcher.cancel()
            for task in self._scoring:
                task.cancel()

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        self._changed.set()

    async def _connect(self) -> None:
        self._connection += 1
        call = self._open_call(self._requests(self._connection), timeout=self._attempts.seconds())
        try:
            async for response in call:
                self._take(response)
        finally:
            self._connection += 1  # ends the generator of this connection, which must not take what is ready
            self._changed.set()
            call.cancel()

    def _take(self, response: reward_pb2.StreamRewardsResponse) -> None:
        self._attempts.answered()
        if response.HasField("lease"):
            self._state.leased()
            task = asyncio.create_task(self._score(response.lease.rollout))
            self._scoring.add(task)
            task.add_done_callback(self._scoring.discard)
        else:
            self._state.answer(response.answer)
            self._changed.set()

    async def _score(self, rollout: common_pb2.Rollout) -> None:
        self._state.scored(await score(self._reward, rollout))
        self._changed.set()

    async def _requests(self, connection: int) -> AsyncIterator[reward_pb2.StreamRewardsRequest]:
        """Yield messages of one connection; returning half-closes the stream, and the service answers the rest."""
        messages = list(self._state.opening())
        while messages:
            for message in messages:
                yield message
            messages = await self._await_messages(connection)

    async def _await_messages(self, connection: int) -> list[reward_pb2.StreamRewardsRequest]:
        """Return the next messages, none at the end."""
        while self._connection == connection:
            self._changed.clear()
            stopped = self._stop.is_set()
            if self._state.pending and (messages := self._state.next_messages(stopped)):
                return messages
            if self._state.done(stopped):
                return []
            await self._changed.wait()
        return []
