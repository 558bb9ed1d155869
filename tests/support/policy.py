"""What the tests of the policy server share: settings, requests, and readers of what it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from qerld.v1 import common_pb2, replica_pb2
from qerld_service.policy import RunningPolicy
from qerld_service.settings import PolicySettings

SLOTS = 6
PROMPT = [1, 40, 41, 42, 43, 44]
WEIGHTS = "adapter_model.safetensors"


def policy_values(model: Path, learner_port: int, cache: Path) -> dict[str, Any]:
    """Settings of a policy server on the tiny model, attached to a learner of this machine, on free ports."""
    return {
        "model": model,
        "learner": f"127.0.0.1:{learner_port}",
        "port": 0,
        "openai_port": 0,
        "metrics_port": 0,
        "reflection": True,
        "cache_dir": cache,
        "dtype": "float32",
        "max_loras": SLOTS,
        "max_lora_rank": 8,
        "max_model_len": 256,
        "report_seconds": 0.5,
        "reconnect_seconds": 0.5,
        "drain_seconds": 1.0,
    }


def settings_for(model: Path, learner_port: int, cache: Path) -> PolicySettings:
    return PolicySettings(**policy_values(model, learner_port, cache) | {"drain_seconds": 5.0})


def request(version: int, *, run: str = "p", count: int = 1, max_tokens: int = 12, **more: Any) -> Any:
    return replica_pb2.GenerateRequest(
        policy=common_pb2.Policy(run=run, version=version),
        request_id="test",
        prompt=common_pb2.TokenIds(ids=PROMPT),
        count=count,
        sampling=common_pb2.Sampling(temperature=1.0, max_tokens=max_tokens, seed=5),
        **more,
    )


Completions = list[tuple[list[int], list[float]]]


async def begin(stub: Any, wanted: Any) -> asyncio.Task[Completions]:
    """Start to collect; returns when the first tokens have come, or the call has ended without any."""
    first = asyncio.Event()
    running = asyncio.create_task(collect(stub, wanted, first))
    running.add_done_callback(lambda _: first.set())
    await first.wait()
    return running


async def collect(stub: Any, wanted: Any, first: asyncio.Event | None = None) -> Completions:
    """Ids and log-probabilities of each completion; checks that each ends once, with a reason."""
    ids: list[list[int]] = [[] for _ in range(wanted.count)]
    logprobs: list[list[float]] = [[] for _ in range(wanted.count)]
    finished = [0] * wanted.count
    async for part in stub.Generate(wanted, timeout=120):
        if first is not None:
            first.set()
        ids[part.index] += part.tokens.ids
        logprobs[part.index] += part.logprobs
        finished[part.index] += part.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED
    assert finished == [1] * wanted.count
    return list(zip(ids, logprobs, strict=True))


async def score(stub: Any, version: int, completions: list[list[int]], run: str = "p") -> list[list[float]]:
    items = [
        replica_pb2.ScoreItem(prompt=common_pb2.TokenIds(ids=PROMPT), completion=common_pb2.TokenIds(ids=ids))
        for ids in completions
    ]
    wanted = replica_pb2.ScoreRequest(policy=common_pb2.Policy(run=run, version=version), items=items)
    return [list(item.logprobs) for item in (await stub.Score(wanted, timeout=120)).items]


def reconciled(report: replica_pb2.ReplicaState) -> bool:
    return report.reconciled


def state_of(report: replica_pb2.ReplicaState, version: int, run: str = "p") -> replica_pb2.AdapterState:
    return next(a for a in report.adapters if (a.policy.run, a.policy.version) == (run, version))


def failed(version: int) -> Any:
    return lambda report: any(a.policy.version == version and a.error for a in report.adapters)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def scrape(policy: RunningPolicy) -> str:
    async with httpx.AsyncClient() as client:
        return (await client.get(f"http://127.0.0.1:{policy.metrics_port}/metrics")).text


def sample(text: str, series: str) -> float:
    """Value of a series in a scrape; 0 when nothing has made it yet."""
    values = dict(line.rpartition(" ")[::2] for line in text.splitlines())
    return float(values.get(series, 0))


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something that sends no event."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
