"""The reward author's loop with everything real: vLLM, gRPC both ways, the trainer, and the metrics that it moves."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from qerld.v1.rollout_pb2 import GroupState
from qerld_client import (
    AdaptiveNoise,
    AsyncClient,
    Client,
    FinishReason,
    LoraConfig,
    NoiseSchedule,
    Optimizer,
    QerldError,
    Rollout,
    RunConfig,
    RunState,
    Task,
)
from qerld_learner.metrics import REPLICA_STATES, STEP_GAUGES, LearnerMetrics
from qerld_service import watch
from rich.console import Console

from .conftest import Target, loop_of

if TYPE_CHECKING:
    from qerld_service.engine import PolicyEngine

pytestmark = pytest.mark.engine
STEPS = 3
BUFFERED = ("queued", "sampling", "awaiting_rewards", "ready", "batched")
PHASES = ("sample_wait", "load", "pack", "forward", "backward", "optimizer", "commit", "promote")


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


@dataclass
class Ledger:
    """What the API says of a run: what its metrics must add up to."""

    states: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    sampled_tokens: int = 0
    outcomes: int = 0
    trained: dict[int, list[Rollout]] = field(default_factory=dict)

    def counts(self, run: str) -> dict[str, float]:
        """Series and values of the metrics that the API's answers determine."""
        found = {f'qerld_buffer_groups{{run="{run}",state="{state}"}}': self.states[state] for state in BUFFERED}
        for reason, count in self.reasons.items():
            found[f'qerld_rollouts_total{{finish_reason="{reason}",run="{run}"}}'] = count
        found[f'qerld_sampled_tokens_total{{run="{run}"}}'] = self.sampled_tokens
        found[f'qerld_groups_total{{how="trained",run="{run}"}}'] = self.states["trained"]
        return found


async def ledger_of(client: AsyncClient, run: str) -> Ledger:
    ledger = Ledger()
    async for group in client.list_groups(run):
        ledger.states[GroupState.Name(group.state).removeprefix("GROUP_STATE_").lower()] += 1
        ledger.outcomes += group.outcomes
        for rollout_id in group.rollout_ids:
            rollout = await client.get_rollout(rollout_id)
            ledger.sampled_tokens += len(rollout.completion.ids)
            ledger.reasons[FinishReason.Name(rollout.finish_reason).removeprefix("FINISH_REASON_").lower()] += 1
            if step := (await client.get_receipt(rollout_id)).step:
                ledger.trained.setdefault(step, []).append(rollout)
    return ledger


