"""The control loop of one run: promote what is staged, train what is batched, batch what is ready.

The parent of a step is always live (`max_unpromoted` = 1), so one step at a time is between batch and promotion.
A run that is paused, by a client or by a failure, does none of it: a step in progress is finished, its version waits
STAGED, and a version whose canary was going on has it again when the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from sqlalchemy import Connection

from . import batches
from .errors import RetryLaterError
from .groups import batch_is_due, closing_of, rounds_are_over
from .promotion import NotRunningError, Promotion, UnansweredError
from .records import RolloutRecord, RunRecord, RunState, StepReport, VersionRecord, VersionState
from .run_options import noise_of, trainer_config
from .shared import Shared
from .store import rewards, runs, steps
from .store.rewards import Closed
from .store.rollouts import group_rollouts, newest_sampled_groups
from .store.steps import Batch, FencedError, Trained
from .trainer.client import TrainerDiedError, TrainerFailure
from .trainer.messages import StepResult, TrainStep
from .versions import collect_versions, publish_desired, version_folder

_log = logging.getLogger(__name__)

# After this many rollbacks in a row something other than one step's weights is wrong.
MOST_ROLLBACKS = 2
# Canaries in a row that no server answered (the version may be what ends them), and failures of the loop itself, with
# 0.5, 1, 2, … seconds between them: half a minute in all, after which a server that is gone is detached.
MOST_UNANSWERED = 7
MOST_FAULTS = 7
FAULT_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
# Groups that are closed in one transaction when their deadlines pass: others must be able to write, too.
EXPIRED_AT_ONCE = 256


class RunLoop:
    """Drives one run until it is cancelled; everything it needs to go on is in the store."""

    def __init__(self, shared: Shared, run: str) -> None:
        self._shared = shared
        self._run = run
        self._pulse = shared.runs[run]
        self._promotion = Promotion(shared, run)
        self._rollbacks = 0
        self._unanswered = 0
        self._faults = 0
        # The version after which groups too old for it were looked for.
        self._cleared_at: int | None = None
        # Since when the run waits for rewards; None while it does not run.
        self._waiting_since: float | None = None

    async def drive(self) -> None:
        """Go on for ever. After an unexpected error the turn begins again, from the store; after several it pauses."""
        while True:
            seen = self._pulse.work.count
            try:
                if not await self._turn():
                    await self._pulse.work.wait(seen, at_most=5.0)
                self._faults = 0
            except RetryLaterError as error:
                self._pulse.waiting_for = str(error)
                await asyncio.sleep(error.retry_after)
            except Exception as error:
                await self._fault(error)

    async def _fault(self, error: Exception) -> None:
        self._faults += 1
        _log.error("the loop of run %s failed and begins its turn again", self._run, exc_info=error)
        self._pulse.waiting_for = "the control loop failed, see the learner's log; it tries again"
        if self._faults >= MOST_FAULTS:
            self._faults = 0
            await self._pause(f"the control loop failed {MOST_FAULTS} times in a row: {type(error).__name__}: {error}")
        await asyncio.sleep(backoff(self._faults))

    async def _turn(self) -> bool:
        """Do the next thing; returns whether there was something to do."""
        run, newest, batch, ready, dropped = await self._shared.store.read(self._look)
        if run.state is not RunState.RUNNING:
            self._waiting_since = None
            return False
        self._waiting_since = self._waiting_since or time.time()
        if newest.state in (VersionState.STAGED, VersionState.CANARY):
            try:
                await self._promote(newest)
            finally:
                self._waiting_since = time.time()
            return True
        # Each group that gets its rewards wakes this loop: only a look, beside the writer, until it is worth a write.
        if batch is None and (batch_is_due(run.config, ready, dropped) or newest.version != self._cleared_at):
            batch = await self._next_batch(run)
            self._cleared_at = newest.version
        if batch is None:
            return await self._give_up(run) if rounds_are_over(run.config, ready, dropped) else False
        await self._train(run, batch)
        return True

    async def _give_up(self, run: RunRecord) -> bool:
        """Pause a run whose rounds of sampling brought no group with variance; ResumeRun begins new rounds."""
        config = run.config

        def mutation(connection: Connection) -> str:
            dropped = steps.zero_variance(connection, self._run)
            if steps.ready_groups(connection, self._run, 1) or not rounds_are_over(config, 0, dropped):
                return ""
            steps.begin_rounds(connection, self._run)
            return (
                f"{dropped} groups since the step before had equal rewards, which is max_sampling_rounds ="
                f" {config.max_sampling_rounds} rounds of groups_per_step = {config.groups_per_step}: there is nothing"
                " to learn from; change the prompts or the rewards, then call ResumeRun"
            )

        if reason := await self._shared.store.write(mutation):
            await self._pause(reason)
        return bool(reason)

    def _look(self, connection: Connection) -> tuple[RunRecord, VersionRecord, Batch | None, int, int]:
        run, batch = runs.find_run(connection, self._run), steps.open_batch(connection, self._run)
        ready = len(steps.ready_groups(connection, self._run, run.config.groups_per_step))
        dropped = steps.zero_variance(connection, self._run)
        return run, runs.newest_version(connection, self._run), batch, ready, dropped

    async def _next_batch(self, run: RunRecord) -> Batch | None:
        def mutation(connection: Connection) -> tuple[Batch | None, Closed]:
            closed = Closed()
            return steps.form_batch(connection, self._run, run.config, self._shared.fence, closed), closed

        batch, closed = await self._shared.store.write(mutation)
        self._shared.publish(self._run, closed)
        if batch is not None:
            self._shared.batched(self._run, batch.group_ids)
        return batch

    async def _train(self, run: RunRecord, batch: Batch) -> None:
        fence = self._shared.fence
        if not await self._shared.store.write(lambda connection: steps.begin_training(connection, batch, fence)):
            return
        data = await self._shared.store.read(lambda connection: batches.load(connection, batch))
        folder = version_folder(self._run, batch.version)
        wait = max(0.0, time.time() - (self._waiting_since or time.time()))
        begun = time.monotonic()
        try:
            result = await self._step(run, data, folder)
        except (TrainerFailure, TrainerDiedError) as error:
            await self._pause(f"step {batch.step} failed: {error}")
            return
        seconds = time.monotonic() - begun
        noise = noise_of(run.config, batch.step, batch.version)
        metrics = batches.report_metrics(data, result.metrics, noise.sigma, run.config.groups_per_step, seconds)
        phases = {**result.phase_seconds, "sample_wait": wait}
        now = time.time()
        report = StepReport(self._run, batch.step, batch.version, metrics, phases, now, run.state)
        version = VersionRecord(
            run=self._run,
            version=batch.version,
            parent=batch.parent,
            step=batch.step,
            noise=noise,
            state=VersionState.STAGED,
            adapter_sha256=result.adapter_sha256,
            adapter_bytes=result.adapter_bytes,
            created_at=now,
        )
        await self._commit(batch, version, folder, result, report)

    async def _step(self, run: RunRecord, data: batches.BatchData, folder: str) -> StepResult:
        out = self._shared.options.state_dir / folder
        request = TrainStep(
            run=self._run,
            config=trainer_config(run.config, self._shared.options),
            step=data.batch.step,
            parent_dir=str(self._shared.options.state_dir / data.parent_folder),
            out_dir=str(out),
            seed=data.batch.seed,
            groups=batches.trainer_groups(data),
        )
        reply = await self._shared.trainer.call(
            request,
            attempts=self._shared.options.trainer_attempts,
            # A trainer that died after writing, or a learner that died before committing, left this behind.
            before=lambda: _clear(out),
        )
        assert isinstance(reply, StepResult)
        return reply

    async def _commit(
        self, batch: Batch, version: VersionRecord, folder: str, result: StepResult, report: StepReport
    ) -> None:
        trained = [
            Trained(r.rollout_id, r.advantage, r.mean_ratio, r.clipped_share, r.filtered) for r in result.rollouts
        ]
        fence = self._shared.fence

        def mutation(connection: Connection) -> Closed:
            ids = steps.commit_step(connection, batch, fence, version, folder, trained, report)
            return rewards.closed_by_training(connection, ids)

        try:
            closed = await self._shared.write_patiently(mutation)
        except FencedError as error:
            _log.warning("step discarded: %s", error)
            _clear(self._shared.options.state_dir / folder)
            return
        self._shared.publish(self._run, closed)
        for _group in batch.group_ids:
            self._shared.observer.group_closed(self._run, "trained")

    async def _promote(self, staged: VersionRecord) -> None:
        folder, trained, probes = await self._shared.store.read(lambda connection: self._probes(connection, staged))
        try:
            live = await self._promotion.promote(staged, self._shared.options.state_dir / folder, probes)
        except (TrainerFailure, TrainerDiedError) as error:
            await self._pause(f"the canary of version {staged.version} failed in the trainer: {error}")
            return
        except NotRunningError:
            self._pulse.waiting_for = ""
            return
        except UnansweredError as error:
            await self._canary_unanswered(error)
            return
        self._unanswered = 0
        if trained:
            self._rollbacks = 0 if live else self._rollbacks + 1
        if self._rollbacks >= MOST_ROLLBACKS:
            self._rollbacks = 0
            await self._pause(f"{MOST_ROLLBACKS} versions in a row were rolled back by the canary; see the log")
        run = await self._shared.store.read(lambda connection: runs.find_run(connection, self._run))
        await collect_versions(self._shared, self._run, run.config.max_lag)

    async def _canary_unanswered(self, error: UnansweredError) -> None:
        self._unanswered += 1
        self._pulse.waiting_for = str(error)
        if self._unanswered >= MOST_UNANSWERED:
            self._unanswered = 0
            await self._pause(f"{error}, {MOST_UNANSWERED} times in a row")
            return
        await asyncio.sleep(backoff(self._unanswered))

    def _probes(self, connection: Connection, staged: VersionRecord) -> tuple[str, bool, list[RolloutRecord]]:
        """Return the version's folder, whether a step made it, and rollouts to score: of its batch or the newest."""
        _record, folder = runs.find_version(connection, self._run, staged.version)
        batch = steps.batch_groups(connection, self._run, staged.version)
        count = self._shared.options.canary_probes
        ids = batch or newest_sampled_groups(connection, self._run, count)
        groups = [[r for r in group_rollouts(connection, i) if r.completion_ids] for i in ids]
        return folder, bool(batch), batches.probes(groups, count)

    async def _pause(self, reason: str) -> None:
        await pause(self._shared, self._run, reason)
        self._pulse.work.notify()


