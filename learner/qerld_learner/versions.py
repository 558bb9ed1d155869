"""Which versions policy servers should have, and which folders may go."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Sequence

from sqlalchemy import Connection

from .groups import lag
from .records import DesiredVersion, VersionRecord, VersionState
from .shared import Shared
from .store import runs
from .store.rollouts import sampling_versions
from .store.steps import referenced_folders

VERSIONS_FOLDER = "versions"
# A run needs its live version and the one that is about to be; a slot holds a version with its noise and without.
SLOTS_A_RUN = 2
_RISING = (VersionState.STAGED, VersionState.CANARY)


def version_folder(run: str, version: int) -> str:
    """Return the folder of a version, relative to the state folder."""
    return f"{VERSIONS_FOLDER}/{run}/{version:08d}"


def desired_of_run(versions: Sequence[VersionRecord], open_versions: Collection[int]) -> list[DesiredVersion]:
    """Return what servers should have of a run, most important first: live, rising, then those that still sample."""
    live = [v for v in versions if v.state is VersionState.LIVE]
    rising = [v for v in versions if v.state in _RISING]
    older = [v for v in versions if v.state is VersionState.RETIRED and v.version in open_versions]
    older.sort(key=lambda v: v.version, reverse=True)
    return [
        DesiredVersion(v.run, v.version, v.adapter_sha256, v.noise, v.state is VersionState.LIVE)
        for v in (*live, *rising, *older)
    ]


def collectable(versions: Sequence[tuple[VersionRecord, str]], keep: int, max_lag: int) -> list[VersionRecord]:
    """Return versions whose folders nobody needs: neither newest, pinned, live or rising, nor within the lag."""
    newest = max((v.step for v, _folder in versions), default=0)
    kept = {v.version for v, _folder in versions[:keep]}
    return [
        v
        for v, folder in versions
        if folder
        and v.version not in kept
        and not v.pinned
        and v.state in (VersionState.RETIRED, VersionState.REVERTED)
        and lag(newest, v.step) > max_lag
    ]


async def publish_desired(shared: Shared) -> None:
    """Work out what policy servers should serve and tell them: first every run's live version, then the rest."""

    def query(connection: Connection) -> list[list[DesiredVersion]]:
        found = []
        for run in runs.all_runs(connection):
            versions = [record for record, _folder in runs.all_versions(connection, run.name)]
            found.append(desired_of_run(versions, sampling_versions(connection, run.name)))
        return found

    by_run = await shared.store.read(query)
    first = [version for versions in by_run for version in versions[:2]]
    shared.pool.want(first + [version for versions in by_run for version in versions[2:]])


async def collect_versions(shared: Shared, run: str, max_lag: int) -> None:
    """Delete folders that are not needed any more; rows first, so that no row ever names a folder that is gone."""

    def mutation(connection: Connection) -> set[str]:
        versions = runs.all_versions(connection, run)
        old = {v.version for v in collectable(versions, shared.options.keep_versions, max_lag)}
        candidates = {folder for v, folder in versions if v.version in old}
        runs.forget_folders(connection, run, sorted(old))
        return candidates - referenced_folders(connection)

    for folder in await shared.store.write(mutation):
        await asyncio.to_thread(shutil.rmtree, shared.options.state_dir / folder, ignore_errors=True)


async def sweep(shared: Shared) -> None:
    """Delete version folders that no row references: what a crash left beyond the last commit."""
    referenced = await shared.store.read(referenced_folders)
    root = shared.options.state_dir / VERSIONS_FOLDER
    for folder in sorted(root.glob("*/*")):
        if f"{VERSIONS_FOLDER}/{folder.parent.name}/{folder.name}" not in referenced:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
