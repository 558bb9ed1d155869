"""The store: durable state of the learner in SQLite (or PostgreSQL), behind `write` and `read`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from qerld_kernels.exclusive import FolderLock
from sqlalchemy import Connection

from ..errors import LearnerError
from .database import open_database
from .writer import Mutation, Writer

T = TypeVar("T")

__all__ = ["LOCK_NAME", "Store"]

LOCK_NAME = "learner.lock"


class Store:
    """One writer thread and one reader thread over one database; the folder is locked while it is open."""

    def __init__(
        self, folder: Path, url: str | None = None, on_commit: Callable[[int, float], None] | None = None
    ) -> None:
        """Lock the folder, open and migrate the database.

        Raises `FolderError` when the folder is in use or cannot be made, `StoreError` when the database cannot be used.
        """
        self._lock = FolderLock(folder, "state_dir", "qerld learner", LOCK_NAME)
        try:
            self._engine = open_database(url or f"sqlite:///{folder / 'learner.db'}")
        except BaseException:
            self._lock.release()
            raise
        self._writer = Writer(self._engine, on_commit)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-reader")

    async def write(self, mutation: Mutation[T]) -> T:
        """Run a mutation in the next transaction and return its result after COMMIT; see `Writer.write`."""
        return await self._writer.write(mutation)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query on the read connection: it sees what is committed, and never waits for the writer."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._query, query)

    def _query(self, query: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            try:
                return query(connection)
            except LearnerError:
                raise
            except BaseException:
                # A half-read cursor lives as long as the traceback, and what it saw is all that its connection sees.
                connection.invalidate()
                raise

    def close(self) -> None:
        """Commit what is queued and give the folder back. Blocks for at most one transaction."""
        self._writer.close()
        self._reader.shutdown()
        self._engine.dispose()
        self._lock.release()
