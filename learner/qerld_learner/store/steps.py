"""Batches, learner steps and rollbacks in the store: each function works inside the caller's transaction."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, bindparam, func, insert, select, update

from ..groups import Verdict, batch_is_due, lag
from ..records import (
    GroupState,
    ReceiptState,
    RunConfig,
    RunState,
    StepReport,
    VersionRecord,
    VersionState,
)
from . import rows
from .chunks import chunks
from .rewards import Closed, close_group, members_of, set_receipts
from .rollouts import find_receipts, group_versions, groups_of
from .runs import (
    find_run,
    find_version,
    find_versions,
    newest_version,
    next_version_number,
    set_version_state,
)
from .schema import batches, groups, reports, rollouts, runs, versions

TRAINING = "training"
COMMITTED = "committed"
ABANDONED = "abandoned"


class FencedError(RuntimeError):
    """Another learner process took the batch over, or its run was deleted; what was trained is discarded."""


@dataclass(frozen=True)
class Batch:
    """Durable membership, order and seed of one training batch; `version` is what it makes.

    `zero_variance`: groups of equal rewards that were dropped on the way to it.
    """

    run: str
    version: int
    parent: int
    step: int
    seed: int
    group_ids: tuple[str, ...]
    zero_variance: int = 0


@dataclass(frozen=True)
class Trained:
    """What a step did with one rollout."""

    rollout_id: str
    advantage: float
    ratio: float
    clipped_share: float
    filtered: bool = False


def open_batch(connection: Connection, run: str) -> Batch | None:
    """Return the batch that is in training, or None."""
    query = select(batches).where(batches.c.run == run, batches.c.state == TRAINING)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return None
    ids = tuple(json.loads(row["group_ids"]))
    return Batch(run, row["version"], row["parent"], row["step"], row["seed"], ids, row["zero_variance"])


def begin_training(connection: Connection, batch: Batch, fence: int) -> bool:
    """Fence the batch for this process; False when the run was paused meanwhile: then no step begins."""
    if find_run(connection, batch.run).state is not RunState.RUNNING:
        return False
    connection.execute(
        update(batches).where(batches.c.run == batch.run, batches.c.version == batch.version).values(fence=fence)
    )
    return True


def form_batch(connection: Connection, run: str, config: RunConfig, fence: int, closed: Closed) -> Batch | None:
    """Drop stale groups and, when enough are ready or the rounds of sampling are over, store the next batch.

    Returns None when groups are missing, while a newer version is not live yet, and when the run does not run.
    """
    newest = newest_version(connection, run)
    if newest.state is not VersionState.LIVE or find_run(connection, run).state is not RunState.RUNNING:
        return None
    drop_stale(connection, run, newest, config.max_lag, closed)
    ids = ready_groups(connection, run, config.groups_per_step)
    dropped = zero_variance(connection, run)
    if not batch_is_due(config, len(ids), dropped):
        return None
    number = next_version_number(connection, run)
    batch = Batch(run, number, newest.version, newest.step + 1, batch_seed(config.seed, number), ids, dropped)
    _store_batch(connection, batch, fence, closed)
    return batch


def ready_groups(connection: Connection, run: str, at_most: int) -> tuple[str, ...]:
    """Return the oldest groups that have all their outcomes."""
    query = (
        select(groups.c.group_id)
        .where(groups.c.run == run, groups.c.state == GroupState.READY.value)
        .order_by(groups.c.seq)
        .limit(at_most)
    )
    return tuple(connection.execute(query).scalars())


def zero_variance(connection: Connection, run: str) -> int:
    """Return how many groups were dropped for zero variance since the batch before, or since `begin_rounds`."""
    return int(connection.execute(select(runs.c.zero_variance).where(runs.c.name == run)).scalar_one())


def begin_rounds(connection: Connection, run: str) -> None:
    """Count the rounds of sampling anew."""
    connection.execute(update(runs).where(runs.c.name == run).values(zero_variance=0))


def batch_seed(run_seed: int, version: int) -> int:
    """Return the seed of the batch that makes a version: 63 bits, the same at each attempt."""
    return (run_seed * 0x9E3779B97F4A7C15 + version * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % (1 << 63)


def _store_batch(connection: Connection, batch: Batch, fence: int, closed: Closed) -> None:
    connection.execute(
        insert(batches),
        {
            "run": batch.run,
            "version": batch.version,
            "parent": batch.parent,
            "step": batch.step,
            "seed": batch.seed,
            "group_ids": json.dumps(batch.group_ids),
            "state": TRAINING,
            "fence": fence,
            "zero_variance": batch.zero_variance,
            "created_at": time.time(),
        },
    )
    begin_rounds(connection, batch.run)
    _set_groups(connection, batch.group_ids, GroupState.BATCHED)
    set_receipts(connection, dict.fromkeys(_rewarded(connection, batch.group_ids), ReceiptState.BATCHED), closed)


def _rewarded(connection: Connection, group_ids: Sequence[str]) -> list[str]:
    members = members_of(connection, group_ids)
    return [member.rollout_id for group in members.values() for member in group if member.reward is not None]


def _set_groups(connection: Connection, group_ids: Sequence[str], state: GroupState) -> None:
    for ids in chunks(group_ids):
        connection.execute(update(groups).where(groups.c.group_id.in_(ids)).values(state=state.value))


def drop_stale(connection: Connection, run: str, parent: VersionRecord, max_lag: int, closed: Closed) -> None:
    """Drop sampled groups whose oldest token is of a reverted version, or more than `max_lag` behind the parent."""
    for state in (GroupState.AWAITING_REWARDS, GroupState.READY):
        made = find_versions(connection, run, group_versions(connection, run, state))
        old = [
            number
            for number, (record, _folder) in made.items()
            if record.state is VersionState.REVERTED or lag(parent.version, number) > max_lag
        ]
        for group_id, members in members_of(connection, groups_of(connection, run, state, old)).items():
            close_group(connection, group_id, members, Verdict.STALE, closed)


_SET_TRAINED = (
    update(rollouts).where(rollouts.c.rollout_id == bindparam("of_id")).values(receipt=bindparam("new_receipt"))
)


def commit_step(
    connection: Connection,
    batch: Batch,
    fence: int,
    version: VersionRecord,
    folder: str,
    trained: Sequence[Trained],
    report: StepReport,
) -> list[str]:
    """Store a step, exactly once: version STAGED, groups TRAINED, receipts, report. Returns the trained rollouts' ids.

    Raises `FencedError` when the batch is no longer this process's.
    """
    _close_batch(connection, batch, fence)
    connection.execute(insert(versions), rows.version_row(version, folder))
    _set_groups(connection, batch.group_ids, GroupState.TRAINED)
    now = time.time()
    connection.execute(_SET_TRAINED, [_trained_row(batch, one, now) for one in trained])
    _set_step(connection, batch.run, batch.step)
    _add_report(connection, report)
    return [one.rollout_id for one in trained]


def _close_batch(connection: Connection, batch: Batch, fence: int) -> None:
    taken = connection.execute(
        update(batches)
        .where(
            batches.c.run == batch.run,
            batches.c.version == batch.version,
            batches.c.state == TRAINING,
            batches.c.fence == fence,
        )
        .values(state=COMMITTED)
    )
    if taken.rowcount != 1:
        raise FencedError(f"batch for version {batch.version} of run {batch.run!r} is no longer fenced by {fence}")


def _trained_row(batch: Batch, one: Trained, now: float) -> dict[str, object]:
    return {
        "of_id": one.rollout_id,
        "new_receipt": (ReceiptState.DROPPED_FILTERED if one.filtered else ReceiptState.TRAINED).value,
        "receipt_at": now,
        "step": batch.step,
        "version": batch.version,
        "advantage": one.advantage,
        "ratio": one.ratio,
        "clipped_share": one.clipped_share,
    }


def _add_report(connection: Connection, report: StepReport) -> None:
    row = {"run": report.run, "step": report.step, "version": report.version, "published": None}
    connection.execute(insert(reports), row | {"body": rows.dump(report)})


def _set_step(connection: Connection, run: str, step: int) -> None:
    connection.execute(update(runs).where(runs.c.name == run).values(step=step, revision=runs.c.revision + 1))


def find_report(connection: Connection, run: str, version: int) -> StepReport | None:
    """Return the report of the step that made a version, published or not; None for version 0 and rollbacks."""
    query = select(reports.c.body).where(reports.c.run == run, reports.c.version == version)
    body = connection.execute(query).scalar_one_or_none()
    return None if body is None else rows.report(body)


def publish_report(connection: Connection, report: StepReport) -> None:
    """Make a step's report readable, as it is now."""
    position = last_published(connection, report.run) + 1
    connection.execute(
        update(reports)
        .where(reports.c.run == report.run, reports.c.version == report.version)
        .values(body=rows.dump(report), published=position)
    )


