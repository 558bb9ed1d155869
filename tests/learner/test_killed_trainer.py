"""SIGKILL for the trainer in the middle of a step: the step is repeated from the last commit, with the same batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from qerld_learner import batches
from qerld_learner.api.server import running_server
from qerld_learner.core import Learner
from qerld_learner.loop import RunLoop
from qerld_learner.observer import Observer
from qerld_learner.records import FinishReason, SegmentSpec, TrajectorySpec, VersionState
from qerld_learner.settings import LearnerSettings
from qerld_learner.store import runs, schema, steps
from qerld_service.engine import PolicyEngine
from qerld_service.policy import running_policy
from sqlalchemy import Connection, select
from support.policy import settings_for

from .conftest import new_id, new_run, options_for, prompt, reward_all, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SIZE, LENGTH = 32, 150
BUSY_SECONDS = 0.1  # of the processor; the step of 64 rollouts, one a micro-batch, takes more than ten times that


class Deaths(Observer):
    count = 0

    def trainer_died(self) -> None:
        self.count += 1


def long_trajectories(number: int) -> list[TrajectorySpec]:
    ids = [tuple((11 * i + 7 * j + number) % 500 for j in range(LENGTH)) for i in range(SIZE)]
    segments = [SegmentSpec(one, (-1.0,) * LENGTH, trainable=True, version=0) for one in ids]
    return [TrajectorySpec((segment,), FinishReason.LENGTH) for segment in segments]


async def batch_row(learner: Learner, run: str, version: int) -> Mapping[str, Any] | None:
    batch = schema.batches.c
    query = select(schema.batches).where(batch.run == run, batch.version == version)
    return await learner._shared.store.read(lambda c: c.execute(query).mappings().one_or_none())


async def kill_amid_step(learner: Learner, run: str, version: int) -> Mapping[str, Any]:
    """Returns the batch that was in training when the trainer was killed."""

    async def batched() -> bool:
        return await batch_row(learner, run, version) is not None

    await until(batched)
    assert learner.trainer_pid is not None
    trainer = psutil.Process(learner.trainer_pid)
    before = trainer.cpu_times().user

    async def busy() -> bool:
        return trainer.cpu_times().user > before + BUSY_SECONDS

    await until(busy)
    trainer.kill()
    row = await batch_row(learner, run, version)
    assert row is not None
    assert row["state"] == steps.TRAINING
    return row


async def replayed(learner: Learner, row: Mapping[str, Any]) -> str:
    """SHA-256 of the adapter that the batch makes of its parent, undisturbed."""
    run, ids = row["run"], tuple(json.loads(row["group_ids"]))
    batch = steps.Batch(run, row["version"], row["parent"], row["step"], row["seed"], ids)

    def query(connection: Connection) -> tuple[Any, batches.BatchData]:
        return runs.find_run(connection, run), batches.load(connection, batch)

    record, data = await learner._shared.store.read(query)
    return (await RunLoop(learner._shared, run)._step(record, data, f"replay-{batch.version}")).adapter_sha256


async def test_a_killed_trainer_repeats_the_step_from_the_last_commit(
    tiny_model: tuple[Path, Path], engine: PolicyEngine, tmp_path: Path
) -> None:
    model, deaths = tiny_model[1], Deaths()
    learner = await Learner.open(options_for(tmp_path / "state", model, token_budget=1), deaths)
    run = await new_run(learner, max_steps=2, max_tokens=LENGTH)
    async with (
        running_server(learner, LearnerSettings(model=model, port=0, metrics_port=0)) as port,
        running_policy(settings_for(model, port, tmp_path / "cache"), engine),
    ):
        for step in (1, 2):
            for number in range(2):
                trajectories = long_trajectories(10 * step + number)
                group = await learner.import_group(run, new_id(), "h", prompt(SIZE), trajectories)
                await reward_all(learner, group, [0.0, 1.0] * (SIZE // 2))
            killed = await kill_amid_step(learner, run, step)
            report = await anext(learner.watch_reports(run, step - 1))
            assert (report.step, report.version, deaths.count) == (step, step, step)
            row = await batch_row(learner, run, step)
            assert row is not None
            assert row["state"] == steps.COMMITTED
            kept = ("parent", "step", "seed", "group_ids", "created_at")
            assert [row[key] for key in kept] == [killed[key] for key in kept]
            assert row["parent"] == step - 1
    versions, _ = await learner.list_versions(run, 0, "")
    assert [version.state for version in versions] == [VersionState.LIVE, VersionState.RETIRED, VersionState.RETIRED]
    for version in versions[:2]:
        row = await batch_row(learner, run, version.version)
        assert row is not None
        assert await replayed(learner, row) == version.adapter_sha256
    await learner.close()
