"""The trainer process as the learner uses it: started when needed, started again when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .observer import Observer
from .trainer.client import TrainerDiedError, TrainerProcess
from .trainer.messages import Reply, Request

# Doubled with each death in a row: what kills a trainer at once must not start one process after the other.
RESTART_SECONDS = 1.0
LONGEST_RESTART_SECONDS = 30.0


class TrainerHost:
    """Serialises requests to one trainer process.

    Only requests that leave nothing behind when they fail may be repeated; all of the trainer's are so.
    """

    def __init__(self, process: TrainerProcess, observer: Observer) -> None:
        self._process = process
        self._observer = observer
        self._lock = asyncio.Lock()
        self._starting: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running trainer, None when none runs."""
        return self._process.pid

    async def call(
        self,
        request: Request,
        *,
        attempts: int,
        before: Callable[[], None] | None = None,
    ) -> Reply:
        """Return the reply, starting the process when it does not run and again when it dies.

        `before` runs ahead of every attempt. Raises `TrainerFailure` at once, `TrainerDiedError` after `attempts`.
        """
        async with self._lock:
            for attempt in range(1, attempts + 1):
                try:
                    await self._start()
                    if before is not None:
                        before()
                    return await self._process.call(request)
                except TrainerDiedError:
                    self._observer.trainer_died()
                    if attempt == attempts:
                        raise
                    await asyncio.sleep(min(RESTART_SECONDS * 2 ** (attempt - 1), LONGEST_RESTART_SECONDS))
        raise ValueError(f"attempts must be at least 1, got {attempts}")

    async def start(self) -> None:
        """Start the process ahead of its first request: importing its libraries takes seconds."""
        async with self._lock:
            await self._start()

    async def stop(self) -> None:
        """End the process; a request in progress fails."""
        # One that still imports its libraries is not waited for: its start fails when its process ends.
        while self._starting is not None and not self._starting.done():
            await self._process.stop()
            await asyncio.wait({self._starting}, timeout=0.1)
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._process.stop()

    async def _start(self) -> None:
        # asyncio does not return from a subprocess's start that is cancelled in its first moments: let it finish.
        # Whoever comes next waits for it: a process that is not ready yet takes no request.
        if self._starting is None or self._starting.done():
            self._starting = asyncio.ensure_future(self._process.start())
        await asyncio.shield(self._starting)
