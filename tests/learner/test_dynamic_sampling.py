"""Dynamic sampling: a batch is filled with groups that have variance, over at most `max_sampling_rounds` rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from qerld_learner.core import Learner
from qerld_learner.groups import batch_is_due
from qerld_learner.records import GroupRecord, ReceiptState, RunState, StepReport
from qerld_learner.store import steps

from .conftest import imported, new_id, new_run, options_for, reward_all, small_config, until

EQUAL, MIXED = [1.0] * 4, [0.0, 1.0, 0.0, 1.0]


async def rewarded(learner: Learner, run: str, values: list[float], count: int = 1) -> list[GroupRecord]:
    """Import groups and send their rewards."""
    groups = [await imported(learner, run) for _ in range(count)]
    for group in groups:
        await reward_all(learner, group, values)
    return groups


async def report_of(learner: Learner, run: str, version: int = 1) -> StepReport:
    """The report of the step that made a version, as soon as it is committed; nothing promotes it here."""
    found: list[StepReport] = []

    async def committed() -> bool:
        report = await learner._shared.store.read(lambda c: steps.find_report(c, run, version))
        found.extend([report] if report else [])
        return bool(found)

    await until(committed)
    return found[0]


async def paused(learner: Learner, run: str) -> str:
    async def is_paused() -> bool:
        return (await learner.get_run(run)).state is RunState.PAUSED

    await until(is_paused)
    return (await learner.get_run(run)).reason


async def state(learner: Learner, group: GroupRecord) -> ReceiptState:
    return (await learner.receipt(group.rollout_ids[0])).state


@pytest.mark.parametrize(
    ("rounds", "ready", "dropped", "due"),
    [(0, 3, 10**6, False), (0, 4, 0, True), (3, 3, 8, False), (3, 3, 9, True), (3, 0, 12, False), (3, 4, 0, True)],
)
def test_when_a_batch_of_four_is_due(rounds: int, ready: int, dropped: int, due: bool) -> None:
    assert batch_is_due(small_config(groups_per_step=4, max_sampling_rounds=rounds), ready, dropped) is due


async def test_it_goes_on_until_the_batch_holds_groups_with_variance(learner: Learner) -> None:
    run = await new_run(learner)
    equal = await rewarded(learner, run, EQUAL, 5)
    mixed = await rewarded(learner, run, MIXED)
    equal += await rewarded(learner, run, EQUAL, 2)
    assert {await state(learner, group) for group in equal} == {ReceiptState.DROPPED_ZERO_VARIANCE}
    assert await state(learner, mixed[0]) is ReceiptState.BUFFERED
    mixed += await rewarded(learner, run, MIXED)
    report = await report_of(learner, run)
    assert {await state(learner, group) for group in mixed} == {ReceiptState.TRAINED}
    assert report.metrics["groups"] == report.metrics["mixed_groups"] == 2
    assert report.metrics["groups_zero_variance"] == 7
    assert report.metrics["sampling_rounds"] == 5  # nine groups, two a round
    assert report.metrics["zero_variance_share"] == pytest.approx(7 / 9)


async def test_after_its_rounds_the_step_is_taken_with_what_there_is(learner: Learner) -> None:
    run = await new_run(learner, max_sampling_rounds=3)
    (mixed,) = await rewarded(learner, run, MIXED)
    await rewarded(learner, run, EQUAL, 4)
    assert await state(learner, mixed) is ReceiptState.BUFFERED
    await rewarded(learner, run, EQUAL)
    report = await report_of(learner, run)
    assert await state(learner, mixed) is ReceiptState.TRAINED
    assert (report.metrics["groups"], report.metrics["groups_zero_variance"]) == (1, 5)
    assert report.metrics["sampling_rounds"] == 3
    assert report.metrics["updates"] == 1


async def test_rounds_without_any_variance_pause_the_run_and_new_ones_begin_when_it_goes_on(learner: Learner) -> None:
    run = await new_run(learner, max_sampling_rounds=2)
    await rewarded(learner, run, EQUAL, 4)
    reason = await paused(learner, run)
    assert "4 groups" in reason
    assert "max_sampling_rounds = 2" in reason
    assert "ResumeRun" in reason
    await learner.resume_run(run, new_id(), "h")
    await rewarded(learner, run, EQUAL, 3)
    await rewarded(learner, run, MIXED)
    report = await report_of(learner, run)
    assert (report.metrics["groups"], report.metrics["groups_zero_variance"]) == (1, 3)


async def test_the_count_outlives_the_learner(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    options = options_for(tmp_path, tiny_model[1])
    learner = await Learner.open(options)
    run = await new_run(learner, max_sampling_rounds=2)
    await rewarded(learner, run, EQUAL, 3)
    await learner.close()
    learner = await Learner.open(options)
    assert (await learner.get_run(run)).state is RunState.RUNNING
    await rewarded(learner, run, EQUAL)
    assert "4 groups" in await paused(learner, run)
    await learner.close()
