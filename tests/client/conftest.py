"""The client against a real learner in process, and against the whole loop with a real policy server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from qerld_client import AsyncClient
from qerld_learner.app import running_learner
from qerld_learner.settings import LearnerSettings

if TYPE_CHECKING:
    from qerld_service.engine import PolicyEngine


@dataclass(frozen=True)
class Target:
    """Where the learner serves."""

    address: str
    metrics_port: int


@asynccontextmanager
async def serving_learner(model: Path, folder: Path, **more: Any) -> AsyncIterator[Target]:
    """A learner in process, with its own store and trainer; `more` are settings of it."""
    settings = LearnerSettings(
        model=model,
        state_dir=folder,
        port=0,
        metrics_port=0,
        device="cpu",
        dtype="float32",
        trainer_threads=1,
        stop_grace=0.2,
        **more,
    )
    async with running_learner(settings) as ports:
        yield Target(f"127.0.0.1:{ports.port}", ports.metrics_port)


@asynccontextmanager
async def loop_of(engine: PolicyEngine, model: Path, folder: Path, **more: Any) -> AsyncIterator[Target]:
    """A learner of its own with a policy server on the session's engine: 6 slots are 3 versions, so few runs."""
    learner = serving_learner(model, folder / "learner", **more)
    async with learner as target, policy_of(engine, model, target, folder / "policy"):
        yield target


@asynccontextmanager
async def policy_of(engine: PolicyEngine, model: Path, target: Target, folder: Path) -> AsyncIterator[None]:
    """A policy server on the session's engine, for a learner."""
    from qerld_service.policy import running_policy
    from qerld_service.settings import PolicySettings
    from support.policy import policy_values

    values = policy_values(model, int(target.address.rpartition(":")[2]), folder) | {"reconnect_seconds": 0.2}
    async with running_policy(PolicySettings(**values), engine):
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def learner_target(
    tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Target]:
    async with serving_learner(tiny_model[1], tmp_path_factory.mktemp("client-learner")) as target:
        yield target


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(learner_target: Target) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(learner_target.address) as opened:
        yield opened
