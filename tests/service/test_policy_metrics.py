"""The policy server's metrics, scraped after known events; every series that it defines is among those asserted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from qerld.v1 import replica_pb2_grpc
from qerld_service.engine import PolicyEngine
from qerld_service.metrics import PolicyMetrics
from qerld_service.policy import RunningPolicy, running_policy
from support.peer_learner import PeerLearner
from support.policy import (
    SLOTS,
    WEIGHTS,
    begin,
    collect,
    failed,
    reconciled,
    refused,
    request,
    sample,
    score,
    scrape,
    settings_for,
)
from support.tiny import make_adapter

pytestmark = pytest.mark.engine

RUN = "secret-run"
P = "qerld_policy_"


def values(text: str, series: Any) -> dict[str, float]:
    return {name: sample(text, P + name) for name in series}


async def test_the_life_of_a_version_in_numbers(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", 1, 0.5)
    begun = time.monotonic()
    await peer.desire(RUN, 7, folder, sigma=0.05)
    await peer.report(reconciled)
    loading = time.monotonic() - begun
    text = await scrape(policy)
    served = {
        "engine_up": 1,
        "attached": 1,
        "attach_failures_total": 0,
        "reconciled": 1,
        "desired_versions": 1,
        "serving_versions": 1,
        "slots": SLOTS,
        "slots_used": 2,
        "adapter_loads_total": 1,
        "adapter_unloads_total": 0,
        "swap_seconds_count": 1,
        "download_bytes_total": sum(path.stat().st_size for path in folder.iterdir()),
    }
    assert values(text, served) == served
    assert 0 < sample(text, P + "swap_seconds_sum") < loading
    assert sample(text, P + "noise_ratio") == pytest.approx(1, abs=0.05)
    assert "vllm:num_requests_running" in text

    begun = time.monotonic()
    running = await begin(stub, request(7, run=RUN, count=4, max_tokens=200))
    text = await scrape(policy)
    assert not running.done()
    assert sample(text, P + 'requests_in_flight{method="Generate"}') == 1
    tokens = sum(len(ids) for ids, _ in await running)
    [(ids, _)] = await collect(stub, request(7, run=RUN))
    await score(stub, 7, [ids], run=RUN)
    await refused(collect(stub, request(9, run=RUN)))
    calls = {
        'requests_in_flight{method="Generate"}': 0,
        'requests_total{code="OK",method="Generate"}': 2,
        'requests_total{code="FAILED_PRECONDITION",method="Generate"}': 1,
        'requests_total{code="OK",method="Score"}': 1,
        'request_seconds_count{method="Generate"}': 3,
        'request_seconds_count{method="Score"}': 1,
        'generated_tokens_total{method="Generate"}': tokens + len(ids),
        "scored_tokens_total": len(ids),
    }
    text = await scrape(policy)
    assert values(text, calls) == calls
    assert 0 < sample(text, P + 'request_seconds_sum{method="Generate"}') < time.monotonic() - begun

    await peer.drop(RUN, 7)
    await peer.report(lambda report: report.reconciled and not report.adapters)
    gone = {"desired_versions": 0, "serving_versions": 0, "slots_used": 0, "adapter_unloads_total": 1}
    text = await scrape(policy)
    assert values(text, gone) == gone
    assert RUN not in text


async def test_what_cannot_be_loaded_is_counted_by_reason(
    policy: RunningPolicy, peer: PeerLearner, tmp_path: Path
) -> None:
    peer.tamper = lambda file, offset, data: data[:-1] + b"\0" if file == WEIGHTS and offset == 0 else data
    await peer.desire("p", 1, make_adapter(tmp_path / "1", 1, 0.5), sigma=0.05)
    await peer.report(failed(1))
    peer.tamper = None
    await peer.report(reconciled)
    bad = make_adapter(tmp_path / "2", 2, 0.5)
    weights = (bad / WEIGHTS).read_bytes()
    (bad / WEIGHTS).write_bytes(weights[:-100])
    await peer.desire("p", 2, bad, live=False)
    await peer.report(failed(2))
    await peer.drop("p", 2)
    for version in (3, 4, 5):
        await peer.desire("p", version, make_adapter(tmp_path / str(version), version, 0.5), sigma=0.05, live=False)
    # Two of six slots a version: one of the four has none.
    await peer.report(lambda r: [a.error[:5] for a in r.adapters if not a.serving] == ["slots"])
    await peer.desire("p", 6, make_adapter(tmp_path / "6", 6, 0.5), sigma=float("nan"), live=False)
    await peer.report(failed(6))
    text = await scrape(policy)
    assert sample(text, P + 'adapter_load_failures_total{reason="download"}') >= 1
    assert sample(text, P + 'adapter_load_failures_total{reason="adapter"}') == 1
    assert sample(text, P + 'adapter_load_failures_total{reason="slots"}') == 1
    assert sample(text, P + 'adapter_load_failures_total{reason="noise"}') == 1
    assert sample(text, P + "reconciled") == 0
    assert sample(text, P + "slots_used") == SLOTS


async def test_a_learner_that_leaves_is_counted(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    peer = PeerLearner()
    async with contextlib.AsyncExitStack() as stack:
        serving = peer.serving()
        port = await serving.__aenter__()
        settings = settings_for(tiny_model[1], port, tmp_path / "cache")
        policy = await stack.enter_async_context(running_policy(settings, engine))
        await peer.report(reconciled)
        assert sample(await scrape(policy), P + "attached") == 1
        await serving.__aexit__(None, None, None)
        async with asyncio.timeout(60):
            while sample(text := await scrape(policy), P + "attached"):  # noqa: ASYNC110 - over the wire
                await asyncio.sleep(0.05)
        assert sample(text, P + "attach_failures_total") >= 1
        # What it serves, it serves on.
        async with grpc.aio.insecure_channel(policy.hello.endpoint) as channel:
            code, _ = await refused(collect(replica_pb2_grpc.PolicyReplicaServiceStub(channel), request(1)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION


def test_every_series_is_asserted_here() -> None:
    source = Path(__file__).read_text()
    families = [family.name.removeprefix(P) for family in PolicyMetrics().registry.collect()]
    assert len(families) > 15
    assert [name for name in families if f"{name}" not in source] == []
