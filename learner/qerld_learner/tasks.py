"""Background tasks: kept referenced, logged when they fail, cancelled together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0


class Tasks:
    """The tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def for_ever(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine and, when it fails, log that and run it again."""
        self.once(name, self._again(name, make))

    def once(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; a failure is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self, names: Collection[str] | None = None) -> None:
        """Cancel all, or those with these names, and wait until they have ended."""
        tasks = [task for task in self._tasks if names is None or task.get_name() in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _again(self, name: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await make()
            except Exception:
                _log.exception("task %s failed and begins again", name)
                await asyncio.sleep(RESTART_SECONDS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("task %s failed", task.get_name(), exc_info=task.exception())
