"""The session's engine with nothing loaded; a policy server on it, attached to a learner's end of the protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from qerld.v1 import replica_pb2_grpc
from qerld_service.engine import PolicyEngine
from qerld_service.policy import RunningPolicy, running_policy
from support.peer_learner import PeerLearner
from support.policy import reconciled, settings_for
from support.tiny import make_adapter


@pytest.fixture
async def peer() -> PeerLearner:
    return PeerLearner()


@pytest.fixture
async def policy(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], peer: PeerLearner, tmp_path: Path
) -> AsyncIterator[RunningPolicy]:
    async with (
        peer.serving() as port,
        running_policy(settings_for(tiny_model[1], port, tmp_path / "cache"), engine) as running,
    ):
        yield running


@pytest.fixture
async def live(policy: RunningPolicy, peer: PeerLearner, tmp_path: Path) -> RunningPolicy:
    """The policy server with version 4 of the run "agent" live, with noise."""
    await peer.desire("agent", 4, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05)
    await peer.report(reconciled)
    return policy


@pytest.fixture
async def stub(policy: RunningPolicy) -> AsyncIterator[replica_pb2_grpc.PolicyReplicaServiceAsyncStub]:
    async with grpc.aio.insecure_channel(policy.hello.endpoint) as channel:
        yield replica_pb2_grpc.PolicyReplicaServiceStub(channel)


@pytest.fixture
async def http(policy: RunningPolicy) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{policy.openai_port}", timeout=60) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def fresh(engine: PolicyEngine) -> AsyncIterator[PolicyEngine]:
    """The shared engine; what the test left loaded is unloaded."""
    yield engine
    for key in engine.loaded:
        await engine.unload(key)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), seed=seed, scale=0.1) for seed in range(3)]
