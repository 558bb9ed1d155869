"""Which versions policy servers should have, and which folders may go."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection

from .errors import NotFoundError
from .groups import lag
from .records import DesiredVersion, GroupState, VersionRecord, VersionState
from .shared import Shared
from .store import runs
from .store.rollouts import group_versions
from .store.steps import referenced_folders

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
    collected = NotFoundError(f"version {version} of run {run!r} was collected; its files are gone")
    if not folder:
        raise collected
    path = shared.options.state_dir / folder / "adapter" / name
    if name == WEIGHTS_FILE:
        return path, record.adapter_sha256
    try:
        return path, hashlib.sha256(await asyncio.to_thread(path.read_bytes)).hexdigest()
    except FileNotFoundError:  # collected after the look
        raise collected from None


def desired_of_run(connection: Connection, run: str) -> list[DesiredVersion]:
    """Return what servers should have of a run, most important first: live, rising, then those that still sample."""
    live, rising = (runs.versions_in(connection, run, states) for states in ((VersionState.LIVE,), _RISING))
    sampling = runs.find_versions(connection, run, group_versions(connection, run, GroupState.SAMPLING))
    older = [v for v, _folder in sampling.values() if v.state is VersionState.RETIRED]
    older.sort(key=lambda v: v.version, reverse=True)
    return [
        DesiredVersion(v.run, v.version, v.adapter_sha256, v.noise, v.state is VersionState.LIVE)
        for v in (*live, *rising, *older)
    ]


def collectable(kept: Sequence[tuple[VersionRecord, str]], keep: int, max_lag: int) -> list[tuple[VersionRecord, str]]:
    """Return versions whose folders nobody needs: neither newest, pinned, live or rising, nor within the lag.

    `kept` are those that have a folder, newest first.
    """
    newest = kept[0][0].version
    return [
        (v, folder)
        for v, folder in kept[keep:]
        if not v.pinned
        and v.state in (VersionState.RETIRED, VersionState.REVERTED)
        and lag(newest, v.version) > max_lag
    ]


async def publish_desired(shared: Shared) -> None:
    """Work out what policy servers should serve and tell them: first every run's live version, then the rest."""

    def query(connection: Connection) -> list[list[DesiredVersion]]:
        return [desired_of_run(connection, run.name) for run in runs.all_runs(connection)]

    by_run = await shared.store.read(query)
    first = [version for versions in by_run for version in versions[:2]]
    shared.pool.want(first + [version for versions in by_run for version in versions[2:]])


def forget_old(connection: Connection, run: str, keep: int, max_lag: int) -> set[str]:
    """Forget the folders of old versions; returns those that may be deleted."""
    old = collectable(runs.kept_versions(connection, run), keep, max_lag)
    runs.forget_folders(connection, run, [v.version for v, _folder in old])
    folders = {folder for _version, folder in old}
    return folders - runs.shared_folders(connection, run, folders)


async def collect_versions(shared: Shared, run: str, max_lag: int) -> None:
    """Delete folders that are not needed any more; rows first, so that no row ever names a folder that is gone."""
    keep = shared.options.keep_versions
    for folder in await shared.store.write(lambda connection: forget_old(connection, run, keep, max_lag)):
        await asyncio.to_thread(shutil.rmtree, shared.options.state_dir / folder, ignore_errors=True)


async def sweep(shared: Shared) -> None:
    """Delete version folders that no row references: what a crash left beyond the last commit."""
    referenced = await shared.store.read(referenced_folders)
    root = shared.options.state_dir / VERSIONS_FOLDER
    for folder in sorted(root.glob("*/*")):
        if f"{VERSIONS_FOLDER}/{folder.parent.name}/{folder.name}" not in referenced:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
