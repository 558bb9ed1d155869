"""A turn costs the same in a long run as in a short one, counted in steps of SQLite's virtual machine, not in time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from qerld_learner import batches
from qerld_learner.groups import Closing
from qerld_learner.records import (
    FinishReason,
    GroupState,
    NoiseRecord,
    RunRecord,
    RunState,
    SpanRecord,
    StepReport,
    VersionRecord,
    VersionState,
)
from qerld_learner.store import Store, rewards, rows, runs, schema, steps
from qerld_learner.store import rollouts as stored
from qerld_learner.store.rewards import Closed
from qerld_learner.store.rollouts import Sampled
from qerld_learner.versions import desired_of_run, forget_old
from sqlalchemy import Connection, insert

from .conftest import prompt, reward, small_config

RUN, FENCE, KEPT = "r", 1, 6
CONFIG = small_config(group_size=2, groups_per_step=1, max_lag=1)
Work = Callable[[Connection], object]


def version(number: int, state: VersionState) -> VersionRecord:
    return VersionRecord(RUN, number, max(0, number - 1), number, NoiseRecord(), state, "0" * 64, 1, 1.0)


def report(number: int) -> StepReport:
    return StepReport(RUN, number, number, {"reward_mean": 0.5}, {"train": 1.0}, 1.0, RunState.RUNNING)


def grow(connection: Connection, length: int) -> None:
    """A run of `length` steps: for each a version, a batch, a report and a group of two trained rollouts."""
    record = RunRecord(RUN, CONFIG, RunState.RUNNING, "", length, length, "base", "0", "1", time.time())
    runs.add_run(connection, record, version(0, VersionState.RETIRED), "")
    numbers = range(1, length + 1)
    newest, old = range(length + 1 - KEPT, length + 1), VersionState.RETIRED
    folders = {number: f"versions/{RUN}/{number:08d}" for number in newest}
    made = [version(number, VersionState.LIVE if number == length else old) for number in numbers]
    connection.execute(insert(schema.versions), [rows.version_row(v, folders.get(v.version, "")) for v in made])
    connection.execute(insert(schema.groups), [trained_group(number) for number in numbers])
    connection.execute(insert(schema.rollouts), [trained_rollout(n, i) for n in numbers for i in (0, 1)])
    said = {"kind": "reward", "reward": 1.0, "body": "", "at": 1.0}
    connection.execute(insert(schema.outcomes), [{**said, "rollout_id": f"g{n}-{i}"} for n in numbers for i in (0, 1)])
    connection.execute(insert(schema.batches), [trained_batch(number) for number in numbers])
    reports = [(number, rows.dump(report(number))) for number in numbers]
    connection.execute(
        insert(schema.reports),
        [{"run": RUN, "step": n, "version": n, "published": n, "body": body} for n, body in reports],
    )


def trained_group(number: int) -> dict[str, object]:
    return {
        "group_id": f"g{number}",
        "run": RUN,
        "state": GroupState.TRAINED.value,
        "prompt_ids": rows.pack_ids((1, 2)),
        "group_size": 2,
        "sampling": rows.dump(prompt(2).sampling),
        "labels": "{}",
        "reward_deadline": 600.0,
        "deadline": 1.0,
        "version": number - 1,
        "outcomes": 2,
        "created_at": 1.0,
    }


def trained_rollout(number: int, index: int) -> dict[str, object]:
    return {
        "rollout_id": f"g{number}-{index}",
        "group_id": f"g{number}",
        "run": RUN,
        "position": index,
        "state": "finished",
        "completion_ids": rows.pack_ids((3,)),
        "logprobs": rows.pack_floats((-1.0,)),
        "tokens": 1,
        "turns": 1,
        "spans": "[]",
        "text": "",
        "problem": "",
        "finished_at": 1.0,
        "receipt": "trained",
        "receipt_at": 1.0,
        "step": number,
        "version": number,
    }


def trained_batch(number: int) -> dict[str, object]:
    return {
        "run": RUN,
        "version": number,
        "parent": number - 1,
        "step": number,
        "seed": 1,
        "group_ids": json.dumps([f"g{number}"]),
        "state": steps.COMMITTED,
        "fence": FENCE,
        "created_at": 1.0,
    }


def sampled_and_rewarded(connection: Connection, live: int) -> None:
    """A group that the live version has sampled, ready to be trained."""
    group_id = stored.add_group(connection, RUN, prompt(2), 600.0, live, GroupState.SAMPLING)
    span = SpanRecord(0, 1, live, NoiseRecord())
    for index in (0, 1):
        sampled = Sampled(f"{group_id}-{index}", (3,), (-1.0,), (span,), FinishReason.STOP)
        stored.store_sampled(connection, sampled)
    said = [reward(f"{group_id}-{index}", float(index)) for index in (0, 1)]
    rewards.submit(connection, RUN, group_id, "h", said, Closing())


def step(live: int) -> dict[str, Work]:
    """What one step does with the store, in order, by name."""
    made = live + 1
    folder = f"versions/{RUN}/{made:08d}"
    found: dict[str, steps.Batch] = {}

    def form(connection: Connection) -> None:
        batch = steps.form_batch(connection, RUN, CONFIG, FENCE, Closed())
        assert batch is not None
        assert (batch.parent, batch.version) == (live, made)
        found["batch"] = batch

    def load(connection: Connection) -> None:
        assert len(batches.load(connection, found["batch"]).groups) == 1

    def commit(connection: Connection) -> None:
        trained = [steps.Trained(f"{found['batch'].group_ids[0]}-{i}", 1.0, 1.0, 0.0) for i in (0, 1)]
        staged = version(made, VersionState.STAGED)
        ids = steps.commit_step(connection, found["batch"], FENCE, staged, folder, trained, report(made))
        assert len(rewards.closed_by_training(connection, ids).receipts) == 2

    def promote(connection: Connection) -> None:
        assert steps.batch_groups(connection, RUN, made)
        runs.set_version_state(connection, RUN, made, VersionState.CANARY)
        runs.make_live(connection, RUN, made)
        assert steps.find_report(connection, RUN, made) is not None
        steps.publish_report(connection, report(made))

    return {
        "sample and reward": lambda c: sampled_and_rewarded(c, live),
        "form a batch": form,
        "fence it": lambda c: steps.begin_training(c, found["batch"], FENCE),
        "load it": load,
        "commit": commit,
        "promote": promote,
        "forget old folders": lambda c: forget_old(c, RUN, KEPT, CONFIG.max_lag),
    }


def looks(live: int) -> dict[str, Work]:
    """What is asked again and again, by name."""
    return {
        "open batch": lambda c: steps.open_batch(c, RUN),
        "newest version": lambda c: runs.newest_version(c, RUN),
        "desired versions": lambda c: desired_of_run(c, RUN),
        "buffer": lambda c: stored.count_groups(c, RUN),
        "overdue groups": lambda c: rewards.overdue_groups(c, 256),
        "queue": lambda c: stored.open_groups(c, RUN, GroupState.QUEUED, limit=1),
        "size of the queue": lambda c: stored.count_queued(c, RUN, 100),
        "new reports": lambda c: steps.published_reports(c, RUN, live, 0, 256),
        "last report": lambda c: steps.last_published(c, RUN),
        "versions of a batch": lambda c: runs.find_versions(c, RUN, {live, live - 1}),
        "newest groups": lambda c: stored.newest_sampled_groups(c, RUN, 4),
        "page of groups": lambda c: stored.page_of_groups(c, RUN, None, None, 10),
        "page of dropped groups": lambda c: stored.page_of_groups(c, RUN, GroupState.DROPPED, None, 10),
        "page of versions": lambda c: runs.page_of_versions(c, RUN, None, 10),
    }


def costs(connection: Connection, work: dict[str, Work]) -> dict[str, int]:
    """Steps of the virtual machine that each piece of work takes."""
    driver = connection.connection.driver_connection
    assert driver is not None
    taken = 0

    def tick() -> int:
        nonlocal taken
        taken += 1
        return 0

    found = {}
    for name, what in work.items():
        taken = 0
        driver.set_progress_handler(tick, 1)
        what(connection)
        driver.set_progress_handler(None, 0)
        found[name] = taken
    return found


async def costs_after(folder: Path, length: int) -> dict[str, int]:
    store = Store(folder)
    try:
        await store.write(lambda c: grow(c, length))
        asked = await store.write(lambda c: costs(c, looks(length)))
        return asked | await store.write(lambda c: costs(c, step(length)))
    finally:
        store.close()


async def test_a_turn_costs_the_same_after_ten_steps_and_after_ten_thousand(tmp_path: Path) -> None:
    short, long = await costs_after(tmp_path / "short", 10), await costs_after(tmp_path / "long", 10_000)
    assert all(short.values())
    assert {name: taken for name, taken in long.items() if taken > 1.05 * short[name] + 10} == {}, short


async def costs_beside(folder: Path, waiting: int) -> dict[str, int]:
    """Costs of a turn's looks while so many groups await rewards."""
    store = Store(folder)
    try:
        await store.write(lambda c: grow(c, 10))
        group = {**trained_group(11), "state": GroupState.AWAITING_REWARDS.value, "deadline": time.time() + 600}
        many = [{**group, "group_id": f"w{number}"} for number in range(waiting)]
        await store.write(lambda c: c.execute(insert(schema.groups), many))
        newest = await store.read(lambda c: runs.newest_version(c, RUN))
        work: dict[str, Work] = {
            "stale groups": lambda c: steps.drop_stale(c, RUN, newest, CONFIG.max_lag, Closed()),
            "overdue groups": lambda c: rewards.overdue_groups(c, 256),
            "desired versions": lambda c: desired_of_run(c, RUN),
        }
        return await store.write(lambda c: costs(c, work))
    finally:
        store.close()


async def test_groups_that_wait_for_rewards_cost_a_turn_nothing(tmp_path: Path) -> None:
    """Those beyond the lag are found without a look at each."""
    assert await costs_beside(tmp_path / "few", 20) == await costs_beside(tmp_path / "many", 2_000)
