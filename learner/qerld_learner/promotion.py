"""From STAGED to LIVE: policy servers load a version, a canary compares log-probabilities, and it goes live or back.

The canary scores a few rollouts of the batch that made the version, without noise and at temperature 1, once by the
trainer and once by every server that has it. A server that differs is quarantined; when none agrees, the version is
rolled back: a new version republishes its parent's weights. When none answers there is no verdict. While the servers
load, the trainer scores the same rollouts under the versions that sampled them (`behaviour_gap`). No version of a run
that is paused changes its state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
from sqlalchemy import Connection

from .held_out import due, held_out_metrics
from .records import RolloutRecord, RunRecord, RunState, StepReport, VersionRecord, VersionState
from .replicas import Replica, ReplicaLostError
from .run_options import canary_tolerance
from .scoring import behaviour_gap, mean_gap, policy_logprobs, trainer_scores
from .shared import Shared
from .store import runs, steps
from .store.deletion import complete_run
from .store.rewards import Closed
from .versions import publish_desired

_log = logging.getLogger(__name__)

# The server cannot score the probes, which says nothing about the version.
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)

# How often a run's evaluation looks whether the run was paused.
PAUSE_LOOK_SECONDS = 1.0


class NotRunningError(Exception):
    """The run was paused meanwhile; its version stays as it is."""


class UnansweredError(Exception):
    """Every server that had the version was gone before it answered the canary."""


@dataclass(frozen=True)
class Verdict:
    """What the canary found: the largest gap among the servers that agree (or among all), and who does not."""

    gap: float
    passed: bool
    failures: tuple[str, ...]


def fitting(probes: Sequence[RolloutRecord], replicas: Sequence[Replica]) -> list[RolloutRecord]:
    """Return the probes that every server can score: an imported rollout may be longer than a server's context."""
    limit = min((replica.hello.max_model_len for replica in replicas), default=0)
    return [probe for probe in probes if len(probe.prompt_ids) + len(probe.completion_ids) <= limit]


