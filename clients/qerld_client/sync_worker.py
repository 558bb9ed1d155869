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
from qerld_client.requests import failed, scored
from qerld_client.retry import Attempts, RetryPolicy
from qerld_client.worker import WorkerState

RewardFunction = Callable[[common_pb2.Rollout], "float | reward_pb2.Outcome"]
POLL_SECONDS = 0.1


def score(reward: RewardFunction, rollout: common_pb2.Rollout) -> reward_pb2.Outcome:
    """Return the outcome of a rollout; an exception of the function is an error, never a zero."""
    try:
        return scored(rollout.rollout_id, reward(rollout))
    except Exception as error:
        return failed(rollout.rollout_id, error)


class SyncWorker:
    """Runs until `stop` is set or the state's limit is answered, over as many connections as it takes."""

    def __init__(
        self,
        open_call: Callable[..., Any],
        state: WorkerState,
        reward: RewardFunction,
        policy: RetryPolicy,
        stop: threading.Event,
        threads: int,
    ) -> None:
        self._open_call, self._state, self._reward = open_call, state, reward
        self._attempts, self._stop = Attempts(policy, None, STREAM_SECONDS), stop
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="qerld-reward")
        self._changed = threading.Condition()
        self._connection = 0

    def run(self) -> None:
        """Score until the end; raises `QerldError` when the stream fails for good."""
        try:
            while not self._state.done(self._stop.is_set()):
                try:
                    self._connect()
                except grpc.RpcError as error:
                    time.sleep(self._attempts.wait_after(error))
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _connect(self) -> None:
        with self._changed:
            self._connection += 1
        call = self._open_call(self._requests(self._connection), timeout=self._attempts.seconds())
        try:
            for response in call:
                self._take(response)
        finally:
            with self._changed:
                self._connection += 1  # ends the generator of this connection
                self._changed.notify_all()

    def _take(self, response: reward_pb2.StreamRewardsResponse) -> None:
        with self._changed:
            self._attempts.answered()
            if response.HasField("lease"):
                self._state.leased()
                self._pool.submit(self._score, response.lease.rollout)
            else:
                self._state.answer(response.answer)
                self._changed.notify_all()

    def _score(self, rollout: common_pb2.Rollout) -> None:
        outcome = score(self._reward, rollout)
        with self._changed:
            self._state.scored(outcome)
            self._changed.notify_all()

    def _requests(self, connection: int) -> Iterator[reward_pb2.StreamRewardsRequest]:
        """Yield messages of one connection; returning half-closes the stream, and the service answers the rest."""
        with self._changed:
            messages = list(self._state.opening())
        while messages:
            yield from messages
            messages = self._await_messages(connection)

    def _await_messages(self, connection: int) -> list[reward_pb2.StreamRewardsRequest]:
        """Return the next messages, none at the end."""
        with self._changed:
            while self._connection == connection:
                stopped = self._stop.is_set()
                if self._state.pending and (messages := self._state.next_messages(stopped)):
                    return messages
                if self._state.done(stopped):
                    return []
                self._changed.wait(POLL_SECONDS)
        return []
