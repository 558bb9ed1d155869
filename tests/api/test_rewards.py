"""Outcomes over the wire: answers, idempotency, receipts, streams and leases."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
from qerld.v1 import common_pb2, reward_pb2
from support.api import Api, failure, messages, new_id, reward, violations

ACCEPTED, DUPLICATE, REJECTED = common_pb2.ANSWER_ACCEPTED, common_pb2.ANSWER_DUPLICATE, common_pb2.ANSWER_REJECTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
Outcome = reward_pb2.Outcome


def values(*items: float) -> reward_pb2.Values:
    return reward_pb2.Values(values=items)


async def test_an_outcome_is_accepted_once(api: Api, run: str) -> None:
    first, second = await api.rollout_ids(run, 2)
    answers = await api.submit(run, [reward(first, 1.0)])
    assert [answer.answer for answer in answers] == [ACCEPTED]
    again = await api.submit(run, [reward(first, 1.0)])
    assert [answer.answer for answer in again] == [DUPLICATE]
    other = await api.submit(run, [reward(first, 0.5), reward(second, 0.0)])
    assert [answer.answer for answer in other] == [REJECTED, ACCEPTED]
    assert other[0].problem.field == "outcomes[0].reward"
    assert "reward 1.0" in other[0].problem.description


@pytest.mark.parametrize(
    ("said", "field", "text"),
    [
        ({"reward": math.nan}, "reward", "finite"),
        ({"reward": math.inf}, "reward", "finite"),
        ({"reward": 1e308}, "reward", "from -1e+06 to 1e+06, got 1e+308"),
        ({"reward": -1.1e6}, "reward", "from -1e+06 to 1e+06, got -1.1e+06"),
        ({"token_rewards": values(0.0, 1e38, -1e38)}, "token_rewards.values[1]", "from -1e+06 to 1e+06, got 1e+38"),
        ({"token_rewards": values(6e5, 6e5, 0.0)}, "token_rewards", "the sum of its values must be from -1e+06"),
        ({"error": reward_pb2.OutcomeError(kind=99)}, "error.kind", "got number 99"),  # type: ignore[arg-type]
        ({"reward": 1.0, "components": {"k" * 64: 1.0}}, "components", "at most 63 characters, got 64"),
        ({"reward": 1.0, "components": {str(i): 1.0 for i in range(65)}}, "components", "at most 64 entries, got 65"),
        ({"token_rewards": values(1.0)}, "token_rewards", "needs 3 values"),
        ({"turn_rewards": values(1.0, 2.0)}, "turn_rewards", "needs 1 values"),
        ({"token_rewards": values(1.0, math.nan, 0.0)}, "token_rewards.values[1]", "finite"),
        ({}, "said", "must be set"),
        ({"reward": 1.0, "components": {"a": math.nan}}, "components[a]", "finite"),
    ],
)
async def test_bad_outcomes_are_rejected_and_good_ones_stored(
    api: Api, run: str, said: dict[str, object], field: str, text: str
) -> None:
    good, bad = await api.rollout_ids(run, 2)
    wrong = Outcome(rollout_id=bad, **said)  # type: ignore[arg-type]
    answers = await api.submit(run, [wrong, reward(good, 1.0)])
    assert [answer.answer for answer in answers] == [REJECTED, ACCEPTED]
    assert [answer.rollout_id for answer in answers] == [bad, good]
    assert answers[0].problem.field == f"outcomes[0].{field}"
    assert text in answers[0].problem.description
    receipt = (await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=bad))).receipt
    assert (receipt.state, receipt.group_outcomes) == (reward_pb2.RECEIPT_STATE_PENDING, 1)


async def test_fields_count_in_the_clients_message(api: Api, run: str) -> None:
    """The first outcome is refused at the edge, so the core sees the second as its first."""
    first, second = await api.rollout_ids(run, 2)
    answers = await api.submit(run, [Outcome(rollout_id=first), reward(second, math.nan)])
    assert [answer.problem.field for answer in answers] == ["outcomes[0].said", "outcomes[1].reward"]


async def test_an_unknown_rollout_is_rejected_alone(api: Api, run: str) -> None:
    (known,) = await api.rollout_ids(run, 1)
    answers = await api.submit(run, [reward("nowhere", 1.0), reward(known, 1.0), reward("", 1.0)])
    assert [answer.answer for answer in answers] == [REJECTED, ACCEPTED, REJECTED]
    assert "nowhere" in answers[0].problem.description


async def test_an_error_is_not_a_zero(api: Api, run: str) -> None:
    failed, abstained = await api.rollout_ids(run, 2)
    error = reward_pb2.OutcomeError(kind=reward_pb2.OUTCOME_ERROR_KIND_SCORER, message="HTTP 500")
    answers = await api.submit(
        run,
        [
            Outcome(rollout_id=failed, error=error),
            Outcome(rollout_id=abstained, abstention=reward_pb2.Abstention(reason="unsure")),
        ],
    )
    assert [answer.answer for answer in answers] == [ACCEPTED, ACCEPTED]
    states = [
        (await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=rollout_id))).receipt.state
        for rollout_id in (failed, abstained)
    ]
    assert states == [reward_pb2.RECEIPT_STATE_FAILED, reward_pb2.RECEIPT_STATE_ABSTAINED]


async def test_the_same_request_id_gets_the_first_answer(api: Api, run: str) -> None:
    (rollout_id,) = await api.rollout_ids(run, 1)
    request_id = new_id()
    first = await api.submit(run, [reward(rollout_id, 1.0)], request_id)
    assert await api.submit(run, [reward(rollout_id, 1.0)], request_id) == first
    assert first[0].answer == ACCEPTED
    request = reward_pb2.SubmitRewardsRequest(run=run, request_id=request_id, outcomes=[reward(rollout_id, 0.0)])
    error = await failure(api.rewards.SubmitRewards(request))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert request_id in str(error.details())


@pytest.mark.parametrize("count", [0, 4097])
async def test_the_number_of_outcomes_is_bounded(api: Api, run: str, count: int) -> None:
    request = reward_pb2.SubmitRewardsRequest(run=run, request_id=new_id(), outcomes=[reward("x", 1.0)] * count)
    error = await failure(api.rewards.SubmitRewards(request))
    assert error.code() is INVALID
    assert f"got {count}" in violations(error)["outcomes"]


async def test_check_rewards_stores_nothing(api: Api, run: str) -> None:
    first, second = await api.rollout_ids(run, 2)
    outcomes = [reward(first, 1.0), reward(second, 0.0), reward("nowhere", 1.0), Outcome(rollout_id=first)]
    checked = (await api.rewards.CheckRewards(reward_pb2.CheckRewardsRequest(run=run, outcomes=outcomes))).outcomes
    assert [item.answer for item in checked] == [ACCEPTED, ACCEPTED, REJECTED, REJECTED]
    assert checked[0].advantage > 0 > checked[1].advantage
    assert not checked[2].HasField("advantage")
    assert checked[3].problems[0].field == "outcomes[3].said"
    receipt = (await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=first))).receipt
    assert (receipt.state, receipt.group_outcomes) == (reward_pb2.RECEIPT_STATE_PENDING, 0)


async def test_watch_receipts_ends_when_all_are_final(api: Api, run: str) -> None:
    first, second = await api.rollout_ids(run, 2)
    watch = api.rewards.WatchReceipts(
        reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=[first, second]), timeout=120
    )
    reading = asyncio.ensure_future(_all(watch))
    await asyncio.sleep(0.1)
    # Equal rewards: the group is dropped as soon as both are there.
    await api.submit(run, [reward(first, 1.0), reward(second, 1.0)])
    receipts = await reading
    assert {receipt.rollout_id for receipt in receipts} == {first, second}
    assert {receipt.state for receipt in receipts} == {reward_pb2.RECEIPT_STATE_DROPPED_ZERO_VARIANCE}


async def test_watch_receipts_refuses_too_many_ids_and_those_of_another_run(api: Api, run: str) -> None:
    many = reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=["x"] * 4097)
    assert "at most 4096 entries, got 4097" in violations(await failure(api.rewards.WatchReceipts(many)))["rollout_ids"]
    ids = await api.rollout_ids(await api.new_run(), 1)
    other = reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=ids)
    error = await failure(api.rewards.WatchReceipts(other, timeout=60))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert ids[0] in str(error.details())


async def test_a_refused_outcome_may_be_large(api: Api, run: str) -> None:
    """The answer to a second outcome must not repeat the first one's thousands of numbers, nor a name without end."""
    (rollout_id,) = await api.rollout_ids(run, 1)
    await api.submit(run, [Outcome(rollout_id=rollout_id, token_rewards=values(0.5, 0.25, 0.125))])
    second, nameless = await api.submit(run, [reward(rollout_id, 1.0), reward("x" * 65, 1.0)])
    assert "token_rewards of sum 0.875" in second.problem.description
    assert "1 to 64 characters, got 65" in nameless.problem.description


