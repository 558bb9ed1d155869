"""The learner: what `api/` calls, and nothing else. Every mutation is durable when its call returns.

One `Learner` a process. It owns the store, the trainer process, the attached policy servers and one control loop a run;
this module only wires them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import Connection

from .creation import RunCreator, slots_of_all
from .deletion import RunDeleter
from .errors import InvalidRequestError, NotFoundError, PreconditionError, Violation
from .evaluation import EvaluationSpec, Take, evaluate
from .fingerprints import fingerprints_of
from .groups import closing_of, would_be_advantages
from .intake import Intake
from .leases import LeaseQueue
from .loop import RunLoop, expire_overdue, keep_desired, pause
from .observer import Observer
from .options import LearnerOptions, ModelInfo
from .outcomes import MAX_OUTCOMES
from .paging import page
from .records import (
    Answer,
    CheckedOutcome,
    GroupRecord,
    GroupState,
    Outcome,
    OutcomeAnswer,
    PromptSpec,
    Receipt,
    RolloutRecord,
    RunConfig,
    RunRecord,
    RunState,
    SampleEvent,
    StepReport,
    TrajectorySpec,
    VersionRecord,
)
from .replica_records import ReplicaHello
from .replicas import ReplicaInfo, ReplicaPool, ReplicaSession, check_hello
from .run_options import check_run_config
from .sampler import Sampler
from .shared import RunPulse, Shared
from .store import Store, rewards, rollouts, runs
from .store.requests import once
from .tasks import Tasks
from .trainer.client import TrainerProcess
from .trainer_host import TrainerHost
from .versions import adapter_file, damage_of_live, publish_desired, sweep
from .watching import watch_live, watch_receipts, watch_reports

__all__ = ["Learner", "LearnerOptions", "ModelInfo", "Observer", "ReplicaInfo", "ReplicaSession", "RunStatus"]


@dataclass(frozen=True)
class RunStatus:
    """How full a run's buffer is, in groups, and what it waits for ("" when it waits for nothing unusual)."""

    run: str
    state: str
    step: int
    live_version: int
    groups: dict[str, int] = field(default_factory=dict)
    capacity: int = 0
    waiting_for: str = ""


