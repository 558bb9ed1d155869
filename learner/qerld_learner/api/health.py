"""Health by service, and the gauges that are read rather than told."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence, Set

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from sqlalchemy.exc import SQLAlchemyError

from qerld_learner.api.service import Service
from qerld_learner.core import RunStatus
from qerld_learner.replicas import ReplicaInfo

log = logging.getLogger(__name__)

SAMPLING = "qerld.v1.RolloutService"
STORE_SERVICES = (
    "",
    "qerld.v1.RunService",
    "qerld.v1.RewardService",
    "qerld.v1.PolicyService",
    "qerld.v1.ReplicaService",
)
INTERVAL = 1.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def state_of(replica: ReplicaInfo, live: Set[tuple[str, int]]) -> str:
    """Return the state of a policy server: refused, quarantined, serving or loading.

    It is serving when it serves the live version of a run, whatever else it is loading, or when no run has one.
    """
    if replica.refused_reason:
        return "refused"
    if replica.quarantine_reason:
        return "quarantined"
    serving = not live.isdisjoint(replica.loaded) if live else replica.reconciled
    return "serving" if serving else "loading"


class HealthLoop:
    """The API is SERVING while the store answers; RolloutService also while a policy server serves a live version."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.servicer = health_aio.HealthServicer()

    async def update(self) -> None:
        """Look once: set health and gauges."""
        # Servers first: they have a version before it is live, so no swap falls between the two looks.
        replicas = self._service.learner.replicas()
        statuses = await self._statuses()
        for name in STORE_SERVICES:
            await self.servicer.set(name, NOT_SERVING if statuses is None else SERVING)
        sampling = statuses is not None and self._set_gauges(statuses, replicas)
        await self.servicer.set(SAMPLING, SERVING if sampling else NOT_SERVING)

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.update()

    async def stop(self) -> None:
        """Say NOT_SERVING for good, before the server stops taking calls."""
        await self.servicer.enter_graceful_shutdown()

    async def _statuses(self) -> list[RunStatus] | None:
        try:
            return await self._service.learner.statuses()
        except (SQLAlchemyError, OSError):
            log.exception("the store does not answer; health is NOT_SERVING")
            return None

    def _set_gauges(self, statuses: Sequence[RunStatus], replicas: Sequence[ReplicaInfo]) -> bool:
        """Set the gauges; returns whether a policy server samples."""
        metrics = self._service.metrics
        for status in statuses:
            metrics.set_run(status.run, status.live_version, status.groups, status.capacity)
        live = {(status.run, status.live_version) for status in statuses}
        states = Counter(state_of(replica, live) for replica in replicas)
        metrics.set_replicas(states)
        return states["serving"] > 0