async def _all(watch: grpc.aio.UnaryStreamCall) -> list[reward_pb2.Receipt]:  # type: ignore[type-arg]
    return [response.receipt async for response in watch]


class Worker:
    """A reward worker by hand."""

    def __init__(self, api: Api, run: str, lease_seconds: int = 60) -> None:
        self.call = api.rewards.StreamRewards(timeout=120)
        opening = reward_pb2.OpenStream(run=run, worker="w")
        opening.lease.seconds = lease_seconds
        self._open = reward_pb2.StreamRewardsRequest(open=opening)

    async def begin(self, credits: int = 0) -> None:
        await self.call.write(self._open)
        if credits:
            await self.credits(credits)

    async def credits(self, count: int) -> None:
        await self.call.write(reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=count)))

    async def send(self, *outcomes: Outcome, request_id: str | None = None) -> str:
        batch = reward_pb2.OutcomeBatch(request_id=request_id or new_id(), outcomes=outcomes)
        await self.call.write(reward_pb2.StreamRewardsRequest(outcomes=batch))
        return batch.request_id

    async def read(self, seconds: float = 60.0) -> reward_pb2.StreamRewardsResponse:
        async with asyncio.timeout(seconds):
            return await self.call.read()

    async def silent(self, seconds: float = 0.3) -> bool:
        """Whether nothing comes; the call is of no use afterwards."""
        try:
            await self.read(seconds)
        except TimeoutError:
            return True
        return False


