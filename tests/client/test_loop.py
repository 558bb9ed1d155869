"""The reward author's loop with everything real: vLLM, gRPC both ways, the trainer, and the metrics that it moves."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from qerld_client import (
    AdaptiveNoise,
    AsyncClient,
    Client,
    LoraConfig,
    NoiseSchedule,
    Optimizer,
    Rollout,
    RunConfig,
    RunState,
    Task,
)
from qerld_learner.metrics import STEP_GAUGES

from .conftest import Target, loop_of

if TYPE_CHECKING:
    from qerld_service.engine import PolicyEngine

pytestmark = pytest.mark.engine
STEPS = 3


def config() -> RunConfig:
    return RunConfig(
        lora=LoraConfig(rank=8),
        optimizer=Optimizer(learning_rate=1e-3),
        noise=AdaptiveNoise(
            schedule=NoiseSchedule.NOISE_SCHEDULE_EXPONENTIAL, sigma_start=1e-2, sigma_end=1e-3, stages=2, relative=True
        ),
        group_size=4,
        groups_per_step=2,
        max_tokens=6,
        max_steps=STEPS,
    )


def reward(rollout: Rollout) -> float:
    """Prefer small token ids: almost every group has different rewards."""
    return -sum(rollout.completion.ids) / (512.0 * len(rollout.completion.ids))


def tasks() -> list[Task]:
    return [Task([{"role": "user", "content": f"question {i}"}], {"number": str(i)}) for i in range(200)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def trained(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Target]:
    """A service whose runs train to their end."""
    async with loop_of(engine, tiny_model[1], tmp_path_factory.mktemp("trained")) as target:
        yield target


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sampled(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncClient]:
    """A client of a service with one open run, "open"."""
    folder = tmp_path_factory.mktemp("sampled")
    async with loop_of(engine, tiny_model[1], folder) as target, AsyncClient(target.address) as client:
        await client.create_run("open", config())
        yield client


async def test_the_async_loop_trains_and_moves_every_metric(trained: Target) -> None:
    run = "asyncio"
    async with AsyncClient(trained.address) as client, asyncio.timeout(240):
        await client.create_run(run, config())
        reports = [report async for report in client.train(run, tasks(), reward, concurrency=4)]
    assert [report.step for report in reports] == [1, 2, 3]
    assert reports[-1].state == RunState.RUN_STATE_COMPLETED
    assert all(report.metrics["logprob_gap"] < 1e-3 for report in reports)
    page = await asyncio.to_thread(_scrape, trained.metrics_port)
    for name in STEP_GAUGES:
        assert f'qerld_{name}{{run="{run}"}}' in page, name
    assert page[f'qerld_steps_total{{run="{run}"}}'] == STEPS
    assert page[f'qerld_sigma{{run="{run}"}}'] > 0
    assert page[f'qerld_swap_seconds_count{{run="{run}"}}'] >= STEPS
    assert page[f'qerld_canaries_total{{result="passed",run="{run}"}}'] == STEPS
    assert page[f'qerld_canary_failures_total{{run="{run}"}}'] == 0
    for name in ("trained_tokens_total", "computed_tokens_total", "sampled_tokens_total"):
        assert page[f'qerld_{name}{{run="{run}"}}'] > 0, name
    assert sum(value for key, value in page.items() if "qerld_rollouts_total" in key and run in key) >= 8 * STEPS
    phases = {key for key in page if key.startswith("qerld_step_phase_seconds_sum") and run in key}
    assert len(phases) >= 4
    # Gauges of state are read once a second, and a server that loads the last version is not serving for a moment.
    async with asyncio.timeout(60):
        while page['qerld_replicas{state="serving"}'] != 1:
            await asyncio.sleep(0.2)
            page = await asyncio.to_thread(_scrape, trained.metrics_port)


def _scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_the_sync_loop_trains(trained: Target) -> None:
    def loop() -> list[int]:
        with Client(trained.address) as sync:
            sync.create_run("threads", config())
            return [report.step for report in sync.train("threads", tasks(), reward, concurrency=3)]

    async with asyncio.timeout(240):
        assert await asyncio.to_thread(loop) == [1, 2, 3]


async def test_the_loop_ends_with_its_tasks(sampled: AsyncClient) -> None:
    seen: list[str] = []

    def broken(rollout: Rollout) -> float:
        seen.append(rollout.labels["number"])
        raise ValueError("no scorer")

    async with asyncio.timeout(120):
        assert [report async for report in sampled.train("open", tasks()[:3], broken)] == []
    assert sorted(seen) == sorted(["0", "1", "2"] * 4)


async def test_deltas_add_up_to_the_finished_rollout(sampled: AsyncClient) -> None:
    grown: dict[str, list[int]] = {}
    finished: dict[str, Rollout] = {}
    async for event in sampled.sample_stream("open", "hello", labels={"a": "b"}, timeout=60):
        if event.HasField("delta"):
            ids = grown.setdefault(event.delta.rollout_id, [])
            ids[event.delta.begin :] = list(event.delta.tokens.ids)
        elif event.HasField("finished"):
            finished[event.finished.rollout_id] = event.finished
    assert len(finished) == 4
    assert {key: list(rollout.completion.ids) for key, rollout in finished.items()} == grown


async def test_a_client_that_vanishes_loses_nothing(sampled: AsyncClient) -> None:
    events = sampled.sample_stream("open", "hello", timeout=60)
    opened = (await anext(events)).opened
    await events.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        for rollout_id in opened.rollout_ids:
            while not (await sampled.get_rollout(rollout_id)).completion.ids:  # noqa: ASYNC110 - over the wire
                await asyncio.sleep(0.05)
