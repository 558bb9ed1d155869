"""Long-lived streams: several tasks feed one stream of responses, and all streams end when the server stops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Generic, TypeVar

from qerld_learner.errors import RetryLaterError

T = TypeVar("T")
QUEUE_LENGTH = 64


class Streams:
    """The open streams of a server. `stop` ends them, so that a graceful stop need not wait for watchers."""

    def __init__(self) -> None:
        self._open: set[Outbox[Any]] = set()
        self._stopped = False

    def outbox(self) -> Outbox[Any]:
        """Return the outbox of a new stream."""
        box: Outbox[Any] = Outbox(self)
        self._open.add(box)
        if self._stopped:
            box.fail(_stopping())
        return box

    def stop(self) -> None:
        """End every stream with UNAVAILABLE; clients come back to the next start."""
        self._stopped = True
        for box in self._open:
            box.fail(_stopping())

    def forget(self, box: Outbox[Any]) -> None:
        self._open.discard(box)


def _stopping() -> RetryLaterError:
    return RetryLaterError("the learner is stopping; connect again", retry_after=1.0, unavailable=True)


class Outbox(Generic[T]):
    """Responses of one stream. Tasks put them, the servicer yields from `drain`; a full queue holds the tasks back."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._items: deque[T] = deque()
        self._changed, self._room = asyncio.Event(), asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, item: T) -> None:
        """Queue an item whose number something else limits; nothing happens when the stream is over."""
        if not self._ended:
            self._items.append(item)
            self._changed.set()

    async def put(self, item: T) -> None:
        """Queue an item when there is room."""
        while len(self._items) >= QUEUE_LENGTH and not self._ended:
            self._room.clear()
            await self._room.wait()
        self.offer(item)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what is queued already."""
        self._end(error)

    def pump(self, items: AsyncIterator[T]) -> None:
        """Put what `items` yields; the stream ends with it."""

        async def feed() -> None:
            async for item in items:
                await self.put(item)

        self.spawn(feed())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task of the stream: its error fails the stream, and when it returns the stream ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def drain(self) -> AsyncIterator[T]:
        """Yield responses until the stream ends; cancels its tasks when the client is gone."""
        try:
            while self._items or not self._ended:
                while self._items:
                    item = self._items.popleft()
                    self._room.set()
                    yield item
                self._changed.clear()
                if not self._ended:
                    await self._changed.wait()
            if self._error is not None:
                raise self._error
        finally:
            self._streams.forget(self)
            self._end(None)
            await self._cancel()

    def _end(self, error: Exception | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
        self._changed.set()
        self._room.set()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        self._end(error if isinstance(error, Exception) else None)

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
