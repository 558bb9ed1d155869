"""Calls of the asyncio client: retries, deadlines, streams that are opened again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from qerld_client.errors import DeadlineError, from_rpc
from qerld_client.resume import Resume
from qerld_client.retry import RetryPolicy

T = TypeVar("T")


async def call(method: Callable[[float], Awaitable[T]], policy: RetryPolicy, timeout: float) -> T:
    """Call `method(seconds left)` until it succeeds, a retry cannot help, or `timeout` seconds have passed."""
    end, failures = time.monotonic() + timeout, 0
    while True:
        try:
            return await method(max(0.001, end - time.monotonic()))
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            delay = policy.delay(error, failures)
            if delay is None or time.monotonic() + delay >= end:
                raise error from rpc_error
            failures += 1
            await asyncio.sleep(delay)


async def stream(
    open_call: Callable[..., Any],
    resume: Resume[Any, Any, T],
    policy: RetryPolicy,
    timeout: float | None,
    connection: float,
) -> AsyncIterator[T]:
    """Yield the items of a server stream that is opened again where it broke; see `sync_calls.Stream`."""
    end, failures = float("inf") if timeout is None else time.monotonic() + timeout, 0
    while True:
        current = open_call(resume.request(), timeout=max(0.001, min(connection, end - time.monotonic())))
        try:
            async for response in current:
                failures = 0
                item = resume.accept(response)
                if item is not None:
                    yield item
            return
        except grpc.RpcError as rpc_error:
            error = from_rpc(rpc_error)
            left = end - time.monotonic()
            delay = 0.0 if isinstance(error, DeadlineError) and left > 0 else policy.delay(error, failures)
            if delay is None or delay >= left:
                raise error from rpc_error
            failures += 1
        finally:
            current.cancel()
        await asyncio.sleep(delay)
