"""Streams of changes: receipts, live versions, step reports. Each reads the store and then waits for what is new."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from sqlalchemy import Connection

from .errors import NotFoundError
from .records import Receipt, StepReport, VersionRecord
from .shared import Shared
from .store import runs, steps
from .store.rollouts import find_receipts

# A watcher that begins at the first step of a long run must not hold up the other readers.
REPORTS_AT_ONCE = 256


async def watch_receipts(shared: Shared, run: str, rollout_ids: Sequence[str]) -> AsyncIterator[Receipt]:
    """See `Learner.watch_receipts`."""
    awaited = set(rollout_ids)
    with shared.receipts.subscribe() as subscription:
        await shared.store.read(lambda connection: runs.find_run(connection, run))
        if rollout_ids:
            known = await shared.store.read(lambda connection: find_receipts(connection, rollout_ids, run))
            for missing in awaited - known.keys():
                raise NotFoundError(f"unknown rollout {missing!r} in run {run!r}; use ids that Sample returned")
            for final in (receipt for receipt in known.values() if receipt.state.final):
                awaited.discard(final.rollout_id)
                yield final
        while (awaited or not rollout_ids) and (new := await subscription.get()) is not None:
            of, receipt = new
            if of != run:
                continue
            if receipt is None:
                return
            if rollout_ids and receipt.rollout_id not in awaited:
                continue
            awaited.discard(receipt.rollout_id)
            yield receipt


async def watch_live(shared: Shared, run: str) -> AsyncIterator[VersionRecord]:
    """See `Learner.watch_live`."""
    last = -1
    while True:
        signal = shared.runs[run].live
        seen = signal.count
        live, _folder = await shared.store.read(lambda connection: runs.find_version(connection, run))
        if live.version != last:
            last = live.version
            yield live
        await signal.wait(seen, at_most=5.0)


async def watch_reports(shared: Shared, run: str, after_step: int | None) -> AsyncIterator[StepReport]:
    """See `Learner.watch_reports`."""
    position = 0
    if after_step is None:
        position = await shared.store.read(lambda connection: steps.last_published(connection, run))
    signal = shared.runs[run].reported
    while True:
        seen = signal.count
        found = await _new_reports(shared, run, position, after_step or 0)
        for published, report in found:
            position = published
            yield report
        if not found:
            await signal.wait(seen, at_most=5.0)


async def _new_reports(shared: Shared, run: str, position: int, after_step: int) -> list[tuple[int, StepReport]]:
    def query(connection: Connection) -> list[tuple[int, StepReport]]:
        runs.find_run(connection, run)
        return steps.published_reports(connection, run, position, after_step, REPORTS_AT_ONCE)

    return await shared.store.read(query)
