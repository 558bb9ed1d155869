"""A paused run neither trains nor promotes, and what fails again and again pauses its run and says why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from qerld_learner.core import Learner
from qerld_learner.loop import MOST_FAULTS, MOST_UNANSWERED, RunLoop, backoff
from qerld_learner.metrics import LearnerMetrics
from qerld_learner.promotion import NotRunningError, Promotion
from qerld_learner.records import RunState, VersionState
from qerld_learner.store import rows, runs, schema, steps
from sqlalchemy import update

from .conftest import hello_of, imported, new_id, new_run, options_for, reward_all, serving, until

Own = tuple[Learner, LearnerMetrics]


@pytest.fixture
async def own(tiny_model: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Own]:
    """A learner whose trainer may die."""
    metrics = LearnerMetrics()
    learner = await Learner.open(options_for(tmp_path, tiny_model[1]), metrics)
    yield learner, metrics
    await learner.close()


async def rewarded(learner: Learner, run: str) -> None:
    """Give a run what it needs for a step."""
    for _ in range(2):
        await reward_all(learner, await imported(learner, run), [0.0, 1.0, 0.0, 1.0])


async def until_state(learner: Learner, run: str, state: VersionState, number: int = 1) -> None:
    async def reached() -> bool:
        versions, _ = await learner.list_versions(run, 0, "")
        return (number, state) in {(version.version, version.state) for version in versions}

    await until(reached)


async def until_paused(learner: Learner, run: str) -> str:
    """Wait until a run is paused; returns the reason."""

    async def paused() -> bool:
        return (await learner.get_run(run)).state is RunState.PAUSED

    await until(paused)
    return (await learner.get_run(run)).reason


@asynccontextmanager
async def dying_trainer(learner: Learner) -> AsyncIterator[None]:
    """Kill every trainer process as soon as it is there."""

    async def kill() -> None:
        while True:
            if (pid := learner.trainer_pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)

    killing = asyncio.create_task(kill())
    try:
        yield
    finally:
        killing.cancel()


async def test_a_paused_run_promotes_nothing_whatever_servers_report(learner: Learner) -> None:
    run = await new_run(learner)
    await rewarded(learner, run)
    await until_state(learner, run, VersionState.STAGED)
    await learner.pause_run(run, new_id(), "h", "lunch")
    session = await learner.attach(hello_of(learner))
    try:
        await session.report(serving((run, 0), (run, 1)))
        shared = learner._shared
        assert not await RunLoop(shared, run)._turn()
        staged, folder = await shared.store.read(lambda c: runs.find_version(c, run, 1))
        promotion = Promotion(shared, run)
        # A promotion that was on its way when the pause came: it ends at its next look at the run, or its next write.
        with pytest.raises(NotRunningError):
            await promotion.promote(staged, shared.options.state_dir / folder, [])
        with pytest.raises(NotRunningError):
            await promotion._go_live(staged, {}, {})
        assert (await learner.get_version(run, 1)).state is VersionState.STAGED
        assert (await learner.get_version(run)).version == 0
        await learner.resume_run(run, new_id(), "h")
        await until_state(learner, run, VersionState.CANARY)
    finally:
        await session.close()


async def test_a_pause_between_a_look_and_the_step_holds_the_step_back(own: Own) -> None:
    learner, _metrics = own
    run = await new_run(learner)
    async with dying_trainer(learner):
        await rewarded(learner, run)
        await until_paused(learner, run)
    shared = learner._shared
    batch = await shared.store.read(lambda c: steps.open_batch(c, run))
    assert batch is not None
    # As if the loop had seen the run before it was paused.
    await RunLoop(shared, run)._train(await learner.get_run(run), batch)
    assert (await learner.list_versions(run, 0, ""))[0][0].version == 0
    assert learner.trainer_pid is None


async def test_a_trainer_that_dies_at_every_step_pauses_the_run(own: Own) -> None:
    learner, metrics = own
    run = await new_run(learner)
    begun = time.monotonic()
    async with dying_trainer(learner):
        await rewarded(learner, run)
        assert await until_paused(learner, run) == (
            "step 1 failed: the trainer process ended (signal 9); its stderr says why"
        )
        assert time.monotonic() - begun > 3  # a second after the first death, two after the second
        assert metrics.registry.get_sample_value("qerld_trainer_deaths_total") == 3
        loop = RunLoop(learner._shared, run)
        loop._waiting_since = begun
        assert not await loop._turn()
        assert loop._waiting_since is None, "neither the failed step nor the pause is a wait for rewards"
        assert learner.trainer_pid is None
    # The batch is kept, and trained when the run goes on.
    await learner.resume_run(run, new_id(), "h")
    await until_state(learner, run, VersionState.STAGED)


async def test_a_trainer_that_dies_in_every_canary_pauses_the_run(own: Own) -> None:
    learner, metrics = own
    run = await new_run(learner)
    await rewarded(learner, run)
    await until_state(learner, run, VersionState.STAGED)
    async with dying_trainer(learner):
        session = await learner.attach(hello_of(learner))
        await session.report(serving((run, 0), (run, 1)))
        reason = await until_paused(learner, run)
        assert reason.startswith("the canary of version 1 failed in the trainer: the trainer process ended (signal 9)")
        assert metrics.registry.get_sample_value("qerld_trainer_deaths_total") == 3
        assert not await RunLoop(learner._shared, run)._turn()
        assert learner.trainer_pid is None
    assert (await learner.get_version(run)).version == 0


async def test_a_canary_that_no_server_answers_pauses_the_run(learner: Learner) -> None:
    """No version goes live without a canary: the server that serves it here is gone when it is asked."""
    run = await new_run(learner)
    session = await learner.attach(hello_of(learner))
    try:
        await session.report(serving((run, 0), (run, 1)))
        await rewarded(learner, run)
        await until_state(learner, run, VersionState.CANARY)
        loop = RunLoop(learner._shared, run)
        loop._unanswered = MOST_UNANSWERED - 1  # the run's own loop would take half a minute
        assert await loop._turn()
        reason = f"no policy server answered the canary (by-hand went away), {MOST_UNANSWERED} times in a row"
        assert await until_paused(learner, run) == reason
    finally:
        await session.close()
    assert (await learner.get_version(run, 1)).state is VersionState.CANARY
    assert (await learner.get_version(run)).version == 0


async def test_a_loop_that_fails_begins_its_turn_again_and_pauses_its_run_after_several(learner: Learner) -> None:
    """Ids that are no multiple of four bytes cannot be read back: nothing in the loop expects that."""
    run = await new_run(learner)
    groups = [await imported(learner, run) for _ in range(2)]
    broken = update(schema.rollouts).where(schema.rollouts.c.rollout_id == groups[0].rollout_ids[0])
    store = learner._shared.store
    await store.write(lambda c: c.execute(broken.values(completion_ids=b"123")))
    for group in groups:
        await reward_all(learner, group, [0.0, 1.0, 0.0, 1.0])

    async def failed() -> bool:
        return any("the control loop failed" in s.waiting_for for s in await learner.statuses() if s.run == run)

    await until(failed)
    await store.write(lambda c: c.execute(broken.values(completion_ids=rows.pack_ids((9, 10, 11)))))
    await until_state(learner, run, VersionState.STAGED)
    loop = RunLoop(learner._shared, run)
    loop._faults = MOST_FAULTS - 1
    await loop._fault(ValueError("not a multiple"))
    reason = f"the control loop failed {MOST_FAULTS} times in a row: ValueError: not a multiple"
    assert await until_paused(learner, run) == reason


def test_waits_between_failures_double_up_to_a_limit() -> None:
    assert [backoff(failures) for failures in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
