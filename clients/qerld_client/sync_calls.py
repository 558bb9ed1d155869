"""Calls of the sync client: retries, deadlines, streams that are opened again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from qerld_client.calls import Streamed, Stubs, Unary
from qerld_client.retry import Attempts, RetryPolicy

T = TypeVar("T")


def call(stubs: Stubs, one: Unary[T], policy: RetryPolicy, timeout: float) -> T:
    """Call until it succeeds, a retry cannot help, or `timeout` seconds have passed."""
    attempts = Attempts(policy, timeout)
    while True:
        try:
            return one.result(one.rpc(stubs)(one.argument(), timeout=attempts.seconds()))
        except grpc.RpcError as error:
            delay = attempts.wait_after(error)
        time.sleep(delay)


class Stream(Generic[T]):
    """Iterator over a server stream that is opened again where it broke. Use as a context manager, or `close` it."""

    def __init__(self, stubs: Stubs, one: Streamed[T], policy: RetryPolicy) -> None:
        self._open, self._resume = one.rpc(stubs), one.resume
        self._attempts = Attempts(policy, one.timeout, one.connection)
        self._call: Any = None
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._closed.is_set():
            try:
                if self._call is None:
                    self._call = self._open(self._resume.request(), timeout=self._attempts.seconds())
                item = self._resume.accept(next(self._call))
            except StopIteration:
                self.close()
            except grpc.RpcError as error:
                self._recover(error)
            else:
                self._attempts.answered()
                if item is not None:
                    return item
        raise StopIteration

    def _recover(self, error: grpc.RpcError) -> None:
        """Wait before the next connection, or raise when there is none."""
        self._call = None
        if not self._closed.is_set():
            self._closed.wait(self._attempts.wait_after(error))

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
