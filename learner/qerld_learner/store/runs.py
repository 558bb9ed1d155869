"""Runs and versions in the store: each function works inside the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from sqlalchemy import Connection, bindparam, func, insert, select, update

from ..errors import ConflictError, NotFoundError, PreconditionError
from ..records import RunRecord, RunState, VersionRecord, VersionState
from .chunks import chunks
from .rows import dump, run_record, version_record, version_row
from .schema import counters, runs, versions


def find_run(connection: Connection, name: str) -> RunRecord:
    """Return a run, or raise `NotFoundError`."""
    row = connection.execute(select(runs).where(runs.c.name == name)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"unknown run {name!r}; CreateRun makes one, ListRuns lists those there are")
    if row["state"] == RunState.DELETED:
        raise NotFoundError(f"run {name!r} was deleted; ListRuns lists those there are")
    return run_record(row)


def all_runs(connection: Connection) -> list[RunRecord]:
    """Return all runs that are not deleted, oldest first."""
    query = select(runs).where(runs.c.state != RunState.DELETED).order_by(runs.c.seq)
    return [run_record(row) for row in connection.execute(query).mappings()]


def check_name(connection: Connection, name: str) -> None:
    """Raise `ConflictError` when a run has the name, or had it: receipts and files still speak of that one."""
    state = connection.execute(select(runs.c.state).where(runs.c.name == name)).scalar_one_or_none()
    if state == RunState.DELETED:
        raise ConflictError(f"run {name!r} was deleted, and its receipts and files keep its name; choose another name")
    if state is not None:
        raise ConflictError(f"run {name!r} exists already; choose another name, or go on with GetRun")


def add_run(connection: Connection, run: RunRecord, first: VersionRecord, folder: str) -> None:
    """Store a run with its version 0. Raises `ConflictError` when the name is taken."""
    check_name(connection, run.name)
    connection.execute(
        insert(runs).values(
            name=run.name,
            config=dump(run.config),
            state=run.state.value,
            reason=run.reason,
            step=run.step,
            live_version=run.live_version,
            base_model=run.base_model,
            base_sha256=run.base_sha256,
            revision=1,
            created_at=run.created_at,
        )
    )
    connection.execute(insert(versions), version_row(first, folder))


def set_state(connection: Connection, name: str, state: RunState, reason: str) -> None:
    """Move a run to a state."""
    connection.execute(
        update(runs).where(runs.c.name == name).values(state=state.value, reason=reason, revision=runs.c.revision + 1)
    )


def pause(connection: Connection, name: str, reason: str) -> None:
    """Pause a run. Raises `PreconditionError` when it is completed."""
    if find_run(connection, name).state is RunState.COMPLETED:
        raise PreconditionError(f"run {name!r} is completed and cannot be paused")
    set_state(connection, name, RunState.PAUSED, reason)


def resume(connection: Connection, name: str) -> None:
    """Let a run go on. Raises `PreconditionError` when it is completed."""
    if find_run(connection, name).state is RunState.COMPLETED:
        raise PreconditionError(f"run {name!r} is completed; create a new run, for example from its adapter")
    set_state(connection, name, RunState.RUNNING, "")


def find_version(connection: Connection, run: str, version: int | None = None) -> tuple[VersionRecord, str]:
    """Return a version (None: the live one) and its folder ("" once collected), or raise `NotFoundError`."""
    live = find_run(connection, run).live_version
    number = live if version is None else version
    query = select(versions).where(versions.c.run == run, versions.c.version == number)
    # The wire's versions have 64 bits, the store's integers 63.
    row = connection.execute(query).mappings().one_or_none() if number < 1 << 63 else None
    if row is None:
        raise NotFoundError(f"run {run!r} has no version {number}; ListVersions lists them")
    return version_record(row), row["folder"]


_SOME_VERSIONS = select(versions).where(
    versions.c.run == bindparam("of_run"), versions.c.version.in_(bindparam("numbers", expanding=True))
)


def find_versions(connection: Connection, run: str, numbers: Iterable[int]) -> dict[int, tuple[VersionRecord, str]]:
    """Return those of some versions of a run that exist, with their folders, by number."""
    return {
        row["version"]: (version_record(row), row["folder"])
        for some in chunks(number for number in numbers if number < 1 << 63)
        for row in connection.execute(_SOME_VERSIONS, {"of_run": run, "numbers": some}).mappings()
    }


def versions_in(connection: Connection, run: str, states: Sequence[VersionState]) -> list[VersionRecord]:
    """Return the versions of a run that are in some states, newest first; few are live or about to be."""
    query = select(versions).where(versions.c.run == run, versions.c.state.in_([state.value for state in states]))
    # Sorted here: for the sake of an ORDER BY SQLite would read all versions of the run in order.
    found = [version_record(row) for row in connection.execute(query).mappings()]
    return sorted(found, key=lambda record: record.version, reverse=True)


def kept_versions(connection: Connection, run: str) -> list[tuple[VersionRecord, str]]:
    """Return the versions of a run that still have a folder, with it, newest first."""
    query = select(versions).where(versions.c.run == run, versions.c.folder > "")
    found = [(version_record(row), row["folder"]) for row in connection.execute(query).mappings()]
    return sorted(found, key=lambda one: one[0].version, reverse=True)


def page_of_versions(connection: Connection, run: str, below: int | None, limit: int) -> list[VersionRecord]:
    """Return at most `limit` versions below a number, newest first."""
    find_run(connection, run)
    query = select(versions).where(versions.c.run == run).order_by(versions.c.version.desc()).limit(limit)
    if below is not None:
        query = query.where(versions.c.version < below)
    return [version_record(row) for row in connection.execute(query).mappings()]


def newest_version(connection: Connection, run: str) -> VersionRecord:
    """Return the newest version that was not reverted: live, or staged to become so."""
    query = (
        select(versions)
        .where(versions.c.run == run, versions.c.state != VersionState.REVERTED)
        .order_by(versions.c.version.desc())
        .limit(1)
    )
    return version_record(connection.execute(query).mappings().one())


def next_version_number(connection: Connection, run: str) -> int:
    """Return the number of the next version: one more than any there ever was."""
    query = select(versions.c.version).where(versions.c.run == run).order_by(versions.c.version.desc()).limit(1)
    return int(connection.execute(query).scalar_one()) + 1


def set_version_state(connection: Connection, run: str, version: int, state: VersionState) -> None:
    """Move a version to a state."""
    connection.execute(
        update(versions).where(versions.c.run == run, versions.c.version == version).values(state=state.value)
    )


def make_live(connection: Connection, run: str, version: int) -> None:
    """Make a version live and retire the one before."""
    connection.execute(
        update(versions)
        .where(versions.c.run == run, versions.c.state == VersionState.LIVE)
        .values(state=VersionState.RETIRED.value)
    )
    connection.execute(
        update(versions)
        .where(versions.c.run == run, versions.c.version == version)
        .values(state=VersionState.LIVE.value, live_at=time.time())
    )
    connection.execute(
        update(runs).where(runs.c.name == run).values(live_version=version, revision=runs.c.revision + 1)
    )


def shared_folders(connection: Connection, run: str, folders: Collection[str]) -> set[str]:
    """Return those of some folders that a version of the run names: a rollback's shares its ancestor's."""
    query = select(versions.c.folder).where(versions.c.run == run, versions.c.folder.in_(folders))
    return set(connection.execute(query).scalars())


def forget_folders(connection: Connection, run: str, numbers: list[int]) -> None:
    """Say that the folders of versions are gone; called before they are deleted, never after."""
    for some in chunks(numbers):
        connection.execute(
            update(versions).where(versions.c.run == run, versions.c.version.in_(some)).values(folder="")
        )


def count_up(connection: Connection, name: str) -> int:
    """Return the next value of a durable counter, from 1."""
    value = connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar_one_or_none()
    if value is None:
        connection.execute(insert(counters).values(name=name, value=1))
        return 1
    connection.execute(update(counters).where(counters.c.name == name).values(value=value + 1))
    return int(value) + 1


def newest_numbers(connection: Connection) -> dict[str, int]:
    """Return the largest version number of each run, reverted and deleted ones too."""
    query = select(versions.c.run, func.max(versions.c.version)).group_by(versions.c.run)
    return {str(run): int(number) for run, number in connection.execute(query)}
