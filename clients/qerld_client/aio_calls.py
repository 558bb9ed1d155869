"""Calls of the asyncio client: retries, deadlines, streams that are opened again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc

from qerld_client.calls import Streamed, Stubs, Unary
from qerld_client.retry import Attempts, RetryPolicy

T = TypeVar("T")


async def call(stubs: Stubs, one: Unary[T], policy: RetryPolicy, timeout: float) -> T:
    """Call until it succeeds, a retry cannot help, or `timeout` seconds have passed."""
    attempts = Attempts(policy, timeout)
    while True:
        try:
            return one.result(await one.rpc(stubs)(one.argument(), timeout=attempts.seconds()))
        except grpc.RpcError as error:
            delay = attempts.wait_after(error)
        await asyncio.sleep(delay)


async def stream(stubs: Stubs, one: Streamed[T], policy: RetryPolicy) -> AsyncIterator[T]:
    """Yield the items of a server stream that is opened again where it broke; see `sync_calls.Stream`."""
    attempts = Attempts(policy, one.timeout, one.connection)
    while True:
        current = one.rpc(stubs)(one.resume.request(), timeout=attempts.seconds())
        try:
            async for response in current:
                attempts.answered()
                item = one.resume.accept(response)
                if item is not None:
                    yield item
            return
        except grpc.RpcError as error:
            delay = attempts.wait_after(error)
        finally:
            current.cancel()
        await asyncio.sleep(delay)