async def test_a_stream_pushes_under_credits_and_answers(api: Api, run: str) -> None:
    rollout_ids = await api.rollout_ids(run, 4)
    worker = Worker(api, run)
    await worker.begin(credits=2)
    leased = [(await worker.read()).lease for _ in range(2)]
    assert {lease.rollout.rollout_id for lease in leased} <= set(rollout_ids)
    assert all(lease.rollout.labels["origin"] == "test" for lease in leased)
    assert all(lease.expires_at.seconds > 0 for lease in leased)
    request_id = await worker.send(*(reward(lease.rollout.rollout_id, 1.0) for lease in leased))
    answer = (await worker.read()).answer
    assert answer.request_id == request_id
    assert [item.answer for item in answer.answers] == [ACCEPTED, ACCEPTED]
    assert await worker.silent()  # no credits are left


async def test_a_stream_answers_everything_before_it_ends(api: Api, run: str) -> None:
    rollout_ids = await api.rollout_ids(run, 8)
    worker = Worker(api, run)
    await worker.begin()
    sent = [await worker.send(reward(rollout_id, 1.0)) for rollout_id in rollout_ids]
    await worker.call.done_writing()
    answered = [response.answer.request_id async for response in worker.call]
    assert sorted(answered) == sorted(sent)


async def test_a_vanished_worker_gives_its_leases_back(api: Api, run: str) -> None:
    (rollout_id,) = await api.rollout_ids(run, 1)
    first = Worker(api, run)
    await first.begin(credits=1)
    assert (await first.read()).lease.rollout.rollout_id
    second = Worker(api, run)
    await second.begin(credits=2)
    await second.read()  # the other rollout of the group
    first.call.cancel()
    assert (await second.read()).lease.rollout.rollout_id
    assert (await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=rollout_id))).receipt.rollout_id


async def test_outcomes_of_a_worker_that_vanishes_are_not_lost(api: Api, run: str) -> None:
    """The batch reached the service: it is stored, and sending it again is answered as the first time."""
    (rollout_id,) = await api.rollout_ids(run, 1)
    worker = Worker(api, run)
    await worker.begin()
    request_id = await worker.send(reward(rollout_id, 1.0))
    await worker.read()
    worker.call.cancel()
    again = Worker(api, run)
    await again.begin()
    await again.send(reward(rollout_id, 1.0), request_id=request_id)
    assert (await again.read()).answer.answers[0].answer == ACCEPTED


async def test_a_stream_survives_a_bad_batch(api: Api, run: str) -> None:
    first, second = await api.rollout_ids(run, 2)
    worker = Worker(api, run)
    await worker.begin()
    request_id = await worker.send(reward(first, 1.0))
    await worker.read()
    await worker.send(reward(first, 0.0), request_id=request_id)
    answer = (await worker.read()).answer
    assert answer.answers[0].answer == REJECTED
    assert answer.answers[0].problem.field == "request_id"
    await worker.send(reward(second, math.nan))
    assert (await worker.read()).answer.answers[0].problem.field == "outcomes[0].reward"
    await worker.send(reward(second, 0.0))
    assert (await worker.read()).answer.answers[0].answer == ACCEPTED


async def test_a_stream_begins_with_open(api: Api, run: str) -> None:
    credits = reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=1))
    error = await failure(api.rewards.StreamRewards(messages(credits), timeout=60))
    assert error.code() is INVALID
    assert "open" in violations(error)
    error = await failure(api.rewards.StreamRewards(messages(), timeout=60))
    assert error.code() is INVALID


@pytest.mark.parametrize("count", [0, 5000])
async def test_credits_are_bounded(api: Api, run: str, count: int) -> None:
    opening = reward_pb2.StreamRewardsRequest(open=reward_pb2.OpenStream(run=run, worker="w"))
    credits = reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=count))
    error = await failure(api.rewards.StreamRewards(messages(opening, credits), timeout=60))
    assert f"got {count}" in violations(error)["credits.count"]