async def settled(client: AsyncClient, run: str, port: int) -> tuple[Ledger, dict[str, float]]:
    """The ledger and the metrics once nothing moves any more: a request of the loop's end may still be on its way."""
    end = time.monotonic() + 60
    while True:
        ledger, page = await ledger_of(client, run), await asyncio.to_thread(_scrape, port)
        expected = {**ledger.counts(run), 'qerld_replicas{state="serving"}': 1}
        found = {series: page.get(series) for series in expected}
        if found == expected and not ledger.states["sampling"]:
            return ledger, page
        differing = {series: (found[series], expected[series]) for series in expected}
        assert time.monotonic() < end, {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
        await asyncio.sleep(0.2)


async def test_every_metric_of_a_run_says_what_happened(trained: Target) -> None:
    run = "asyncio"
    async with AsyncClient(trained.address) as client, asyncio.timeout(280):
        before = await asyncio.to_thread(_scrape, trained.metrics_port)
        begun = time.monotonic()
        await client.create_run(run, config())
        reports = [report async for report in client.train(run, tasks(), reward, concurrency=4)]
        took = time.monotonic() - begun
        ledger, page = await settled(client, run, trained.metrics_port)
        live = await client.get_policy(run)
        for once in (True, False):
            await asyncio.to_thread(watch_until_shown, trained.address, run, once)
        await client.delete_run(run)  # its slots are for the other tests' runs
    assert [report.step for report in reports] == [1, 2, 3]
    assert reports[-1].state == RunState.RUN_STATE_COMPLETED
    assert all(report.metrics["logprob_gap"] < 1e-3 for report in reports)

    def value(name: str, **labels: str) -> float:
        inside = ",".join(f'{key}="{text}"' for key, text in sorted({"run": run, **labels}.items()))
        return page[f"qerld_{name}{{{inside}}}"]

    # The gauges of a step are those of its report, and the report is right about what can be worked out here.
    last = reports[-1].metrics
    assert {name: value(name) for name in STEP_GAUGES} == {name: last[name] for name in STEP_GAUGES}
    rewards = [reward(rollout) for rollout in ledger.trained[STEPS]]
    assert value("reward_mean") == pytest.approx(fmean(rewards), rel=1e-5)
    assert value("reward_std") == pytest.approx(pstdev(rewards), rel=1e-5)
    assert value("sigma") == live.noise.sigma == pytest.approx(1e-2)  # of two stages the first is clean
    lags = [STEPS - 1 - span.version for rollout in ledger.trained[STEPS] for span in rollout.spans]
    assert (value("lag_mean"), value("lag_max")) == (fmean(lags), max(lags))
    assert 0 < value("entropy") <= math.log(512)
    assert value("ratio_mean") == pytest.approx(1, abs=0.2)
    assert value("clipped_share") == 0  # idle under truncated importance sampling
    assert value("mismatch_kl") > 0  # sampled under noise, trained without
    assert value("logprob_gap") == value("canary_gap")
    assert value("zero_variance_share") == 0
    # Counters add up over the steps.
    rollouts = [rollout for step in ledger.trained.values() for rollout in step]
    assert value("steps_total") == STEPS
    assert value("trained_tokens_total") == sum(len(rollout.completion.ids) for rollout in rollouts)
    computed = [report.metrics["tokens_computed"] for report in reports]
    assert value("computed_tokens_total") == sum(computed) < 4 * value("trained_tokens_total")
    assert value("sampled_tokens_total") >= value("trained_tokens_total")
    # Outcomes of groups that are stale by then are accepted, too, and a ready group may get stale.
    assert value("outcomes_total", answer="accepted") >= ledger.outcomes >= value("groups_total", how="ready") * 4
    ready = ledger.states["trained"] + ledger.states["ready"]
    assert ready <= value("groups_total", how="ready") <= ready + ledger.states["dropped"]
    assert value("groups_total", how="trained") == 2 * STEPS
    # Seconds by phase, none of which overlap, and of swaps.
    assert {phase for report in reports for phase in report.phase_seconds} == set(PHASES)
    assert sum(sum(report.phase_seconds.values()) for report in reports) <= took
    for phase in PHASES:
        seconds = [report.phase_seconds[phase] for report in reports]
        assert value("step_phase_seconds_count", phase=phase) == STEPS
        assert value("step_phase_seconds_sum", phase=phase) == pytest.approx(sum(seconds))
        assert min(seconds) >= 0
        assert sum(seconds) > 0
    assert value("swap_seconds_count") == STEPS
    assert value("swap_seconds_sum") == pytest.approx(value("step_phase_seconds_sum", phase="promote"))
    # Versions and canaries.
    assert value("live_version") == live.policy.version == STEPS
    assert value("canaries_total", result="passed") == STEPS
    assert (value("canary_failures_total"), value("reverted_total")) == (0, 0)
    # The buffer and the servers now.
    assert value("buffer_capacity_groups") == 2 * (2 + 1)
    assert [page[f'qerld_replicas{{state="{state}"}}'] for state in REPLICA_STATES] == [1, 0, 0, 0]
    assert page["qerld_trainer_deaths_total"] == 0
    # Store and RPCs: each mutation in some commit, each call under its method and code.
    assert page["qerld_store_mutations_total"] >= page["qerld_store_commit_seconds_count"] > STEPS
    assert page["qerld_store_commit_seconds_sum"] > 0
    labels = 'grpc_method="{}",grpc_service="qerld.v1.{}"'
    create = labels.format("CreateRun", "RunService")
    for series in (f'handled_total{{grpc_code="OK",{create}}}', f"handling_seconds_count{{{create}}}"):
        assert page[f"grpc_server_{series}"] == before.get(f"grpc_server_{series}", 0) + 1
    assert page[f"grpc_server_handling_seconds_sum{{{create}}}"] > 0
    submit = labels.format("SubmitRewards", "RewardService")
    assert page[f'grpc_server_handled_total{{grpc_code="OK",{submit}}}'] >= 2 * STEPS
    families = {family.name for family in LearnerMetrics().registry.collect()}
    ours = {name for name in families if name.startswith(("qerld_", "grpc_")) and not name.startswith("qerld_eval_")}
    assert {name for name in ours if not any(key.startswith(name) for key in page)} == set()


def watch_until_shown(address: str, run: str, once: bool) -> None:
    """`qerld watch` of a run that has ended: its curves come from the reports that are stored."""
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    assert isinstance(console.file, io.StringIO)
    client, end = Client(address), time.monotonic() + 60
    view = threading.Thread(target=watch_quietly, args=(client, run, once, console))
    view.start()
    while "mismatch KL" not in console.file.getvalue():
        assert view.is_alive() or "mismatch KL" in console.file.getvalue(), console.file.getvalue()
        assert time.monotonic() < end, console.file.getvalue()
        time.sleep(0.05)
    client.close()
    view.join(60)
    assert not view.is_alive()
    assert f"completed  step {STEPS} of {STEPS}" in console.file.getvalue()


def watch_quietly(client: Client, run: str, once: bool, console: Console) -> None:
    with contextlib.suppress(QerldError, ValueError):  # its client is closed
        watch.watch(client, run, once, console)


def _scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_the_sync_loop_trains(trained: Target) -> None:
    def loop() -> list[int]:
        with Client(trained.address) as sync:
            sync.create_run("threads", config())
            steps = [report.step for report in sync.train("threads", tasks(), reward, concurrency=3)]
            sync.delete_run("threads")
            return steps

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
