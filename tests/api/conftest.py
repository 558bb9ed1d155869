"""One learner process's worth of service, in process: real store, real trainer, real gRPC on an ephemeral port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from qerld_learner.app import Ports, running_learner
from qerld_learner.settings import LearnerSettings
from support.api import Api


@pytest.fixture(scope="session")
def learner_settings(tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> LearnerSettings:
    settings = LearnerSettings(
        model=tiny_model[1],
        state_dir=tmp_path_factory.mktemp("learner"),
        port=0,
        metrics_port=0,
        reflection=True,
        device="cpu",
        dtype="float32",
        trainer_threads=1,
        admission_timeout=0.3,
        stop_grace=0.2,
        queue_limit=64,
    )
    return settings.model_copy(update={"replica_timeout": 2.5})  # real servers need more, and settings insist


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ports(learner_settings: LearnerSettings) -> AsyncIterator[Ports]:
    async with running_learner(learner_settings) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def api(ports: Ports) -> AsyncIterator[Api]:
    """Raw stubs on a channel of their own; tests of the wire use these rather than our client."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.port}") as channel:
        yield Api(channel)


@pytest_asyncio.fixture(loop_scope="session")
async def run(api: Api) -> str:
    """A fresh run with groups of two."""
    return await api.new_run()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_run(api: Api) -> str:
    """One run for tests that must leave nothing in it."""
    return await api.new_run()
