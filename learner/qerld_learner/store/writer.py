"""The single writer: a thread that commits many mutations in one transaction and answers only after COMMIT."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from ..errors import RetryLaterError
from .database import means_no_room

# One transaction holds what arrives within 5 ms, at most 256 mutations: an fsync costs about as much as 50 of them.
BATCH_SECONDS = 0.005
BATCH_MUTATIONS = 256
NO_ROOM_RETRY_SECONDS = 5.0

T = TypeVar("T")
Mutation = Callable[[Connection], T]


@dataclass
class _Queued:
    mutation: Mutation[Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: BaseException | None = None


class Writer:
    """Runs mutations in order. Each has a savepoint: one that raises leaves no trace and does not disturb the others.

    `on_commit(mutations, seconds)` is called on the writer's thread after each COMMIT.
    """

    def __init__(self, engine: Engine, on_commit: Callable[[int, float], None] | None = None) -> None:
        self._engine = engine
        self._on_commit = on_commit
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._closed = False
        self._thread.start()

    async def write(self, mutation: Mutation[T]) -> T:
        """Return the mutation's result once it is durable.

        Raises what the mutation raised, or `RetryLaterError` when the disk is full; nothing of it is stored then.
        Cancelling the caller does not cancel the mutation.
        """
        if self._closed:
            raise RetryLaterError("the learner is shutting down; try again later", retry_after=2.0, unavailable=True)
        loop = asyncio.get_running_loop()
        item = _Queued(mutation, loop.create_future(), loop)
        self._queue.put(item)
        result: T = await item.future
        return result

    def close(self) -> None:
        """Commit what is queued and end the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            while True:
                batch, last = self._collect()
                if batch:
                    self._commit(connection, batch)
                if last:
                    return

    def _collect(self) -> tuple[list[_Queued], bool]:
        first = self._queue.get()
        if first is None:
            return [], True
        batch = [first]
        end = time.monotonic() + BATCH_SECONDS
        while len(batch) < BATCH_MUTATIONS:
            # Never wait for more work: what queued up during the last COMMIT is the batch.
            if self._queue.empty() or time.monotonic() > end:
                return batch, False
            item = self._queue.get()
            if item is None:
                return batch, True
            batch.append(item)
        return batch, False

    def _commit(self, connection: Connection, batch: list[_Queued]) -> None:
        begun = time.monotonic()
        try:
            with connection.begin():
                for item in batch:
                    self._apply(connection, item)
        except BaseException as error:
            connection.invalidate()
            self._fail(batch, error)
        else:
            if self._on_commit is not None:
                self._on_commit(len(batch), time.monotonic() - begun)
        self._resolve(batch)

    @staticmethod
    def _apply(connection: Connection, item: _Queued) -> None:
        savepoint = connection.begin_nested()
        try:
            item.result = item.mutation(connection)
        except Exception as error:
            if means_no_room(error):
                raise  # SQLite may have rolled everything back
            savepoint.rollback()
            item.error = error
        else:
            savepoint.commit()

    @staticmethod
    def _fail(batch: list[_Queued], error: BaseException) -> None:
        if means_no_room(error):
            error = RetryLaterError(
                "the store cannot be written, its disk is full or at its limit; nothing of this request was stored:"
                " free space on the volume of the state folder and try again",
                retry_after=NO_ROOM_RETRY_SECONDS,
            )
        for item in batch:
            item.error = item.error or error

    @staticmethod
    def _resolve(batch: list[_Queued]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Queued]] = {}
        for item in batch:
            by_loop.setdefault(item.loop, []).append(item)
        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, items)


def _settle(items: list[_Queued]) -> None:
    for item in items:
        if item.future.done():
            continue
        if item.error is not None:
            item.future.set_exception(item.error)
        else:
            item.future.set_result(item.result)
