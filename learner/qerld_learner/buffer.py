"""Pacing: how many groups of a run may be between prompt and batch. What is sampled too early would only get stale."""

from __future__ import annotations

import time

from .errors import RetryLaterError
from .records import RunConfig
from .signals import Signal


def capacity(config: RunConfig) -> int:
    """Return how many groups may be sampled, awaiting rewards or ready: what trains within a lag of `max_lag`."""
    return config.groups_per_step * (config.max_lag + 1)


class Buffer:
    """The groups in the buffer of one run."""

    def __init__(self, run: str, config: RunConfig) -> None:
        self.run = run
        self.capacity = capacity(config)
        self.changed = Signal()
        self._groups: set[str] = set()
        self._reserved = 0

    @property
    def filled(self) -> int:
        """Groups in the buffer, reserved places included."""
        return len(self._groups) + self._reserved

    def add(self, group_id: str) -> None:
        """Put a group in, whether or not there is room (imports, restarts)."""
        self._groups.add(group_id)

    def remove(self, group_id: str) -> None:
        """Take a group out: batched or dropped."""
        if group_id in self._groups:
            self._groups.discard(group_id)
            self.changed.notify()

    async def reserve(self, at_most: float | None, retry_after: float) -> None:
        """Wait for a place and hold it until `settle`. Raises `RetryLaterError` after `at_most` seconds."""
        end = None if at_most is None else time.monotonic() + at_most
        while self.filled >= self.capacity:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise RetryLaterError(
                    f"run {self.run!r} has {self.filled} groups between prompt and batch, the limit is {self.capacity}"
                    " (groups_per_step * (max_lag + 1)); send outcomes of the open groups, then try again",
                    retry_after=retry_after,
                )
            await self.changed.wait(self.changed.count, left)
        self._reserved += 1

    def settle(self, group_id: str | None) -> None:
        """Turn a reserved place into a group's, or give it back."""
        self._reserved -= 1
        if group_id is not None:
            self._groups.add(group_id)
        else:
            self.changed.notify()
