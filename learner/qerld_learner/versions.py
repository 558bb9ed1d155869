"""Which versions policy servers should have, and which folders may go."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from qerld_kernels.folders import sha256_of
from sqlalchemy import Connection

from .errors import NotFoundError, StoreError
from .groups import lag
from .records import GroupState, VersionRecord, VersionState
from .replica_records import DesiredVersion
from .shared import Shared
from .store import runs
from .store.rollouts import group_versions
from .store.steps import referenced_folders
from .trainer.messages import INDEX_FILE

_log = logging.getLogger(__name__)

VERSIONS_FOLDER = "versions"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (WEIGHTS_FILE, "adapter_config.json")
# A run needs its live version and the one that is about to be; a slot holds a version with its noise and without.
SLOTS_A_RUN = 2
_RISING = (VersionState.STAGED, VersionState.CANARY)


def version_folder(run: str, version: int) -> str:
    """Return the folder of a version, relative to the state folder."""
    return f"{VERSIONS_FOLDER}/{run}/{version:08d}"


async def adapter_file(shared: Shared, run: str, version: int, name: str) -> tuple[Path, str]:
    """See `Learner.adapter_file`. Raises `NotFoundError`, also when the files were collected."""
    record, folder = await shared.store.read(lambda connection: runs.find_version(connection, run, version))
    gone = NotFoundError(
        f"version {version} of run {run!r} was collected; its files are gone"
        if record.state in (VersionState.RETIRED, VersionState.REVERTED)
        else f"the files of version {version} of run {run!r} are damaged or missing; restore them from a backup"
    )
    if not folder:
        raise gone
    path = shared.options.state_dir / folder / "adapter" / name
    try:
        return path, await _committed_sha256(path, record)
    except OSError:  # collected after the look, or damaged
        raise gone from None


def desired_of_run(connection: Connection, run: str, evaluated: Sequence[int] = ()) -> list[DesiredVersion]:
    """Return what servers should have of a run, most important first: live, rising, still sampling, evaluated."""
    live, rising = (runs.versions_in(connection, run, states) for states in ((VersionState.LIVE,), _RISING))
    sampling = runs.find_versions(connection, run, group_versions(connection, run, GroupState.SAMPLING))
    older = [v for v, _folder in sampling.values() if v.state is VersionState.RETIRED]
    older.sort(key=lambda v: v.version, reverse=True)
    named = {v.version for v in (*live, *rising, *older)}
    found = runs.find_versions(connection, run, evaluated)
    older += [found[number][0] for number in evaluated if number in found and number not in named]
    return [
        DesiredVersion(v.run, v.version, v.adapter_sha256, v.noise, v.state is VersionState.LIVE)
        for v in (*live, *rising, *older)
    ]


def collectable(
    kept: Sequence[tuple[VersionRecord, str]], keep: int, max_lag: int, evaluated: Sequence[int] = ()
) -> list[tuple[VersionRecord, str]]:
    """Return versions whose folders nobody needs: not newest, pinned, live, rising or evaluated, nor within the lag.

    `kept` are those that have a folder, newest first.
    """
    newest = kept[0][0].version
    return [
        (v, folder)
        for v, folder in kept[keep:]
        if not v.pinned
        and v.version not in evaluated
        and v.state in (VersionState.RETIRED, VersionState.REVERTED)
        and lag(newest, v.version) > max_lag
    ]


async def publish_desired(shared: Shared) -> None:
    """Work out what policy servers should serve and tell them: first every run's live version, then the rest."""

    def query(connection: Connection) -> list[list[DesiredVersion]]:
        return [
            desired_of_run(connection, run.name, shared.evaluated_of(run.name)) for run in runs.all_runs(connection)
        ]

    by_run = await shared.store.read(query)
    first = [version for versions in by_run for version in versions[:2]]
    shared.pool.want(first + [version for versions in by_run for version in versions[2:]])


def forget_old(connection: Connection, run: str, keep: int, max_lag: int, evaluated: Sequence[int] = ()) -> set[str]:
    """Forget the folders of old versions; returns those that may be deleted."""
    old = collectable(runs.kept_versions(connection, run), keep, max_lag, evaluated)
    runs.forget_folders(connection, run, [v.version for v, _folder in old])
    folders = {folder for _version, folder in old}
    return folders - runs.shared_folders(connection, run, folders)


async def collect_versions(shared: Shared, run: str, max_lag: int) -> None:
    """Delete folders that are not needed any more; rows first, so that no row ever names a folder that is gone."""
    keep = shared.options.keep_versions
    evaluated = shared.evaluated_of(run)
    for folder in await shared.store.write(lambda c: forget_old(c, run, keep, max_lag, evaluated)):
        await asyncio.to_thread(shutil.rmtree, shared.options.state_dir / folder, ignore_errors=True)


async def sweep(shared: Shared) -> None:
    """Delete version folders that no row references: what a crash left beyond the last commit.

    Raises `StoreError` when a crash cannot have left one of them: then the store was lost, or set back.
    """

    def query(connection: Connection) -> tuple[set[str], dict[str, int]]:
        return referenced_folders(connection), runs.newest_numbers(connection)

    referenced, newest = await shared.store.read(query)
    folders = sorted((shared.options.state_dir / VERSIONS_FOLDER).glob("*/*"))
    left = [f for f in folders if f"{VERSIONS_FOLDER}/{f.parent.name}/{f.name}" not in referenced]
    for folder in left:
        # At most one version of a run is on its way, the one after the newest that was committed.
        if folder.name.isdecimal() and int(folder.name) > newest.get(folder.parent.name, -1) + 1:
            raise StoreError(
                f"state_dir: {folder} is newer than anything in the store, which was lost or set back; "
                "restore learner.db with its -wal file, or move the folder away to go on without it"
            )
    for folder in left:
        _log.warning("deleting %s: the store has no such version", folder)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def damage_of_live(shared: Shared, run: str) -> str:
    """Return what is wrong with the files of a run's live version and what to do, "" when they are as committed."""
    record, folder = await shared.store.read(lambda connection: runs.find_version(connection, run))
    for name in ADAPTER_FILES:
        path = shared.options.state_dir / folder / "adapter" / name
        try:
            committed = await _committed_sha256(path, record)
            actual = await asyncio.to_thread(sha256_of, path)
        except OSError as error:
            what = f"{path} cannot be read ({error.strerror})"
        else:
            if actual == committed:
                continue
            what = f"{path} is not what was committed"
        advice = "restore it from a backup, or create a run from the adapter of another version (initial_adapter)"
        return f"live version {record.version}: {what}; {advice}"
    return ""


async def _committed_sha256(path: Path, record: VersionRecord) -> str:
    """Return the checksum of an adapter's file as it was written, not as the file is now. Raises OSError."""
    if path.name == WEIGHTS_FILE:
        return record.adapter_sha256
    index_file = path.parent.parent / INDEX_FILE
    try:
        index = json.loads(await asyncio.to_thread(index_file.read_bytes))
        return str(index["files"][f"adapter/{path.name}"]["sha256"])
    except (ValueError, LookupError, TypeError) as error:
        raise OSError(errno.EIO, f"{INDEX_FILE} beside it is damaged") from error
