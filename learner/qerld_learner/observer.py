"""What the learner tells whoever counts: `metrics.py` turns it into Prometheus metrics.

All calls come from the learner's event loop and must return at once.
"""

from __future__ import annotations

from .records import StepReport


class Observer:
    """Does nothing; subclasses override what they count. `run` is a run's name: a bounded label."""

    def step_reported(self, report: StepReport) -> None:
        """A version became live (or was reverted: then metric `reverted` is 1)."""

    def outcomes_answered(self, run: str, answer: str, count: int) -> None:
        """`count` outcomes got `answer` ("accepted", "duplicate", "rejected")."""

    def rollout_finished(self, run: str, tokens: int, finish_reason: str) -> None:
        """A rollout of `tokens` sampled tokens is durable; `finish_reason` is "failed" when sampling failed."""

    def group_closed(self, run: str, how: str) -> None:
        """A group left the buffer: "ready", "trained", "reverted" or a dropped receipt state."""

    def canary_scored(self, run: str, gap: float, passed: bool) -> None:
        """Mean |difference| of log-probabilities between a replica and the trainer, in nats a token."""

    def version_live(self, run: str, version: int, swap_seconds: float) -> None:
        """A version went live `swap_seconds` after it was committed."""

    def run_deleted(self, run: str) -> None:
        """A run was deleted; its name is not used again."""

    def trainer_died(self) -> None:
        """The trainer process ended by itself; it is started again."""

    def writes_committed(self, mutations: int, seconds: float) -> None:
        """One transaction of `mutations` mutations took `seconds`."""
