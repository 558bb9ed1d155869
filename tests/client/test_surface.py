"""Every RPC is in both clients, and importing the client needs no heavy package."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap

import pytest
from qerld.v1 import policy_pb2, replica_pb2, reward_pb2, rollout_pb2, run_pb2
from qerld_client import AsyncClient, Client

PUBLIC = (
    rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    reward_pb2.DESCRIPTOR.services_by_name["RewardService"],
    policy_pb2.DESCRIPTOR.services_by_name["PolicyService"],
    run_pb2.DESCRIPTOR.services_by_name["RunService"],
)
INTERNAL = {"ReplicaService", "PolicyReplicaService"}
"""Between the learner and its policy servers; not for clients."""


def snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


RPCS = [snake(method.name) for service in PUBLIC for method in service.methods]


def test_every_service_is_public_or_internal() -> None:
    modules = (rollout_pb2, reward_pb2, policy_pb2, run_pb2, replica_pb2)
    names = {name for module in modules for name in module.DESCRIPTOR.services_by_name}
    assert names == {service.name for service in PUBLIC} | INTERNAL


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_every_rpc_is_in_the_client(client: type, rpc: str) -> None:
    assert callable(getattr(client, rpc, None)), f"{client.__name__} lacks {rpc}"


@pytest.mark.parametrize("rpc", RPCS)
def test_both_clients_take_the_same_arguments(rpc: str) -> None:
    ours = inspect.signature(getattr(Client, rpc)).parameters
    theirs = inspect.signature(getattr(AsyncClient, rpc)).parameters
    # Threads are the sync worker's own; coroutines need none.
    assert [name for name in ours if name != "threads"] == list(theirs)
    assert [p.default for name, p in ours.items() if name != "threads"] == [p.default for p in theirs.values()]


BLOCKED = ("torch", "vllm", "transformers", "pydantic", "sqlalchemy", "numpy", "qerld_learner", "qerld_service")


def test_the_client_imports_without_the_heavy_packages() -> None:
    program = f"""
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {BLOCKED!r}:
                    raise ImportError(f"{{name}} is blocked")
                return None

        sys.meta_path.insert(0, Block())
        import qerld_client
        with qerld_client.Client("127.0.0.1:1") as client:
            print(type(client).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Client\n"), done.stderr
