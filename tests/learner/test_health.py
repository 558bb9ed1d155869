"""Health and the gauge of policy servers: a server serves while it has a live version, whatever else it loads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from qerld_learner.api.health import SAMPLING, HealthLoop
from qerld_learner.api.service import Service
from qerld_learner.api.streams import Streams
from qerld_learner.core import Learner
from qerld_learner.metrics import REPLICA_STATES, LearnerMetrics
from qerld_learner.replica_records import AdapterStatus
from qerld_learner.replicas import ReplicaSession
from qerld_learner.store import rows, runs, schema
from qerld_learner.tokens import PromptTokenizer
from sqlalchemy import insert

from .conftest import hello_of, new_run, serving

SERVING = health_pb2.HealthCheckResponse.SERVING


class Health:
    """Looks when told to."""

    def __init__(self, learner: Learner, model: Path) -> None:
        self._metrics = LearnerMetrics()
        self._loop = HealthLoop(Service(learner, PromptTokenizer(model), self._metrics, Streams()))

    async def look(self) -> tuple[bool, str]:
        """Whether RolloutService is SERVING, and the state of the one policy server."""
        await self._loop.update()
        request: Any = health_pb2.HealthCheckRequest(service=SAMPLING)
        context: Any = None
        answer = await self._loop.servicer.Check(request, context)
        counts = {s: self._metrics.registry.get_sample_value("qerld_replicas", {"state": s}) for s in REPLICA_STATES}
        (state,) = [state for state, count in counts.items() if count]
        return answer.status == SERVING, state


@pytest.fixture
async def attached(learner: Learner) -> AsyncIterator[ReplicaSession]:
    session = await learner.attach(hello_of(learner))
    yield session
    await session.close()


async def test_health_holds_across_a_swap(
    learner: Learner, attached: ReplicaSession, tiny_model: tuple[Path, Path]
) -> None:
    health = Health(learner, tiny_model[1])
    run = await new_run(learner)
    assert await health.look() == (False, "loading")
    await attached.report(serving((run, 0)))
    assert await health.look() == (True, "serving")
    # Version 1 is desired: the server is not reconciled any more, and serves on.
    loading = AdapterStatus(run, 1, False, 0, 0.0, "", 0.0)
    before = serving((run, 0))
    await attached.report(replace(before, adapters=(*before.adapters, loading), reconciled=False))
    assert await health.look() == (True, "serving")
    await attached.report(serving((run, 0), (run, 1)))
    assert await health.look() == (True, "serving")
    row = rows.version_row(replace(await learner.get_version(run), version=1), "versions/none")
    await learner._shared.store.write(lambda c: c.execute(insert(schema.versions), row))
    await learner._shared.store.write(lambda c: runs.make_live(c, run, 1))
    assert await health.look() == (True, "serving")
    await attached.report(serving((run, 1)))
    assert await health.look() == (True, "serving")
    # Only what is live counts.
    await attached.report(serving((run, 0)))
    assert await health.look() == (False, "loading")


async def test_a_quarantined_server_does_not_serve(
    learner: Learner, attached: ReplicaSession, tiny_model: tuple[Path, Path]
) -> None:
    health = Health(learner, tiny_model[1])
    run = await new_run(learner)
    await attached.report(replace(serving((run, 0)), error="the engine died"))
    assert await health.look() == (False, "quarantined")
