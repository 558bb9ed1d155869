"""Health by service, and the gauges that are read rather than told."""

from __future__ import annotations

import asyncio
import logging

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from sqlalchemy.exc import SQLAlchemyError

from qerld_learner.api.service import Service
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


def takes_requests(replica: ReplicaInfo) -> bool:
    """Whether a policy server samples: it has what it should and is not in quarantine."""
    return replica.reconciled and not replica.quarantine_reason


class HealthLoop:
    """The API is SERVING while the store answers; RolloutService also needs a policy server that takes requests."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.servicer = health_aio.HealthServicer()

    async def update(self) -> None:
        """Look once: set health and gauges."""
        store = await self._store_answers()
        sampling = store and any(map(takes_requests, self._service.learner.replicas()))
        for name in STORE_SERVICES:
            await self.servicer.set(name, SERVING if store else NOT_SERVING)
        await self.servicer.set(SAMPLING, SERVING if sampling else NOT_SERVING)

    async def run(self) -> None:
        """Look every second until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.update()

    async def stop(self) -> None:
        """Say NOT_SERVING for good, before the server stops taking calls."""
        await self.servicer.enter_graceful_shutdown()

    async def _store_answers(self) -> bool:
        try:
            statuses = await self._service.learner.statuses()
        except (SQLAlchemyError, OSError):
            log.exception("the store does not answer; health is NOT_SERVING")
            return False
        metrics = self._service.metrics
        for status in statuses:
            metrics.set_run(status.run, status.live_version, status.groups, status.capacity)
        replicas = self._service.learner.replicas()
        quarantined = sum(bool(replica.quarantine_reason) for replica in replicas)
        serving = sum(map(takes_requests, replicas))
        metrics.set_replicas(serving, len(replicas) - serving - quarantined, quarantined)
        return True