class Promotion:
    """Promotes the staged version of one run."""

    def __init__(self, shared: Shared, run: str) -> None:
        self._shared = shared
        self._run = run

    async def promote(self, staged: VersionRecord, folder: Path, probes: Sequence[RolloutRecord]) -> bool:
        """Bring a version live, waiting for a server as long as it takes; returns False when it was rolled back.

        Raises `NotRunningError` and `UnansweredError`: then the version waits for another attempt.
        """
        run = await self._shared.store.read(lambda connection: runs.find_run(connection, self._run))
        begun = time.time()
        await publish_desired(self._shared)
        behaviour = await behaviour_gap(self._shared, run, probes)
        ready = await self._loaded(staged)
        loaded = time.time()
        if staged.state is VersionState.STAGED:
            await self._shared.write_patiently(lambda c: self._begin_canary(c, staged.version))
        probes = fitting(probes, ready)
        verdict = await self._canary(run, staged, folder, probes, ready)
        self._shared.observer.canary_scored(self._run, verdict.gap, verdict.passed)
        extra = {
            "swap_seconds": max((r.load_seconds(self._run, staged.version) for r in ready), default=0.0),
            "promote_wait_seconds": loaded - begun,
        }
        if probes:
            extra["logprob_gap"] = verdict.gap
        if behaviour is not None:
            extra["behaviour_gap"] = behaviour
        phases = {"promote": time.time() - begun}
        if verdict.passed:
            if await self._due(run, staged):
                extra |= await self._held_out(run, staged.version)
                phases["evaluate"] = time.time() - begun - phases["promote"]
            await self._go_live(staged, extra, phases)
        else:
            await self._go_back(staged, verdict, extra, phases)
        return verdict.passed

    async def _due(self, run: RunRecord, staged: VersionRecord) -> bool:
        """Whether to evaluate now: a version without a report republishes weights that were evaluated."""
        if not due(run.config.evaluation, staged.step, run.config.max_steps):
            return False
        report = await self._shared.store.read(lambda c: steps.find_report(c, self._run, staged.version))
        return report is not None

    async def _held_out(self, run: RunRecord, version: int) -> Mapping[str, float]:
        """Return the metrics of the evaluation; raises `NotRunningError` as soon as the run is paused."""
        working = asyncio.create_task(held_out_metrics(self._shared, run, version))
        try:
            while not (await asyncio.wait({working}, timeout=PAUSE_LOOK_SECONDS))[0]:
                await self._shared.store.read(self._require_running)
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _loaded(self, staged: VersionRecord) -> list[Replica]:
        """Wait until every server that can has loaded the version; at least one, unless all have refused."""
        pool = self._shared.pool
        pulse = self._shared.runs[self._run]
        while True:
            seen = pool.changed.count
            await self._shared.store.read(self._require_running)
            replicas = [r for r in pool.all() if not r.quarantine and not r.reported.error]
            ready = [r for r in replicas if r.serves(self._run, staged.version)]
            refused = [r for r in replicas if r.refusal(self._run, staged.version)]
            if replicas and len(ready) + len(refused) == len(replicas):
                pulse.waiting_for = ""
                return ready
            have = f"policy servers to load version {staged.version}: {len(ready)} of {len(replicas)} have it"
            none = f"a policy server for version {staged.version}; {pool.obstacle() or 'none is attached and healthy'}"
            pulse.waiting_for = have if replicas else none
            await pool.changed.wait(seen, at_most=1.0)

    def _require_running(self, connection: Connection) -> RunRecord:
        run = runs.find_run(connection, self._run)
        if run.state is not RunState.RUNNING:
            raise NotRunningError
        return run

    def _begin_canary(self, connection: Connection, version: int) -> None:
        self._require_running(connection)
        runs.set_version_state(connection, self._run, version, VersionState.CANARY)

    async def _canary(
        self,
        run: RunRecord,
        staged: VersionRecord,
        folder: Path,
        probes: Sequence[RolloutRecord],
        ready: Sequence[Replica],
    ) -> Verdict:
        """Return the verdict; raises `UnansweredError` when every server went away before it could say anything."""
        refusals = [
            f"{r.hello.replica_id}: {text}"
            for r in self._shared.pool.all()
            if (text := r.refusal(self._run, staged.version))
        ]
        if not ready:
            return Verdict(math.inf, False, tuple(refusals))
        ours = await trainer_scores(self._shared, run, folder, probes)
        tolerance = canary_tolerance(run.config, self._shared.options.dtype)
        gaps: list[tuple[Replica, float | None]] = []

        async def ask(replica: Replica) -> None:
            try:
                gaps.append((replica, await self._gap(replica, staged.version, probes, ours)))
            except ReplicaLostError as error:
                _log.warning("policy server %s left during the canary: %s", replica.hello.replica_id, error)

        await asyncio.gather(*map(ask, ready))
        if not gaps:
            names = ", ".join(replica.hello.replica_id for replica in ready)
            raise UnansweredError(f"no policy server answered the canary ({names} went away)")
        return self._judge(gaps, tolerance, refusals)

    def _judge(self, gaps: Sequence[tuple[Replica, float | None]], tolerance: float, refusals: list[str]) -> Verdict:
        known = [(replica, gap) for replica, gap in gaps if gap is not None]
        good = [gap for _replica, gap in known if gap <= tolerance]
        bad = [(replica, gap) for replica, gap in known if not gap <= tolerance]
        failures = [f"{r.hello.replica_id}: gap {gap:.3g} nats a token, the limit is {tolerance:.3g}" for r, gap in bad]
        passed = bool(good) or not known
        if passed:
            for (replica, _gap), why in zip(bad, failures, strict=True):
                replica.quarantine = f"canary failed: {why}"
                _log.error("policy server quarantined: %s", replica.quarantine)
        gap = max(good) if good else max((gap for _r, gap in bad), default=0.0)
        return Verdict(gap, passed, tuple(refusals + failures))

    async def _gap(
        self, replica: Replica, version: int, probes: Sequence[RolloutRecord], ours: list[list[float]]
    ) -> float | None:
        """Return the gap, or None when the server refuses the probes; raises `ReplicaLostError`."""
        if not probes:
            return 0.0
        try:
            pairs = [(probe.prompt_ids, probe.completion_ids) for probe in probes]
            theirs = await replica.client.score(self._run, version, pairs)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                raise ReplicaLostError(f"{error.code().name}: {error.details()}") from error
            _log.warning("policy server %s refuses the canary: %s", replica.hello.replica_id, error.details())
            return None
        # A server scores every token of a completion.
        return mean_gap(ours, [policy_logprobs(probe, one) for probe, one in zip(probes, theirs, strict=False)])

    async def _go_live(self, staged: VersionRecord, extra: dict[str, float], phases: Mapping[str, float]) -> None:
        def mutation(connection: Connection) -> tuple[StepReport | None, list[str], Closed]:
            run = self._require_running(connection)
            runs.make_live(connection, self._run, staged.version)
            last, closed, left_over = run.config.max_steps, Closed(), list[str]()
            if last and staged.step >= last:
                left_over = complete_run(connection, self._run, f"max_steps = {last} reached", closed)
            return self._publish(connection, staged, extra, phases), left_over, closed

        report, left_over, closed = await self._shared.write_patiently(mutation)
        self._shared.batched(self._run, left_over)
        self._shared.publish(self._run, closed)
        self._shared.observer.version_live(self._run, staged.version, sum(phases.values()))
        await self._tell(report)

    async def _go_back(
        self, staged: VersionRecord, verdict: Verdict, extra: dict[str, float], phases: Mapping[str, float]
    ) -> None:
        why = "; ".join(verdict.failures)

        def mutation(connection: Connection) -> tuple[StepReport | None, Closed, int]:
            self._require_running(connection)
            closed = Closed()
            groups = len(steps.batch_groups(connection, self._run, staged.version))
            if steps.find_report(connection, self._run, staged.version) is not None:
                again = steps.roll_back(connection, staged, closed)
                _log.warning("version %d of run %s republishes version %d", again.version, self._run, again.parent)
            else:
                # The republished parent, which serves well under its own name, failed too: not the weights' fault.
                runs.set_version_state(connection, self._run, staged.version, VersionState.REVERTED)
                runs.set_state(connection, self._run, RunState.PAUSED, f"the canary of a rollback failed: {why}")
            return self._publish(connection, staged, extra | {"reverted": 1.0}, phases), closed, groups

        report, closed, groups = await self._shared.write_patiently(mutation)
        _log.error("version %d of run %s was rolled back: %s", staged.version, self._run, why)
        self._shared.publish(self._run, closed)
        for _group in range(groups):
            self._shared.observer.group_closed(self._run, "reverted")
        await self._tell(report)

    def _publish(
        self, connection: Connection, version: VersionRecord, extra: dict[str, float], phases: Mapping[str, float]
    ) -> StepReport | None:
        report = steps.find_report(connection, self._run, version.version)
        if report is None:
            return None
        state = runs.find_run(connection, self._run).state
        metrics = {**report.metrics, **extra}
        all_phases = {**report.phase_seconds, **phases}
        report = replace(report, metrics=metrics, phase_seconds=all_phases, at=time.time(), run_state=state)
        steps.publish_report(connection, report)
        return report

    async def _tell(self, report: StepReport | None) -> None:
        pulse = self._shared.runs[self._run]
        if report is not None:
            self._shared.observer.step_reported(report)
            pulse.reported.notify()
        pulse.live.notify()
        pulse.work.notify()
        await publish_desired(self._shared)
