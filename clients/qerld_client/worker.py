"""State of a reward stream over its connections, shared by the sync and the asyncio worker; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qerld.v1 import common_pb2, reward_pb2

from qerld_client.requests import duration, new_request_id

MAX_BATCH = 256
"""Most outcomes of one message."""


class WorkerState:
    """Credits, leases that are held, outcomes to send, and batches that are not answered yet.

    Attributes:
        accepted, duplicate, rejected: Outcomes by answer.
    """

    def __init__(self, run: str, worker: str, credits: int, lease: float | None, limit: int | None = None) -> None:
        self._open = reward_pb2.OpenStream(run=run, worker=worker, lease=duration(lease))
        self._credits, self._limit = credits, limit
        self._unanswered: dict[str, reward_pb2.OutcomeBatch] = {}
        self._ready: list[reward_pb2.Outcome] = []
        self._freed = self._held = 0
        self.accepted = self.duplicate = self.rejected = 0

    @property
    def answered(self) -> int:
        return self.accepted + self.duplicate + self.rejected

    @property
    def pending(self) -> bool:
        """Whether there is something to send."""
        return bool(self._ready or self._freed)

    def ending(self, stopped: bool) -> bool:
        """Whether to take no more rollouts: told so, or the limit is reached."""
        return stopped or (self._limit is not None and self.answered >= self._limit)

    def done(self, stopped: bool) -> bool:
        """Whether to end: no more are taken, and every rollout that was has its outcome stored."""
        return self.ending(stopped) and self._held == 0

    def opening(self) -> Iterator[reward_pb2.StreamRewardsRequest]:
        """Yield what a new connection begins with: batches without an answer go again, under their request ids."""
        self._freed = 0
        yield reward_pb2.StreamRewardsRequest(open=self._open)
        for batch in list(self._unanswered.values()):
            yield reward_pb2.StreamRewardsRequest(outcomes=batch)
        room = self._credits - self._held
        if room > 0:
            yield self._credit(room)

    def next_messages(self, stopped: bool) -> list[reward_pb2.StreamRewardsRequest]:
        """Return what is to be sent now: scored rollouts, and credits for those that were answered."""
        messages = []
        if self._ready:
            messages.append(self._batch(self._ready[:MAX_BATCH]))
            del self._ready[:MAX_BATCH]
        if self._freed and not self.ending(stopped):
            messages.append(self._credit(self._freed))
        self._freed = 0
        return messages

    def leased(self) -> None:
        """A rollout came."""
        self._held += 1

    def scored(self, outcome: reward_pb2.Outcome) -> None:
        """A rollout has its outcome."""
        self._ready.append(outcome)

    def answer(self, answer: reward_pb2.BatchAnswer) -> None:
        """Take an answer, which frees as many credits; one that comes twice frees none."""
        if self._unanswered.pop(answer.request_id, None) is None:
            return
        answers = [item.answer for item in answer.answers]
        self.accepted += answers.count(common_pb2.ANSWER_ACCEPTED)
        self.duplicate += answers.count(common_pb2.ANSWER_DUPLICATE)
        self.rejected += answers.count(common_pb2.ANSWER_REJECTED)
        self._held -= len(answers)
        self._freed += len(answers)

    def _credit(self, count: int) -> reward_pb2.StreamRewardsRequest:
        return reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=count))

    def _batch(self, outcomes: Sequence[reward_pb2.Outcome]) -> reward_pb2.StreamRewardsRequest:
        """Return the message with these outcomes, and remember it until it is answered."""
        batch = reward_pb2.OutcomeBatch(request_id=new_request_id(), outcomes=outcomes)
        self._unanswered[batch.request_id] = batch
        return reward_pb2.StreamRewardsRequest(outcomes=batch)