async def pause(shared: Shared, run: str, reason: str) -> None:
    """Pause a run that runs, for a reason that its users and the log get to read."""
    _log.error("run %s is paused: %s", run, reason)

    def mutation(connection: Connection) -> None:
        if runs.find_run(connection, run).state is RunState.RUNNING:
            runs.set_state(connection, run, RunState.PAUSED, reason)

    await shared.write_patiently(mutation)


async def expire_overdue(shared: Shared) -> None:
    """Close groups whose reward deadline has passed, once a half second, for ever."""
    while True:
        await asyncio.sleep(0.5)
        overdue = await shared.store.read(lambda connection: rewards.overdue_groups(connection, EXPIRED_AT_ONCE))
        for run in sorted({run for run, _group in overdue}):
            ids = [group_id for of, group_id in overdue if of == run]
            await _expire(shared, run, ids)


async def _expire(shared: Shared, run: str, group_ids: list[str]) -> None:
    closing = closing_of(shared.runs[run].config)

    def mutation(connection: Connection) -> Closed:
        closed = Closed()
        rewards.close_groups(connection, group_ids, closing, closed)
        return closed

    shared.publish(run, await shared.write_patiently(mutation))


async def keep_desired(shared: Shared) -> None:
    """Let versions go from policy servers once nothing is sampled with them: looked at every two seconds."""
    while True:
        await publish_desired(shared)
        await asyncio.sleep(2.0)


def backoff(failures: int) -> float:
    """Return how many seconds to wait after so many failures in a row."""
    return float(min(FAULT_BACKOFF_SECONDS * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS))


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
