"""A learner and a policy server on a real engine, in one process; sampling and rewarding until steps were made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from qerld_learner.core import Learner
from qerld_learner.metrics import LearnerMetrics
from qerld_learner.records import RolloutFinished, RolloutRecord, StepReport
from qerld_service.engine import PolicyEngine
from qerld_service.policy import running_policy
from qerld_service.settings import PolicySettings
from support.policy import policy_values

from .conftest import new_id, prompt, reward, until


@dataclass
class Loop:
    """A learner that serves, and what a policy server needs to attach to it."""

    learner: Learner
    port: int
    model: Path
    engine: PolicyEngine
    folder: Path
    metrics: LearnerMetrics
    servers: int = 0

    @asynccontextmanager
    async def policy(self) -> AsyncIterator[None]:
        """A policy server on the shared engine, attached."""
        self.servers += 1
        values = policy_values(self.model, self.port, self.folder / f"cache-{self.servers}")
        settings = PolicySettings(**values | {"reconnect_seconds": 0.2})
        async with running_policy(settings, self.engine):
            await until(self._attached)
            yield

    @asynccontextmanager
    async def health_of_sampling(self) -> AsyncIterator[list[int]]:
        """What gRPC health says of RolloutService, from change to change."""
        said: list[int] = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:

            async def watch() -> None:
                request = health_pb2.HealthCheckRequest(service="qerld.v1.RolloutService")
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                    said.append(answer.status)

            watching = asyncio.create_task(watch())
            yield said
            watching.cancel()

    def metric(self, name: str, **labels: str) -> float:
        """Value of a series that the learner has counted or set."""
        value = self.metrics.registry.get_sample_value(f"qerld_{name}", labels)
        assert value is not None
        return value

    async def _attached(self) -> bool:
        return bool(self.learner.replicas())


async def sample(learner: Learner, run: str, request_id: str | None = None) -> list[RolloutRecord]:
    events = learner.sample(run, request_id or new_id(), "hash", prompt())
    return [event.rollout async for event in events if isinstance(event, RolloutFinished)]


async def train(learner: Learner, run: str, steps: int, after: int = 0) -> list[StepReport]:
    """Sample and reward until `steps` reports after step `after` have come; the reward is the share of even tokens."""

    async def feed() -> None:
        while True:
            rollouts = await sample(learner, run)
            outcomes = [reward(r.rollout_id, sum(t % 2 == 0 for t in r.completion_ids)) for r in rollouts]
            await learner.submit_outcomes(run, new_id(), "hash", outcomes)

    reports: list[StepReport] = []
    feeder = asyncio.create_task(feed())
    try:
        async with asyncio.timeout(240):
            async for report in learner.watch_reports(run, after):
                reports.append(report)
                if len(reports) == steps:
                    return reports
    finally:
        feeder.cancel()
    raise AssertionError("the stream of reports ended")
