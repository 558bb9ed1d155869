"""Attached policy servers: what each should serve, what it serves, and calls to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from .records import DesiredState, ReplicaHello, ReplicaReport


@dataclass(frozen=True)
class ReplicaInfo:
    """A policy server that is attached; `loaded` are the (run, version) pairs that it serves."""

    hello: ReplicaHello
    loaded: tuple[tuple[str, int], ...]
    reconciled: bool
    in_flight: int
    quarantine_reason: str


class ReplicaSession:
    """One attachment, from Hello to close."""

    def desired(self) -> AsyncIterator[DesiredState]:
        """Yield the desired state now and at each change, until the session is closed."""
        raise NotImplementedError

    async def report(self, report: ReplicaReport) -> None:
        """Take what the server has now."""
        raise NotImplementedError

    async def close(self) -> None:
        """Forget the server; its rollouts go to others."""
        raise NotImplementedError
