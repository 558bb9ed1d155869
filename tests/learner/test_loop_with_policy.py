"""The whole loop in process: real gRPC both ways, real vLLM, real trainer; nothing is faked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from qerld_learner.api.server import running_server
from qerld_learner.core import Learner
from qerld_learner.errors import NotFoundError
from qerld_learner.metrics import LearnerMetrics
from qerld_learner.records import (
    FinishReason,
    GroupOpened,
    PromptSpec,
    ReceiptState,
    RolloutFinished,
    RolloutRecord,
    RunState,
    SamplingSpec,
    SegmentSpec,
    StepReport,
    TokenDelta,
    TrajectorySpec,
    VersionState,
)
from qerld_learner.settings import LearnerSettings
from qerld_service.engine import PolicyEngine
from support.policy import until as soon

from .conftest import (
    PROMPT_IDS,
    imported,
    new_id,
    new_run,
    options_for,
    prompt,
    reward,
    trajectory,
    until,
)
from .looping import Loop, train

pytestmark = pytest.mark.engine
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def loop(engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Loop]:
    metrics = LearnerMetrics()
    learner = await Learner.open(options_for(tmp_path / "state", tiny_model[1], admission_timeout=60.0), metrics)
    settings = LearnerSettings(model=tiny_model[1], port=0, metrics_port=0)
    async with running_server(learner, settings, metrics) as port:
        yield Loop(learner, port, tiny_model[1], engine, tmp_path, metrics)
    await learner.close()


async def test_versions_go_live_and_every_token_knows_its_version(loop: Loop) -> None:
    learner = loop.learner
    noise = {"noise_schedule": "exponential", "sigma_start": 0.05, "sigma_end": 0.01, "noise_stages": 3}
    run = await new_run(learner, **noise, schedule_steps=3, max_steps=3)
    async with loop.policy(), loop.health_of_sampling() as health:
        reports = await train(learner, run, 3)
        await soon(lambda: SERVING in health)  # it looks every few seconds, and three steps may take less
    # Not serving before the server had loaded version 0; then serving, across three swaps.
    assert health in ([NOT_SERVING, SERVING], [SERVING])
    assert [(report.step, report.version) for report in reports] == [(1, 1), (2, 2), (3, 3)]
    assert [report.metrics["sigma"] for report in reports] == [0.0, 0.05, pytest.approx(0.01)]
    assert all(report.metrics["logprob_gap"] < 1e-3 for report in reports)
    assert all(report.metrics["behaviour_gap"] < 1e-3 for report in reports)
    assert all(report.metrics["lag_max"] <= 2 for report in reports)
    record = await learner.get_run(run)
    assert (record.state, record.live_version) == (RunState.COMPLETED, 3)
    versions, _ = await learner.list_versions(run, 0, "")
    assert [v.state for v in versions] == [VersionState.LIVE, *[VersionState.RETIRED] * 3]
    trained = [group for group in (await learner.list_groups(run, None, 0, ""))[0] if group.state == "trained"]
    assert len(trained) == 6
    for group in trained:
        for rollout_id in group.rollout_ids:
            rollout = await learner.get_rollout(rollout_id)
            assert rollout.spans[0].begin == 0
            assert rollout.spans[-1].end == len(rollout.completion_ids) == len(rollout.logprobs)
            noise_of_version = {v.version: v.noise for v in versions}[rollout.spans[0].version]
            assert rollout.spans[0].noise.sigma == pytest.approx(noise_of_version.sigma)


async def test_sigma_and_the_learning_rate_go_by_the_learners_step_through_epochs_and_restarts(
    tiny_model: tuple[Path, Path], engine: PolicyEngine, tmp_path: Path
) -> None:
    """Several passes over a batch are one step, and a learner that starts again goes on where it was.

    With the paper's rounding, and the noisy policy as π_old: the trainer's noise of a version is the server's.
    """
    noise = {"noise_schedule": "linear", "sigma_start": 0.08, "sigma_end": 0.02, "noise_stages": 3}
    more = {"noise_dtype": "bfloat16", "old_policy": "trainer_noisy", "epochs": 2, "mini_batches": 2}
    rates = {"learning_rate": 1e-3, "lr_schedule": "linear", "warmup_steps": 2}
    options = options_for(tmp_path / "state", tiny_model[1], admission_timeout=60.0)
    settings, run, reports = LearnerSettings(model=tiny_model[1], port=0, metrics_port=0), "", list[StepReport]()
    for until_step in (2, 5):
        metrics = LearnerMetrics()
        learner = await Learner.open(options, metrics)
        async with running_server(learner, settings, metrics) as port:
            run = run or await new_run(learner, **noise, **more, **rates, schedule_steps=6, max_lag=1)
            loop = Loop(learner, port, tiny_model[1], engine, tmp_path / f"loop-{until_step}", metrics)
            async with loop.policy():
                reports += await train(learner, run, until_step - len(reports), after=len(reports))
            versions, _ = await learner.list_versions(run, 0, "")
        await learner.close()
    assert [report.metrics["sigma"] for report in reports] == [0.0, 0.0, 0.08, 0.08, pytest.approx(0.02)]
    assert [report.metrics["lr"] for report in reports] == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4])
    served = {v.step: v.noise.sigma for v in versions}  # and perhaps one version more: the feeder does not count
    assert [served[report.step] for report in reports] == [report.metrics["sigma"] for report in reports]
    assert {v.noise.dtype for v in versions} == {"bfloat16"}
    assert all(report.metrics["updates"] == 4 for report in reports)
    assert all(report.metrics["behaviour_gap"] < 1e-3 for report in reports)


async def one_turn(learner: Learner, run: str, ids: tuple[int, ...]) -> RolloutRecord:
    """One completion of the live version at temperature 0.8; its group never gets a reward."""
    wanted = PromptSpec(ids, 2, SamplingSpec(temperature=0.8, max_tokens=6, seed=len(ids)))
    return (await _all(learner, run, wanted))[0]


async def several_turns(learner: Learner, run: str, tool_output: tuple[int, ...]) -> TrajectorySpec:
    """What an agent does: the policy speaks, a tool answers, the policy goes on; each turn with its own numbers."""
    first = await one_turn(learner, run, PROMPT_IDS)
    second = await one_turn(learner, run, (*PROMPT_IDS, *first.completion_ids, *tool_output))
    turns = [
        SegmentSpec(turn.completion_ids, turn.logprobs, trainable=True, version=turn.spans[0].version)
        for turn in (first, second)
    ]
    environment = SegmentSpec(tool_output, (), trainable=False, version=0)
    return TrajectorySpec((turns[0], environment, turns[1], environment), FinishReason.STOP)


async def test_the_trainer_agrees_with_the_noisy_server_on_several_turns(loop: Loop) -> None:
    """A multi-turn rollout, sampled turn by turn under noise: only its own tokens are compared, trained and counted."""
    learner = loop.learner
    noise = {"noise_schedule": "exponential", "sigma_start": 0.05, "sigma_end": 0.05, "noise_stages": 2}
    run = await new_run(learner, **noise, schedule_steps=2, groups_per_step=1, max_lag=4, temperature=0.8)

    async def step(trajectories: list[TrajectorySpec], number: int) -> StepReport:
        group = await learner.import_group(run, new_id(), "h", prompt(2), trajectories)
        await learner.submit_outcomes(run, new_id(), "h", [reward(i, n) for n, i in enumerate(group.rollout_ids)])
        async with asyncio.timeout(120):
            return await anext(learner.watch_reports(run, number - 1))

    async with loop.policy():
        foreign = [await step([trajectory(11), trajectory(12)], number) for number in (1, 2)]
        made = [await several_turns(learner, run, (40 + i, 50, 60)) for i in range(2)]
        report = await step(made, 3)
    assert {segment.version for one in made for segment in one.segments if segment.trainable} == {2}
    assert [r.metrics["sigma"] for r in (*foreign, report)] == [0.0, 0.05, 0.05]
    assert report.metrics["behaviour_gap"] < 1e-3
    assert report.metrics["logprob_gap"] < 1e-3
    # The loss is taken without noise, so the trainer's step saw what the noise did.
    assert report.metrics["logprob_abs_diff"] > 10 * report.metrics["behaviour_gap"]
    # Log-probabilities that nobody's sampler gave do not pass for the server's.
    assert foreign[0].metrics["behaviour_gap"] > 0.1
    policy_tokens = sum(len(s.ids) for one in made for s in one.segments if s.trainable)
    assert report.metrics["tokens"] == report.metrics["completion_tokens"] == policy_tokens


async def test_folders_of_old_versions_are_collected(
    tiny_model: tuple[Path, Path], engine: PolicyEngine, tmp_path: Path
) -> None:
    options = options_for(tmp_path / "state", tiny_model[1], admission_timeout=60.0, keep_versions=1)
    metrics = LearnerMetrics()
    learner = await Learner.open(options, metrics)
    settings = LearnerSettings(model=tiny_model[1], port=0, metrics_port=0)
    async with running_server(learner, settings, metrics) as port:
        loop = Loop(learner, port, tiny_model[1], engine, tmp_path, metrics)
        run = await new_run(learner, max_lag=1, groups_per_step=1, max_steps=4)
        # Never rewarded, and beyond the lag as soon as version 2 is live.
        late = await imported(learner, run)
        async with loop.policy():
            await train(learner, run, 4)

            async def collected() -> bool:
                found = {path.name for path in (tmp_path / "state" / "versions" / run).iterdir()}
                return found == {"00000003", "00000004"}  # the newest, and what is within the lag

            await until(collected)
        assert (await learner.receipt(late.rollout_ids[0])).state is ReceiptState.DROPPED_STALE
        assert loop.metric("groups_total", run=run, how="dropped_stale") >= 1
        with pytest.raises(NotFoundError, match="was collected"):
            await learner.adapter_file(run, 2, "adapter_model.safetensors")
        path, _ = await learner.adapter_file(run, 3, "adapter_model.safetensors")
        assert path.is_file()
        # The versions stay known: every token that they made names one.
        assert [v.version for v in (await learner.list_versions(run, 0, ""))[0]] == [4, 3, 2, 1, 0]
    await learner.close()


async def test_sample_streams_replays_and_needs_no_client(loop: Loop) -> None:
    learner = loop.learner
    run = await new_run(learner)
    async with loop.policy():
        request_id = new_id()
        events = learner.sample(run, request_id, "hash", prompt())
        opened = await anext(events)
        assert isinstance(opened, GroupOpened)
        await events.aclose()  # type: ignore[attr-defined]
        again = [event async for event in learner.sample(run, request_id, "hash", prompt())]
        assert again[0] == opened
        finished = {e.rollout.index: e.rollout for e in again if isinstance(e, RolloutFinished)}
        assert sorted(finished) == [0, 1, 2, 3]
        for index, rollout in finished.items():
            deltas = [e for e in again if isinstance(e, TokenDelta) and e.index == index]
            shown = tuple(token for delta in deltas for token in delta.ids)
            assert shown in ((), rollout.completion_ids)
        stored = [event async for event in learner.sample(run, request_id, "hash", prompt())]
        # Only the deadline may differ: it is the group's, known when the last rollout has finished.
        kept = [replace(e.rollout, reward_deadline=None) for e in stored if isinstance(e, RolloutFinished)]
        assert kept == [replace(finished[index], reward_deadline=None) for index in range(4)]


async def test_rollouts_wait_for_a_server_and_go_on_with_the_next_one(loop: Loop) -> None:
    learner = loop.learner
    run = await new_run(learner, max_tokens=200)
    long = prompt(max_tokens=200)

    async def sampling() -> bool:
        return any(info.in_flight for info in learner.replicas())

    async def said() -> bool:
        (status,) = await learner.statuses()
        return "policy server" in status.waiting_for

    waiting = asyncio.create_task(_all(learner, run, long))
    await until(said)
    async with loop.policy():
        await until(sampling)
        # The server leaves in the middle of the rollouts: its drain of a second is too short for them, or just enough.
    async with loop.policy():
        rollouts = await asyncio.wait_for(waiting, 120)
    assert [len(r.completion_ids) > 0 for r in rollouts] == [True] * 4
    assert all(r.finish_reason is not None for r in rollouts)


async def _all(learner: Learner, run: str, wanted: object) -> list[RolloutRecord]:
    events = learner.sample(run, new_id(), "hash", wanted)  # type: ignore[arg-type]
    return [event.rollout async for event in events if isinstance(event, RolloutFinished)]


async def test_a_version_beyond_the_canary_goes_back(loop: Loop) -> None:
    """No version can be better than a tolerance of zero: each is reverted, and the second time in a row pauses."""
    learner = loop.learner
    run = await new_run(learner, canary_tolerance=0.0, max_lag=3)

    async def paused() -> bool:
        return (await learner.get_run(run)).state is RunState.PAUSED

    async with loop.policy():
        (report,) = await train(learner, run, 1)
        assert report.metrics["reverted"] == 1.0
        await until(paused)
    versions, _ = await learner.list_versions(run, 0, "")
    first = next(v for v in versions if v.version == 1)
    again = next(v for v in versions if v.version == 2)
    assert first.state is VersionState.REVERTED
    assert (again.parent, again.step) == (0, 0)
    live = await learner.get_version(run)
    assert live.version == 0
    assert again.adapter_sha256 == live.adapter_sha256
    reverted = [g for g in (await learner.list_groups(run, None, 0, ""))[0] if g.state == "reverted"]
    assert len(reverted) == 2
    receipt = await learner.receipt(reverted[0].rollout_ids[0])
    assert receipt.state is ReceiptState.REVERTED
    assert loop.metric("groups_total", run=run, how="reverted") == 2
    assert loop.metric("canaries_total", run=run, result="failed") == 2
    assert loop.metric("canary_failures_total", run=run) == 2
    assert loop.metric("reverted_total", run=run) == 1
    assert loop.metric("canary_gap", run=run) > 0
    assert loop.metric("steps_total", run=run) == 1
    assert loop.metric("live_version", run=run) == 0
