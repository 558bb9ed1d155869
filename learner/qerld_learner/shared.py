"""What the parts of the learner share: options, store, policy servers, trainer, and who is told of changes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from .buffer import Buffer
from .errors import NotFoundError, RetryLaterError
from .groups import Verdict
from .leases import LeaseBoard
from .observer import Observer
from .options import LearnerOptions
from .records import Receipt, RunConfig
from .replicas import ReplicaPool
from .signals import Broadcast, Signal
from .store import Store
from .store.rewards import Closed
from .store.writer import Mutation
from .trainer_host import TrainerHost

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RunPulse:
    """What is in memory of one run; everything else is in the store."""

    def __init__(self, name: str, config: RunConfig) -> None:
        self.config = config
        self.buffer = Buffer(name, config)
        self.leases = LeaseBoard()
        self.leases_filled = False
        # The control loop's alarm clock: outcomes, verdicts, pause and resume, policy servers.
        self.work = Signal()
        self.queued = Signal()
        self.live = Signal()
        self.reported = Signal()
        self.waiting_for = ""


class Pulses(dict[str, RunPulse]):
    """The runs in memory, by name: a run that is deleted meanwhile is unknown, wherever it is looked up."""

    def __missing__(self, run: str) -> RunPulse:
        raise NotFoundError(f"unknown run {run!r}; ListRuns lists those there are")


@dataclass
class Shared:
    """One a process. `fence` is this process's number: commits of an earlier process's batches are refused."""

    options: LearnerOptions
    observer: Observer
    store: Store
    pool: ReplicaPool
    trainer: TrainerHost
    fence: int
    runs: Pulses = field(default_factory=Pulses)
    # How many evaluations need a (run, version): it stays on policy servers, and its files stay.
    evaluated: Counter[tuple[str, int]] = field(default_factory=Counter)
    # A receipt of None: the run was deleted, no more will come.
    receipts: Broadcast[tuple[str, Receipt | None]] = field(default_factory=Broadcast)

    @contextmanager
    def evaluating(self, run: str, version: int) -> Iterator[None]:
        """Keep a version for an evaluation, beyond its time in training."""
        self.evaluated[run, version] += 1
        try:
            yield
        finally:
            self.evaluated[run, version] -= 1
            if not self.evaluated[run, version]:
                del self.evaluated[run, version]

    def evaluated_of(self, run: str) -> tuple[int, ...]:
        """Return the versions of a run that are being evaluated, the first one first: it keeps its slot."""
        return tuple(version for of, version in self.evaluated if of == run)

    def publish(self, run: str, closed: Closed) -> None:
        """Tell everyone what a committed transaction closed."""
        pulse = self.runs[run]
        for receipt in closed.receipts:
            pulse.leases.settled(receipt.rollout_id)
            self.receipts.publish((run, receipt))
        for group_id, judged in closed.verdicts.items():
            self.observer.group_closed(run, judged.value)
            if judged is not Verdict.READY:
                pulse.buffer.remove(group_id)
        if closed.verdicts:
            pulse.work.notify()

    def batched(self, run: str, group_ids: Iterable[str]) -> None:
        """Groups left the buffer, for a batch or with their run: there is room for new ones."""
        for group_id in group_ids:
            self.runs[run].buffer.remove(group_id)

    def forget(self, run: str) -> None:
        """A run was deleted: whoever waits for something of it wakes up and finds that out."""
        pulse = self.runs.pop(run)
        pulse.leases.close()
        self.receipts.publish((run, None))
        for signal in (pulse.work, pulse.queued, pulse.live, pulse.reported):
            signal.notify()
        self.observer.run_deleted(run)

    def scored(self, run: str, rollout_ids: Iterable[str]) -> None:
        """Rollouts have outcomes: no worker needs them any more."""
        for rollout_id in rollout_ids:
            self.runs[run].leases.settled(rollout_id)

    async def write_patiently(self, mutation: Mutation[T]) -> T:
        """Write what must not be lost: while the disk is full, try again until there is room."""
        while True:
            try:
                return await self.store.write(mutation)
            except RetryLaterError as error:
                if error.unavailable:
                    raise
                _log.error("waiting for room on the disk: %s", error)
                await asyncio.sleep(error.retry_after)
