"""The reward worker of the sync client: rollouts come over one stream, threads score them, outcomes go back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from qerld.v1 import common_pb2, reward_pb2

from qerld_client.channel import STREAM_SECONDS
from qerld_client.errors import DeadlineError, from_rpc
from qerld_client.requests import failed, scored
from qerld_client.retry import RetryPolicy
from qerld_client.worker import MAX_BATCH, WorkerState

RewardFunction = Callable[[common_pb2.Rollout], "float | reward_pb2.Outcome"]
POLL_SECONDS = 0.1


class SyncWorker:
    """Runs until `stop` is set or `limit` outcomes are answered, over as many connections as it takes."""

    def __init__(
        self,
        open_call: Callable[..., Any],
        state: WorkerState,
        reward: RewardFunction,
        *,
        policy: RetryPolicy,
        threads: int,
        limit: int | None,
        stop: threading.Event,
    ) -> None:
        self._open_call, self._state, self._reward = open_call, state, reward
        self._policy, self._limit, self._stop = policy, limit, stop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="qerld-reward")
        self._changed = threading.Condition()
        self._ready: list[reward_pb2.Outcome] = []
        self._freed = 0
        self._connection = 0

    def run(self) -> None:
        """Score until the end; raises `QerldError` when the stream fails for good."""
        failures = 0
        try:
            while not self._done():
                started = self._state.answered
                error = self._connect()
                if error is None:
                    continue
                failures = 0 if self._state.answered > started else failures + 1
                problem = from_rpc(error)
                lives = isinstance(problem, DeadlineError)
                delay = 0.0 if lives else self._policy.delay(problem, failures)
                if delay is None:
                    raise problem from error
                time.sleep(delay)
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _connect(self) -> grpc.RpcError | None:
        """Serve one connection; returns the error that ended it."""
        with self._changed:
            self._connection += 1
            self._freed = 0
        call = self._open_call(self._requests(self._connection), timeout=STREAM_SECONDS)
        try:
            for response in call:
                self._take(response)
        except grpc.RpcError as error:
            return error
        finally:
            with self._changed:
                self._connection += 1  # ends the generator of this connection
                self._changed.notify_all()
        return None

    def _take(self, response: reward_pb2.StreamRewardsResponse) -> None:
        if response.HasField("lease"):
            with self._changed:
                self._state.leased()
            self._pool.submit(self._score, response.lease.rollout)
            return
        with self._changed:
            self._freed += self._state.answer(response.answer)
            self._changed.notify_all()

    def _score(self, rollout: common_pb2.Rollout) -> None:
        try:
            outcome = scored(rollout.rollout_id, self._reward(rollout))
        except Exception as error:
            outcome = failed(rollout.rollout_id, error)
        with self._changed:
            self._ready.append(outcome)
            self._changed.notify_all()

    def _requests(self, connection: int) -> Iterator[reward_pb2.StreamRewardsRequest]:
        """Yield messages of one connection; returning half-closes the stream, and the service answers the rest."""
        with self._changed:
            opening = list(self._state.opening())
        yield from opening
        while True:
            with self._changed:
                while not (self._ready or self._freed or self._connection != connection or self._done()):
                    self._changed.wait(POLL_SECONDS)
                if self._connection != connection or (self._done() and not self._ready):
                    return
                messages = self._next_messages()
            yield from messages

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