class Learner:
    """See the module; methods raise the errors of `errors.py`."""

    def __init__(self, shared: Shared, model: ModelInfo) -> None:
        """Use `Learner.open`."""
        self._shared = shared
        self._model = model
        self._creator = RunCreator(shared, model)
        self._sampler = Sampler(shared)
        self._intake = Intake(shared, self._sampler)
        self._tasks = Tasks()
        self._deleter = RunDeleter(shared, self._sampler, self._tasks)

    @classmethod
    async def open(cls, options: LearnerOptions, observer: Observer | None = None) -> Learner:
        """Open the store, sweep what no row references, start the trainer and go on with every run.

        Raises `ModelFolderError` when the base model is broken, `PreconditionError` when another learner has the folder
        or the base model is another one.
        """
        observer = observer or Observer()
        found = await fingerprints_of(options.base_model)
        model = ModelInfo(options.base_model, found.base, found.tokenizer, found.chat_template, None)
        loop = asyncio.get_running_loop()

        def on_commit(mutations: int, seconds: float) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(observer.writes_committed, mutations, seconds)

        store = await asyncio.to_thread(Store, options.state_dir, options.store_url, on_commit)
        fence = await store.write(lambda connection: runs.count_up(connection, "fence"))
        trainer = TrainerHost(TrainerProcess(threads=options.trainer_threads), observer)
        learner = cls(Shared(options, observer, store, ReplicaPool(), trainer, fence), model)
        await learner._go_on()
        return learner

    async def _go_on(self) -> None:
        await sweep(self._shared)
        for run in await self._shared.store.read(runs.all_runs):
            await self._pause_damaged(run)
            await self._adopt(run)
        self._tasks.for_ever("deadlines", lambda: expire_overdue(self._shared))
        self._tasks.for_ever("desired", lambda: keep_desired(self._shared))
        self._tasks.once("trainer", self._shared.trainer.start())

    async def _pause_damaged(self, run: RunRecord) -> None:
        if run.state is RunState.RUNNING and (damage := await damage_of_live(self._shared, run.name)):
            await pause(self._shared, run.name, damage)

    async def _adopt(self, run: RunRecord) -> None:
        """Take a run's memory up: its buffer, what of it is still to be sampled, its loops."""
        pulse = self._shared.runs[run.name] = RunPulse(run.name, run.config)

        def query(connection: Connection) -> tuple[list[rollouts.OpenGroup], list[str]]:
            return (
                rollouts.open_groups(connection, run.name, GroupState.SAMPLING),
                rollouts.buffered_groups(connection, run.name),
            )

        sampling, buffered = await self._shared.store.read(query)
        for group_id in buffered:
            pulse.buffer.add(group_id)
        for group in sampling:
            self._sampler.start(group)
        self._tasks.for_ever(f"loop-{run.name}", RunLoop(self._shared, run.name).drive)
        self._tasks.for_ever(f"queue-{run.name}", lambda: self._intake.admit_queued(run.name))

    async def close(self) -> None:
        """Stop loops, trainer and store. What was acknowledged is durable; sampling goes on at the next start."""
        await self._sampler.close()
        await self._tasks.cancel()
        self._shared.receipts.close()
        for pulse in self._shared.runs.values():
            pulse.leases.close()
        await self._shared.pool.close()
        await self._shared.trainer.stop()
        await asyncio.to_thread(self._shared.store.close)

    @property
    def model(self) -> ModelInfo:
        """The base model."""
        return replace(self._model, max_model_len=self._shared.pool.max_model_len())

    @property
    def trainer_pid(self) -> int | None:
        """Process id of the trainer, None while none runs."""
        return self._shared.trainer.pid

    # Runs

    def check_run_config(self, config: RunConfig) -> list[Violation]:
        """Return everything wrong with a configuration; field paths as in `qerld.v1.RunConfig`."""
        return check_run_config(config)

    async def create_run(
        self, name: str, request_id: str, body_hash: str, config: RunConfig, initial_adapter: bytes = b""
    ) -> RunRecord:
        """Create a run; its version 0 is live when this returns."""
        run, new = await self._creator.create(name, request_id, body_hash, config, initial_adapter)
        if new:
            await self._adopt(run)
            await publish_desired(self._shared)
        return run

    async def get_run(self, name: str) -> RunRecord:
        """Return a run, or raise `NotFoundError`."""
        return await self._shared.store.read(lambda connection: runs.find_run(connection, name))

    async def list_runs(self) -> list[RunRecord]:
        """Return all runs, oldest first."""
        return await self._shared.store.read(runs.all_runs)

    async def pause_run(self, name: str, request_id: str, body_hash: str, reason: str) -> RunRecord:
        """Stop training and new sampling; outcomes are still taken. A step in progress is finished."""
        return await self._steer(name, request_id, body_hash, lambda c: runs.pause(c, name, reason))

    async def resume_run(self, name: str, request_id: str, body_hash: str) -> RunRecord:
        """Go on; an unfinished batch is trained first. Raises `PreconditionError` when the live version is damaged."""
        if damage := await damage_of_live(self._shared, name):
            raise PreconditionError(damage)
        return await self._steer(name, request_id, body_hash, lambda c: runs.resume(c, name))

    async def delete_run(self, name: str, request_id: str, body_hash: str) -> None:
        """End a run: its slots are free, its open rollouts are CANCELLED. Rows, files and the name stay."""
        await self._deleter.delete(name, request_id, body_hash)

    async def _steer(
        self, name: str, request_id: str, body_hash: str, change: Callable[[Connection], None]
    ) -> RunRecord:
        def mutation(connection: Connection) -> RunRecord:
            runs.find_run(connection, name)
            once(connection, name, request_id, body_hash, lambda: change(connection))
            return runs.find_run(connection, name)

        run = await self._shared.store.write(mutation)
        self._shared.runs[name].work.notify()
        self._shared.runs[name].queued.notify()
        return run

    async def statuses(self) -> list[RunStatus]:
        """Return the buffer of every run, for metrics and `watch`."""

        def query(connection: Connection) -> list[tuple[RunRecord, dict[GroupState, int]]]:
            return [(run, rollouts.count_groups(connection, run.name)) for run in runs.all_runs(connection)]

        found = await self._shared.store.read(query)
        # A run that was stored this instant has no buffer yet.
        return [self._status(run, counts) for run, counts in found if run.name in self._shared.runs]

    def _status(self, run: RunRecord, counts: dict[GroupState, int]) -> RunStatus:
        pulse = self._shared.runs[run.name]
        groups = {state.value: count for state, count in counts.items()}
        return RunStatus(
            run.name, run.state.value, run.step, run.live_version, groups, pulse.buffer.capacity, pulse.waiting_for
        )

    # Rollouts

    def sample(self, run: str, request_id: str, body_hash: str, prompt: PromptSpec) -> AsyncIterator[SampleEvent]:
        """Sample one group: `GroupOpened`, then deltas and finished rollouts, each durable before it is yielded.

        Closing the iterator does not cancel the group. The same request id and body replays the same group.
        Raises `RetryLaterError` when the run's buffer stays full.
        """
        return self._intake.sample(run, request_id, body_hash, prompt)

    async def submit_prompts(
        self, run: str, request_id: str, body_hash: str, prompts: Sequence[PromptSpec]
    ) -> list[str]:
        """Store prompts that are sampled as the buffer has room; returns their group ids."""
        return await self._intake.submit_prompts(run, request_id, body_hash, prompts)

    async def import_group(
        self, run: str, request_id: str, body_hash: str, prompt: PromptSpec, trajectories: Sequence[TrajectorySpec]
    ) -> GroupRecord:
        """Store a group that was sampled elsewhere; it awaits rewards like any other."""
        return await self._intake.import_group(run, request_id, body_hash, prompt, trajectories)

    async def get_rollout(self, rollout_id: str) -> RolloutRecord:
        """Return a rollout, or raise `NotFoundError`."""
        return await self._shared.store.read(lambda connection: rollouts.find_rollout(connection, rollout_id))

    async def list_groups(
        self, run: str, state: GroupState | None, page_size: int, page_token: str
    ) -> tuple[list[GroupRecord], str]:
        """Return a page of groups, newest first, and the next page's token ("" on the last)."""
        below, limit = page(page_size, page_token)

        def query(connection: Connection) -> list[tuple[int, GroupRecord]]:
            runs.find_run(connection, run)
            return rollouts.page_of_groups(connection, run, state, below, limit + 1)

        found = await self._shared.store.read(query)
        token = str(found[limit - 1][0]) if len(found) > limit else ""
        return [group for _seq, group in found[:limit]], token

    # Rewards

    async def submit_outcomes(
        self, run: str, request_id: str, body_hash: str, outcomes: Sequence[Outcome]
    ) -> list[OutcomeAnswer]:
        """Store outcomes and answer each, after COMMIT. Fields of rejections are like `outcomes[2].reward`."""
        pulse = self._shared.runs[run]
        _check_count(outcomes)
        answers, closed, repeated = await self._shared.store.write(
            lambda c: rewards.submit(c, run, request_id, body_hash, outcomes, closing_of(pulse.config))
        )
        if not repeated:
            # A duplicate says that the rollout was scored before; so no worker keeps getting it.
            scored = [answer.rollout_id for answer in answers if answer.answer is not Answer.REJECTED]
            self._shared.scored(run, scored)
            self._shared.publish(run, closed)
        for kind in Answer:
            if count := sum(answer.answer is kind for answer in answers):
                self._shared.observer.outcomes_answered(run, kind.value, count)
        return answers

    async def check_outcomes(self, run: str, outcomes: Sequence[Outcome]) -> list[CheckedOutcome]:
        """Say what `submit_outcomes` would answer, with every problem and the would-be advantages."""
        config = self._shared.runs[run].config
        _check_count(outcomes)
        judged, stored = await self._shared.store.read(lambda c: rewards.dry_run(c, run, outcomes))
        advantages: dict[str, float] = {}
        for group in stored.values():
            advantages |= would_be_advantages(config, group)
        return [
            CheckedOutcome(j.outcome.rollout_id, j.answer, j.problems, advantages.get(j.outcome.rollout_id))
            for j in judged
        ]

    async def receipt(self, rollout_id: str) -> Receipt:
        """Say what became of a rollout."""
        found = await self._shared.store.read(lambda c: rollouts.find_receipts(c, [rollout_id]))
        if not found:
            raise NotFoundError(f"unknown rollout {rollout_id!r}; ListGroups lists the ids of a run's rollouts")
        return found[rollout_id]

    def watch_receipts(self, run: str, rollout_ids: Sequence[str] = ()) -> AsyncIterator[Receipt]:
        """Yield receipts as they become final; with ids those already final first, ending when all are."""
        return watch_receipts(self._shared, run, rollout_ids)

    def lease_rollouts(self, run: str, worker: str, lease: float | None = None) -> LeaseQueue:
        """Return a worker's queue of finished rollouts without an outcome: `add_credits`, iterate, `close`."""
        pulse = self._shared.runs[run]
        if not pulse.leases_filled:
            pulse.leases_filled = True
            self._tasks.once(f"leases-{run}", self._fill_leases(run, pulse))
        return pulse.leases.join(worker, self._shared.options.lease if lease is None else lease)

    async def _fill_leases(self, run: str, pulse: RunPulse) -> None:
        ids = await self._shared.store.read(lambda c: rollouts.unscored_rollouts(c, run))
        found = await self._shared.store.read(lambda c: rollouts.find_rollouts(c, ids))
        for rollout_id in ids:
            pulse.leases.offer(found[rollout_id])
        # Outcomes that came in between were settled before the offer.
        still = set(await self._shared.store.read(lambda c: rollouts.unscored_rollouts(c, run)))
        self._shared.scored(run, set(ids) - still)

    # Versions

    async def get_version(self, run: str, version: int | None = None) -> VersionRecord:
        """Return a version, or the live one."""
        return (await self._shared.store.read(lambda c: runs.find_version(c, run, version)))[0]

    async def list_versions(self, run: str, page_size: int, page_token: str) -> tuple[list[VersionRecord], str]:
        """Return a page of versions, newest first, and the next page's token ("" on the last)."""
        below, limit = page(page_size, page_token)
        found = await self._shared.store.read(lambda c: runs.page_of_versions(c, run, below, limit + 1))
        token = str(found[limit - 1].version) if len(found) > limit else ""
        return found[:limit], token

    async def evaluate(self, spec: EvaluationSpec, take: Take) -> None:
        """Complete prompts by a version without noise; see `evaluation.evaluate`."""
        await evaluate(self._shared, spec, take)

    def watch_live(self, run: str) -> AsyncIterator[VersionRecord]:
        """Yield the live version now and at each change."""
        return watch_live(self._shared, run)

    async def adapter_file(self, run: str, version: int, name: str) -> tuple[Path, str]:
        """Return path and SHA-256 of one of `ADAPTER_FILES` of a version."""
        return await adapter_file(self._shared, run, version, name)

    def watch_reports(self, run: str, after_step: int | None = None) -> AsyncIterator[StepReport]:
        """Yield stored reports after a step, then new ones; without a step only new ones."""
        return watch_reports(self._shared, run, after_step)

    # Policy servers

    async def attach(self, hello: ReplicaHello) -> ReplicaSession:
        """Take a policy server in: `session.desired()`, `await session.report(...)`, `await session.close()`.

        Raises `PreconditionError` naming what differs: base, tokenizer, chat template, dtype, slots or rank.
        """
        model = self._model
        expected = [
            ("base_sha256", hello.base_sha256, model.base_sha256),
            ("tokenizer_sha256", hello.tokenizer_sha256, model.tokenizer_sha256),
            ("chat_template_sha256", hello.chat_template_sha256, model.chat_template_sha256),
            ("dtype", hello.dtype, self._shared.options.dtype),
        ]
        records = await self._shared.store.read(runs.all_runs)
        rank = max((run.config.lora_rank for run in records), default=0)
        try:
            check_hello(hello, expected, await slots_of_all(self._shared), rank)
        except PreconditionError as error:
            self._shared.pool.refuse(hello, str(error))
            raise
        await publish_desired(self._shared)
        return await self._shared.pool.attach(hello)

    def replicas(self) -> list[ReplicaInfo]:
        """Return the attached policy servers, and then those that were refused lately."""
        return [*(replica.info() for replica in self._shared.pool.all()), *self._shared.pool.refused()]


def _check_count(outcomes: Sequence[Outcome]) -> None:
    if len(outcomes) > MAX_OUTCOMES:
        text = f"must be at most {MAX_OUTCOMES} a message, got {len(outcomes)}; send several messages"
        raise InvalidRequestError([Violation("outcomes", text)])
