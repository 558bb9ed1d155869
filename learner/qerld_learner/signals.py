"""Waking coroutines of the event loop: one that waits for a change, and readers of a broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from .errors import RetryLaterError

T = TypeVar("T")


class Signal:
    """Changes that are only counted. `wait` takes the count that the caller saw, so none is missed."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake everyone who waits."""
        self.count += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, seen: int, at_most: float | None = None) -> None:
        """Return when the count differs from `seen`, or after `at_most` seconds."""
        if self.count != seen:
            return
        event = self._event
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await event.wait()


class Subscription(Generic[T]):
    """One reader's queue. A reader that falls more than `limit` items behind is told so and has to begin again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()
        self._overflown = False

    def put(self, item: T) -> None:
        """Append an item, or give the reader up."""
        if self._queue.qsize() >= self._limit:
            self._overflown = True
            return
        self._queue.put_nowait(item)

    def end(self) -> None:
        """Let the reader stop after what it has."""
        self._queue.put_nowait(None)

    async def get(self) -> T | None:
        """Return the next item, or None at the end. Raises `RetryLaterError` when items were lost."""
        if self._overflown:
            raise RetryLaterError(
                f"the reader of this stream is more than {self._limit} items behind; read faster and start it again",
                retry_after=1.0,
            )
        return await self._queue.get()


class Broadcast(Generic[T]):
    """Items for whoever subscribes, from the moment of subscription on."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._readers: set[Subscription[T]] = set()
        self._closed = False

    def publish(self, item: T) -> None:
        """Hand an item to every reader."""
        for reader in self._readers:
            reader.put(item)

    def close(self) -> None:
        """End all readers, also later ones."""
        self._closed = True
        for reader in self._readers:
            reader.end()

    @contextmanager
    def subscribe(self) -> Iterator[Subscription[T]]:
        """Yield a subscription that ends with the block."""
        reader: Subscription[T] = Subscription(self._limit)
        if self._closed:
            reader.end()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
