"""RewardService: outcomes in, receipts out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from qerld.v1 import reward_pb2, reward_pb2_grpc

from qerld_learner.api import convert, requests
from qerld_learner.api.checks import Checks
from qerld_learner.api.service import Context, Service, check_mutation, check_run, off_loop
from qerld_learner.api.streams import Outbox
from qerld_learner.errors import ConflictError, InvalidRequestError, NotFoundError, PreconditionError, Violation
from qerld_learner.leases import LeaseQueue
from qerld_learner.records import Answer, CheckedOutcome, Outcome, OutcomeAnswer

MAX_CREDITS = 4096
MAX_WATCHED = 4096
"""Rollouts that one WatchReceipts may name."""
MAX_BATCHES_IN_FLIGHT = 256
"""Outcome batches of one stream that wait for their commit; more are left in the transport."""


class Submission:
    """Outcomes of one message, split into those that are well formed and those rejected at the edge."""

    def __init__(self, outcomes: Sequence[reward_pb2.Outcome]) -> None:
        checks = Checks()
        requests.outcome_count(checks, outcomes)
        checks.done()
        self.outcomes: list[Outcome] = []
        self.positions: list[int] = []
        self.rejected: dict[int, OutcomeAnswer] = {}
        for position, message in enumerate(outcomes):
            outcome, (field, problem) = requests.outcome(message)
            if outcome is None:
                path = f"outcomes[{position}].{field}"
                self.rejected[position] = OutcomeAnswer(message.rollout_id, Answer.REJECTED, path, problem)
            else:
                self.outcomes.append(outcome)
                self.positions.append(position)

    def path(self, index: int, field: str) -> str:
        """Return the core's field of its outcome `index` as a path in the client's message."""
        return field.replace(f"outcomes[{index}]", f"outcomes[{self.positions[index]}]", 1)


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Takes outcomes over unary calls and streams, and says what became of rollouts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def SubmitRewards(
        self, request: reward_pb2.SubmitRewardsRequest, context: Context
    ) -> reward_pb2.SubmitRewardsResponse:
        # To its end even when the caller goes away: what is stored must reach the buffer, the leases and the receipts.
        answers = await asyncio.shield(self.submit(request))
        return reward_pb2.SubmitRewardsResponse(answers=map(convert.outcome_answer, answers))

    async def submit(self, request: reward_pb2.SubmitRewardsRequest) -> list[OutcomeAnswer]:
        """Return one answer an outcome, in order, after those that are accepted are durable."""
        check_mutation(request.run, request.request_id)
        submission = await off_loop(request, Submission, request.outcomes)
        answers = dict(submission.rejected)
        if submission.outcomes:
            digest = await self._service.body_hash(request)
            stored = await self._service.learner.submit_outcomes(
                request.run, request.request_id, digest, submission.outcomes
            )
            for index, answer in enumerate(stored):
                field = submission.path(index, answer.field)
                answers[submission.positions[index]] = OutcomeAnswer(
                    answer.rollout_id, answer.answer, field, answer.problem
                )
        else:
            await self._service.learner.get_run(request.run)
        if submission.rejected:
            self._service.metrics.outcomes_answered(request.run, Answer.REJECTED, len(submission.rejected))
        return [answers[position] for position in range(len(request.outcomes))]

    async def CheckRewards(
        self, request: reward_pb2.CheckRewardsRequest, context: Context
    ) -> reward_pb2.CheckRewardsResponse:
        check_run(request.run)
        submission = await off_loop(request, Submission, request.outcomes)
        checked = {
            position: CheckedOutcome(answer.rollout_id, answer.answer, ((answer.field, answer.problem),))
            for position, answer in submission.rejected.items()
        }
        for index, item in enumerate(await self._service.learner.check_outcomes(request.run, submission.outcomes)):
            problems = tuple((submission.path(index, field), text) for field, text in item.problems)
            checked[submission.positions[index]] = CheckedOutcome(
                item.rollout_id, item.answer, problems, item.advantage
            )
        ordered = (checked[position] for position in range(len(request.outcomes)))
        return reward_pb2.CheckRewardsResponse(outcomes=map(convert.checked_outcome, ordered))

    async def GetReceipt(
        self, request: reward_pb2.GetReceiptRequest, context: Context
    ) -> reward_pb2.GetReceiptResponse:
        checks = Checks()
        checks.required("rollout_id", request.rollout_id, "name the rollout")
        checks.done()
        record = await self._service.learner.receipt(request.rollout_id)
        return reward_pb2.GetReceiptResponse(receipt=convert.receipt(record))

    async def WatchReceipts(
        self, request: reward_pb2.WatchReceiptsRequest, context: Context
    ) -> AsyncIterator[reward_pb2.WatchReceiptsResponse]:
        check_run(request.run)
        checks = Checks()
        if len(request.rollout_ids) > MAX_WATCHED:
            limit = f"must have at most {MAX_WATCHED} entries, got {len(request.rollout_ids)}"
            checks.add("rollout_ids", f"{limit}; open several streams, or send none to watch the whole run")
        checks.done()
        await self._service.learner.get_run(request.run)
        box = self._service.streams.outbox()
        box.pump(self._service.learner.watch_receipts(request.run, tuple(request.rollout_ids)))
        async for record in box.drain():
            yield reward_pb2.WatchReceiptsResponse(receipt=convert.receipt(record))

    async def StreamRewards(
        self, request_iterator: AsyncIterator[reward_pb2.StreamRewardsRequest], context: Context
    ) -> AsyncIterator[reward_pb2.StreamRewardsResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidRequestError([Violation("open", "must be the first message of the stream; send OpenStream")])
        queue = await self._open(first.open)
        worker = _Worker(self, first.open.run, queue, self._service.streams.outbox())
        try:
            async for response in worker.responses(request_iterator):
                yield response
        finally:
            queue.close()

    async def _open(self, message: reward_pb2.OpenStream) -> LeaseQueue:
        checks = Checks()
        checks.run(message.run)
        checks.required("open.worker", message.worker, "name the worker")
        lease = checks.duration("open.lease", message.lease) if message.HasField("lease") else None
        checks.done()
        await self._service.learner.get_run(message.run)
        return self._service.learner.lease_rollouts(message.run, message.worker, lease)


class _Worker:
    """One reward stream: leases go out under credits, batches of outcomes are stored side by side."""

    def __init__(
        self,
        servicer: RewardServicer,
        run: str,
        leases: LeaseQueue,
        box: Outbox[reward_pb2.StreamRewardsResponse],
    ) -> None:
        self._servicer, self._run, self._leases, self._box = servicer, run, leases, box
        self._slots = asyncio.Semaphore(MAX_BATCHES_IN_FLIGHT)
        # Not tasks of the outbox: a batch that was read is stored even when the worker is gone by then.
        self._batches: set[asyncio.Task[None]] = set()

    async def responses(
        self, messages: AsyncIterator[reward_pb2.StreamRewardsRequest]
    ) -> AsyncIterator[reward_pb2.StreamRewardsResponse]:
        self._box.spawn(self._read(messages))
        self._box.spawn(self._push())
        async for response in self._box.drain():
            yield response

    async def _push(self) -> None:
        async for lease in self._leases:
            await self._box.put(reward_pb2.StreamRewardsResponse(lease=convert.lease(lease)))

    async def _read(self, messages: AsyncIterator[reward_pb2.StreamRewardsRequest]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "credits":
                    self._add_credits(message.credits.count)
                case "outcomes":
                    await self._slots.acquire()
                    task = asyncio.create_task(self._store(message.outcomes))
                    self._batches.add(task)
                    task.add_done_callback(self._stored)
                case "open":
                    raise InvalidRequestError([Violation("open", "must come once; open another stream")])
                case _:
                    raise InvalidRequestError([Violation("message", "must be set; send credits or outcomes")])
        await asyncio.gather(*self._batches)

    def _add_credits(self, count: int) -> None:
        checks = Checks()
        checks.between("credits.count", count, 1, MAX_CREDITS, "send them as room appears")
        checks.done()
        self._leases.add_credits(count)

    def _stored(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        self._batches.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._box.fail(error)

    async def _store(self, batch: reward_pb2.OutcomeBatch) -> None:
        """Store one batch; an error of its content is answered, since ending the stream would drop its leases."""
        request = reward_pb2.SubmitRewardsRequest(run=self._run, request_id=batch.request_id, outcomes=batch.outcomes)
        try:
            answers = await self._servicer.submit(request)
        except (ConflictError, NotFoundError, PreconditionError) as error:
            answers = [
                OutcomeAnswer(item.rollout_id, Answer.REJECTED, "request_id", str(error)) for item in batch.outcomes
            ]
        answer = reward_pb2.BatchAnswer(request_id=batch.request_id, answers=map(convert.outcome_answer, answers))
        # A worker that does not read its answers is not read either.
        await self._box.put(reward_pb2.StreamRewardsResponse(answer=answer))
