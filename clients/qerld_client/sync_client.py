"""The sync client: one method an RPC, safe to use from several threads. `rpcs` says what each does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

import grpc
from qerld.v1 import common_pb2, run_pb2

from qerld_client import rpcs
from qerld_client.adapters import FILES, PartialFile
from qerld_client.calls import Gathered, Paged, Streamed, Stubs, Unary, described_by
from qerld_client.channel import OPTIONS, SAMPLE_SECONDS, UNARY_SECONDS
from qerld_client.errors import AlreadyExistsError
from qerld_client.requests import PromptLike, Task
from qerld_client.retry import RetryPolicy
from qerld_client.sync_calls import Stream, call
from qerld_client.sync_loop import train
from qerld_client.sync_worker import RewardFunction, SyncWorker
from qerld_client.worker import WorkerState

T = TypeVar("T")
P = ParamSpec("P")


def _unary(build: Callable[P, Unary[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(build(*args, **kwargs))

    return described_by(build, method)


def _streamed(build: Callable[P, Streamed[T]]) -> Callable[Concatenate[Client, P], Stream[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:
        return self._stream(build(*args, **kwargs))

    return described_by(build, method)


def _gathered(build: Callable[P, Gathered[T]]) -> Callable[Concatenate[Client, P], T]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        wanted = build(*args, **kwargs)
        with self._stream(wanted.stream) as items:
            return wanted.result(list(items))

    return described_by(build, method)


def _paged(build: Callable[P, Paged[T]]) -> Callable[Concatenate[Client, P], Iterator[T]]:
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        pages, more = build(*args, **kwargs), True
        while more:
            response = self._call(pages.page)
            yield from pages.items(response)
            more = pages.turn(response)

    return described_by(build, method)


class Client:
    """Client of a learner. Calls raise `QerldError`; UNAVAILABLE and RESOURCE_EXHAUSTED are retried until the deadline.

    Args:
        target: host:port of the learner.
        credentials: Channel credentials for TLS; None speaks plain text.
        timeout: Deadline of unary calls in seconds, retries included.
        retry: When to call again.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = UNARY_SECONDS,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._channel = (
            grpc.insecure_channel(target, OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, credentials, OPTIONS)
        )
        self._stubs = Stubs(self._channel)
        self._timeout = timeout
        self._retry = retry or RetryPolicy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; open calls end as cancelled."""
        self._channel.close()

    def _call(self, one: Unary[T]) -> T:
        try:
            return call(self._stubs, one, self._retry, max(self._timeout, one.least_seconds))
        except AlreadyExistsError:
            if one.if_exists is None:
                raise
            return self._call(one.if_exists)

    def _stream(self, one: Streamed[T]) -> Stream[T]:
        return Stream(self._stubs, one, self._retry)

    # Runs
    create_run = _unary(rpcs.create_run)
    get_run = _unary(rpcs.get_run)
    list_runs = _unary(rpcs.list_runs)
    update_run = _unary(rpcs.update_run)
    pause_run = _unary(rpcs.pause_run)
    resume_run = _unary(rpcs.resume_run)
    checkpoint_run = _unary(rpcs.checkpoint_run)
    delete_run = _unary(rpcs.delete_run)
    watch_run = _streamed(rpcs.watch_run)
    list_replicas = _unary(rpcs.list_replicas)

    # Rollouts
    sample = _gathered(rpcs.sample)
    sample_stream = _streamed(rpcs.sample_stream)
    submit_prompts = _unary(rpcs.submit_prompts)
    import_trajectories = _unary(rpcs.import_trajectories)
    get_rollout = _unary(rpcs.get_rollout)
    list_groups = _paged(rpcs.list_groups)

    # Rewards
    submit_rewards = _unary(rpcs.submit_rewards)
    check_rewards = _unary(rpcs.check_rewards)
    get_receipt = _unary(rpcs.get_receipt)
    watch_receipts = _streamed(rpcs.watch_receipts)

    def stream_rewards(
        self,
        run: str,
        reward: RewardFunction,
        *,
        worker: str = "worker",
        credits: int = 64,
        threads: int = 4,
        lease: float | None = None,
        limit: int | None = None,
        stop: threading.Event | None = None,
    ) -> WorkerState:
        """Score rollouts that the service pushes, until `stop` is set or `limit` outcomes are answered.

        `reward` runs in `threads` threads; an exception of it becomes an error outcome, never a zero. Returns counts.
        """
        state = WorkerState(run, worker, credits, lease, limit)
        stop = stop or threading.Event()
        SyncWorker(self._stubs.rewards.StreamRewards, state, reward, self._retry, stop, threads).run()
        return state

    # Versions
    get_policy = _unary(rpcs.get_policy)
    list_versions = _paged(rpcs.list_versions)
    watch_policy = _streamed(rpcs.watch_policy)
    rollback_policy = _unary(rpcs.rollback_policy)
    pin_policy = _unary(rpcs.pin_policy)
    evaluate = _streamed(rpcs.evaluate)

    def download_adapter(
        self, run: str, folder: Path | str, version: int | None = None, *, timeout: float = SAMPLE_SECONDS
    ) -> Path:
        """Download a version (the live one by default) as a PEFT folder; goes on where it broke, checks SHA-256."""
        if version is None:
            version = self.get_policy(run).policy.version
        for name in FILES:
            part = PartialFile(Path(folder), common_pb2.Policy(run=run, version=version), name)
            with self._stream(rpcs.download(part.resume, timeout)) as chunks:
                for chunk in chunks:
                    part.write(chunk)
            part.finish()
        return Path(folder)

    # The loop

    def train(
        self, run: str, tasks: Iterable[Task | PromptLike], reward: RewardFunction, *, concurrency: int = 8
    ) -> Iterator[run_pb2.RunReport]:
        """Sample tasks, score their rollouts, submit the rewards; yields a report a learner step.

        Ends when the run has taken its `max_steps`, or when `tasks` is used up and every rollout is rewarded.
        `concurrency` groups are in flight. An exception of `reward` is submitted as an error, never as a zero.
        """
        return train(self, run, tasks, reward, concurrency)
