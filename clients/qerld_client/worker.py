"""State of a reward stream over its connections, shared by the sync and the asyncio worker; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qerld.v1 import common_pb2, reward_pb2

from qerld_client.requests import duration, new_request_id

MAX_BATCH = 256
"""Most outcomes of one message."""


class WorkerState:
    """Credits, leases that are held, and batches that are not answered yet.

    Attributes:
        accepted, duplicate, rejected: Outcomes by answer.
    """

    def __init__(self, run: str, worker: str, credits: int, lease: float | None) -> None:
        self._open = reward_pb2.OpenStream(run=run, worker=worker, lease=duration(lease))
        self._credits = credits
        self._unanswered: dict[str, reward_pb2.OutcomeBatch] = {}
        self._held = 0
        self.accepted = self.duplicate = self.rejected = 0

    @property
    def answered(self) -> int:
        return self.accepted + self.duplicate + self.rejected

    @property
    def idle(self) -> bool:
        """Whether every lease was answered."""
        return self._held == 0

    def opening(self) -> Iterator[reward_pb2.StreamRewardsRequest]:
        """Yield what a new connection begins with: batches without an answer go again, under their request ids."""
        yield reward_pb2.StreamRewardsRequest(open=self._open)
        for batch in list(self._unanswered.values()):
            yield reward_pb2.StreamRewardsRequest(outcomes=batch)
        room = self._credits - self._held
        if room > 0:
            yield self.credit(room)

    def credit(self, count: int) -> reward_pb2.StreamRewardsRequest:
        return reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=count))

    def leased(self) -> None:
        self._held += 1

    def batch(self, outcomes: Sequence[reward_pb2.Outcome]) -> reward_pb2.StreamRewardsRequest:
        """Return the message with these outcomes, and remember it until it is answered."""
        batch = reward_pb2.OutcomeBatch(request_id=new_request_id(), outcomes=outcomes)
        self._unanswered[batch.request_id] = batch
        return reward_pb2.StreamRewardsRequest(outcomes=batch)

    def answer(self, answer: reward_pb2.BatchAnswer) -> int:
        """Take an answer; returns how many credits it frees (none for an answer that came twice)."""
        if self._unanswered.pop(answer.request_id, None) is None:
            return 0
        answers = [item.answer for item in answer.answers]
        self.accepted += answers.count(common_pb2.ANSWER_ACCEPTED)
        self.duplicate += answers.count(common_pb2.ANSWER_DUPLICATE)
        self.rejected += answers.count(common_pb2.ANSWER_REJECTED)
        self._held -= len(answers)
        return len(answers)