def published_reports(
    connection: Connection, run: str, after_published: int, after_step: int, limit: int
) -> list[tuple[int, StepReport]]:
    """Return at most `limit` readable reports in order of publication, with their positions."""
    query = (
        select(reports.c.published, reports.c.body)
        .where(reports.c.run == run, reports.c.published > after_published, reports.c.step > after_step)
        .order_by(reports.c.published)
        .limit(limit)
    )
    return [(row.published, rows.report(row.body)) for row in connection.execute(query)]


def last_published(connection: Connection, run: str) -> int:
    """Return the position of a run's newest readable report, 0 without any."""
    query = select(func.max(reports.c.published)).where(reports.c.run == run)
    return int(connection.execute(query).scalar_one_or_none() or 0)


def roll_back(connection: Connection, abandoned: VersionRecord, closed: Closed) -> VersionRecord:
    """Revert a version that is not live, with its groups, and publish its parent's weights as a new STAGED version."""
    run = abandoned.run
    parent, folder = find_version(connection, run, abandoned.parent)
    set_version_state(connection, run, abandoned.version, VersionState.REVERTED)
    _revert_groups(connection, run, abandoned.version, closed)
    number = next_version_number(connection, run)
    again = replace(
        parent, version=number, parent=parent.version, state=VersionState.STAGED, created_at=time.time(), live_at=None
    )
    connection.execute(insert(versions), rows.version_row(again, folder))
    _set_step(connection, run, parent.step)
    return again


def _revert_groups(connection: Connection, run: str, version: int, closed: Closed) -> None:
    query = select(batches.c.group_ids).where(batches.c.run == run, batches.c.version == version)
    ids = json.loads(connection.execute(query).scalar_one_or_none() or "[]")
    _set_groups(connection, ids, GroupState.REVERTED)
    members = [m.rollout_id for group in members_of(connection, ids).values() for m in group]
    receipts = find_receipts(connection, members).values()
    trained = [receipt.rollout_id for receipt in receipts if receipt.state is ReceiptState.TRAINED]
    set_receipts(connection, dict.fromkeys(trained, ReceiptState.REVERTED), closed)


def referenced_folders(connection: Connection) -> set[str]:
    """Return every version folder that a row references, relative to the state folder."""
    return set(connection.execute(select(versions.c.folder).where(versions.c.folder != "").distinct()).scalars())


def batch_groups(connection: Connection, run: str, version: int) -> list[str]:
    """Return the groups of the batch that made a version; none for version 0 and for rollbacks."""
    query = select(batches.c.group_ids).where(batches.c.run == run, batches.c.version == version)
    return list(json.loads(connection.execute(query).scalar_one_or_none() or "[]"))
