"""Leases: finished rollouts without an outcome, handed to reward workers under credits."""

from __future__ import annotations

from dataclasses import dataclass

from .records import RolloutRecord


@dataclass(frozen=True)
class Lease:
    """A rollout handed to a worker, until `expires_at` (UNIX seconds)."""

    rollout: RolloutRecord
    expires_at: float


class LeaseQueue:
    """One worker's side: iterate to get leases, as many as there are credits."""

    def add_credits(self, count: int) -> None:
        """Let `count` more rollouts be pushed."""
        raise NotImplementedError

    def __aiter__(self) -> LeaseQueue:
        return self

    async def __anext__(self) -> Lease:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what has no outcome; iteration ends."""
        raise NotImplementedError
