"""Calls of the sync client: retries, deadlines, streams that are opened again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from qerld_client.errors import DeadlineError, QerldError, from_rpc
from qerld_client.resume import Resume
from qerld_client.retry import RetryPolicy

T = TypeVar("T")


def call(method: Callable[[float], T], policy: RetryPolicy, timeout: float) -> T:
    """Call `method(seconds left)` until it succeeds, a retry cannot help, or `timeout` seconds have passed."""
    end, failures = time.monotonic() + timeout, 0
    while True:
        try:
            return method(max(0.001, end - time.monotonic()))
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            delay = policy.delay(error, failures)
            if delay is None or time.monotonic() + delay >= end:
                raise error from rpc_error
            failures += 1
            time.sleep(delay)


class Stream(Generic[T]):
    """Iterator over a server stream that is opened again where it broke. Use as a context manager, or `close` it.

    Args:
        open_call: (request, seconds) → the gRPC call.
        resume: State over connections.
        timeout: Seconds until the stream fails with `DeadlineError`; None never.
        connection: Deadline of one connection, in seconds.
    """

    def __init__(
        self,
        open_call: Callable[..., Any],
        resume: Resume[Any, Any, T],
        policy: RetryPolicy,
        timeout: float | None,
        connection: float,
    ) -> None:
        self._open_call, self._resume, self._policy, self._connection = open_call, resume, policy, connection
        self._end = float("inf") if timeout is None else time.monotonic() + timeout
        self._call: Any = None
        self._failures = 0
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._closed.is_set():
            try:
                if self._call is None:
                    self._call = self._open()
                item = self._resume.accept(next(self._call))
            except StopIteration:
                self.close()
            except grpc.RpcError as rpc_error:
                self._recover(rpc_error)
            else:
                self._failures = 0
                if item is not None:
                    return item
        raise StopIteration

    def _open(self) -> Any:
        seconds = max(0.001, min(self._connection, self._end - time.monotonic()))
        return self._open_call(self._resume.request(), timeout=seconds)

    def _recover(self, rpc_error: grpc.RpcError) -> None:
        """Wait before the next connection, or raise when there is none."""
        self._call = None
        if self._closed.is_set():
            return
        error: QerldError = from_rpc(rpc_error)
        left = self._end - time.monotonic()
        delay = 0.0 if isinstance(error, DeadlineError) and left > 0 else self._policy.delay(error, self._failures)
        if delay is None or delay >= left:
            raise error from rpc_error
        self._failures += 1
        self._closed.wait(delay)

    def close(self) -> None:
        """End the stream; safe from another thread, whose iteration then ends."""
        self._closed.set()
        current = self._call
        if current is not None:
            current.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
