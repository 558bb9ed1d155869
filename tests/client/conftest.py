"""The client against a real learner in process, and against the whole loop with a real policy server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def learner_target(
    tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Target]:
    settings = LearnerSettings(
        model=tiny_model[1],
        state_dir=tmp_path_factory.mktemp("client-learner"),
        port=0,
        metrics_port=0,
        device="cpu",
        dtype="float32",
        trainer_threads=1,
        stop_grace=0.2,
    )
    async with running_learner(settings) as ports:
        yield Target(f"127.0.0.1:{ports.port}", ports.metrics_port)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(learner_target: Target) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(learner_target.address) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def policy_server(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], learner_target: Target, tmp_path: Path
) -> AsyncIterator[None]:
    """A policy server on the session's engine, attached for one test."""
    from qerld_service.policy import running_policy
    from qerld_service.settings import PolicySettings

    settings = PolicySettings(
        model=tiny_model[1],
        learner=learner_target.address,
        port=0,
        openai_port=0,
        metrics_port=0,
        cache_dir=tmp_path,
        dtype="float32",
        max_loras=6,
        max_lora_rank=8,
        max_model_len=256,
        report_seconds=0.5,
        reconnect_seconds=0.2,
        drain_seconds=1,
    )
    async with running_policy(settings, engine):
        yield
