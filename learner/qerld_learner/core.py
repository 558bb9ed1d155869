"""The learner: what `api/` calls, and nothing else. Every mutation is durable when its call returns.

One `Learner` a process. It owns the store, the trainer process, the attached policy servers and one control loop a run;
this module only wires them together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .errors import Violation
from .leases import LeaseQueue
from .observer import Observer
from .records import (
    CheckedOutcome,
    GroupRecord,
    GroupState,
    Outcome,
    OutcomeAnswer,
    PromptSpec,
    Receipt,
    ReplicaHello,
    RolloutRecord,
    RunConfig,
    RunRecord,
    SampleEvent,
    StepReport,
    TrajectorySpec,
    VersionRecord,
)
from .replicas import ReplicaInfo, ReplicaSession


@dataclass(frozen=True)
class LearnerOptions:
    """Options of the process; times in seconds.

    Attributes:
        state_dir: Folder of the store, the versions and the lock.
        base_model: Folder of the NVFP4 checkpoint that policy servers serve, too.
        store_url: SQLAlchemy URL; None means SQLite in `state_dir`.
        dtype: Number format of the trainer; policy servers must use the same.
        device: Device of the trainer, "cpu" or "cuda".
        token_budget: Tokens in one micro-batch of the trainer.
        cache_dequantized: Keep the base's weights dequantised in the trainer.
        activation_checkpointing: Recompute layers in the trainer's backward.
        trainer_threads: OMP threads of the trainer; None leaves the environment's.
        admission_timeout: How long Sample waits for room in a run's buffer.
        admission_retry: RetryInfo of a Sample that found no room.
        lease: How long a reward worker may keep a rollout, unless it says otherwise.
        keep_versions: Newest versions whose folders are kept, beside pinned and referenced ones.
        canary_probes: Rollouts of the trained batch that the canary scores.
        trainer_attempts: Trainer deaths in one step after which the run is paused.
        drain: How long `close` lets a training step go on before it stops the trainer.
    """

    state_dir: Path
    base_model: Path
    store_url: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    token_budget: int = 4096
    cache_dequantized: bool = False
    activation_checkpointing: bool = False
    trainer_threads: int | None = None
    admission_timeout: float = 30.0
    admission_retry: float = 2.0
    lease: float = 60.0
    keep_versions: int = 6
    canary_probes: int = 4
    trainer_attempts: int = 3
    drain: float = 5.0


@dataclass(frozen=True)
class ModelInfo:
    """The base model as policy servers must have it; `max_model_len` is the attached servers' smallest, if any."""

    folder: Path
    base_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    max_model_len: int | None


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

    @classmethod
    async def open(cls, options: LearnerOptions, observer: Observer | None = None) -> Learner:
        """Open the store, sweep what no row references, start the trainer and go on with every run.

        Raises `PreconditionError` when another learner has the folder or the base model is another one.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Stop loops, trainer and store. What was acknowledged is durable; sampling goes on at the next start."""
        raise NotImplementedError

    @property
    def model(self) -> ModelInfo:
        """The base model."""
        raise NotImplementedError

    # Runs

    def check_run_config(self, config: RunConfig) -> list[Violation]:
        """Return everything wrong with a configuration; field paths as in `qerld.v1.RunConfig`."""
        raise NotImplementedError

    async def create_run(
        self, name: str, request_id: str, body_hash: str, config: RunConfig, initial_adapter: bytes = b""
    ) -> RunRecord:
        """Create a run; its version 0 is live when this returns."""
        raise NotImplementedError

    async def get_run(self, name: str) -> RunRecord:
        """Return a run, or raise `NotFoundError`."""
        raise NotImplementedError

    async def list_runs(self) -> list[RunRecord]:
        """Return all runs, oldest first."""
        raise NotImplementedError

    async def pause_run(self, name: str, request_id: str, body_hash: str, reason: str) -> RunRecord:
        """Stop training and new sampling; outcomes are still taken. A step in progress is finished."""
        raise NotImplementedError

    async def resume_run(self, name: str, request_id: str, body_hash: str) -> RunRecord:
        """Go on; an unfinished batch is trained first."""
        raise NotImplementedError

    async def statuses(self) -> list[RunStatus]:
        """Return the buffer of every run, for metrics and `watch`."""
        raise NotImplementedError

    # Rollouts

    def sample(self, run: str, request_id: str, body_hash: str, prompt: PromptSpec) -> AsyncIterator[SampleEvent]:
        """Sample one group: `GroupOpened`, then deltas and finished rollouts, each durable before it is yielded.

        Closing the iterator does not cancel the group. The same request id and body replays the same group.
        Raises `RetryLaterError` when the run's buffer stays full.
        """
        raise NotImplementedError

    async def submit_prompts(
        self, run: str, request_id: str, body_hash: str, prompts: Sequence[PromptSpec]
    ) -> list[str]:
        """Store prompts that are sampled as the buffer has room; returns their group ids."""
        raise NotImplementedError

    async def import_group(
        self, run: str, request_id: str, body_hash: str, prompt: PromptSpec, trajectories: Sequence[TrajectorySpec]
    ) -> GroupRecord:
        """Store a group that was sampled elsewhere; it awaits rewards like any other."""
        raise NotImplementedError

    async def get_rollout(self, rollout_id: str) -> RolloutRecord:
        """Return a rollout, or raise `NotFoundError`."""
        raise NotImplementedError

    async def list_groups(
        self, run: str, state: GroupState | None, page_size: int, page_token: str
    ) -> tuple[list[GroupRecord], str]:
        """Return a page of groups, newest first, and the next page's token ("" on the last)."""
        raise NotImplementedError

    # Rewards

    async def submit_outcomes(
        self, run: str, request_id: str, body_hash: str, outcomes: Sequence[Outcome]
    ) -> list[OutcomeAnswer]:
        """Store outcomes and answer each, after COMMIT. Fields of rejections are like `outcomes[2].reward`."""
        raise NotImplementedError

    async def check_outcomes(self, run: str, outcomes: Sequence[Outcome]) -> list[CheckedOutcome]:
        """Say what `submit_outcomes` would answer, with every problem and the would-be advantages."""
        raise NotImplementedError

    async def receipt(self, rollout_id: str) -> Receipt:
        """Say what became of a rollout."""
        raise NotImplementedError

    def watch_receipts(self, run: str, rollout_ids: Sequence[str] = ()) -> AsyncIterator[Receipt]:
        """Yield receipts as they become final; with ids those already final first, ending when all are."""
        raise NotImplementedError

    def lease_rollouts(self, run: str, worker: str, lease: float | None = None) -> LeaseQueue:
        """Return a worker's queue of finished rollouts without an outcome: `add_credits`, iterate, `close`."""
        raise NotImplementedError

    # Versions

    async def get_version(self, run: str, version: int | None = None) -> VersionRecord:
        """Return a version, or the live one."""
        raise NotImplementedError

    async def list_versions(self, run: str, page_size: int, page_token: str) -> tuple[list[VersionRecord], str]:
        """Return a page of versions, newest first, and the next page's token ("" on the last)."""
        raise NotImplementedError

    def watch_live(self, run: str) -> AsyncIterator[VersionRecord]:
        """Yield the live version now and at each change."""
        raise NotImplementedError

    async def adapter_file(self, run: str, version: int, name: str) -> tuple[Path, str]:
        """Return path and SHA-256 of `adapter_model.safetensors` or `adapter_config.json` of a version."""
        raise NotImplementedError

    def watch_reports(self, run: str, after_step: int | None = None) -> AsyncIterator[StepReport]:
        """Yield stored reports after a step, then new ones; without a step only new ones."""
        raise NotImplementedError

    # Policy servers

    async def attach(self, hello: ReplicaHello) -> ReplicaSession:
        """Take a policy server in: `session.desired()`, `await session.report(...)`, `await session.close()`.

        Raises `PreconditionError` naming what differs: base, tokenizer, chat template, dtype, slots or rank.
        """
        raise NotImplementedError

    def replicas(self) -> list[ReplicaInfo]:
        """Return the attached policy servers."""
        raise NotImplementedError
