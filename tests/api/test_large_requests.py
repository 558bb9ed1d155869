"""Large messages of outcomes: what is too much is refused by its size; what fits is converted beside the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest
from qerld.v1 import common_pb2, reward_pb2, run_pb2
from qerld_learner.api.requests import MAX_VALUES
from qerld_learner.api.service import LARGE_BYTES
from support.api import Api, failure, new_id, violations

SHARED = {f"part-{number}": 0.5 for number in range(64)}


def outcomes(count: int, values: int) -> list[reward_pb2.Outcome]:
    """Of rollouts that nobody has, with that many rewards by token each."""
    rewards = reward_pb2.Values(values=[0.5] * values)
    return [
        reward_pb2.Outcome(rollout_id=f"nobody-{index}", token_rewards=rewards, components=SHARED)
        for index in range(count)
    ]


@pytest.mark.parametrize("call", ["SubmitRewards", "CheckRewards"])
async def test_too_many_values_are_refused_by_their_number(api: Api, shared_run: str, call: str) -> None:
    much = outcomes(2, MAX_VALUES // 2) + outcomes(1, 1)
    if call == "SubmitRewards":
        submit = reward_pb2.SubmitRewardsRequest(run=shared_run, request_id=new_id(), outcomes=much)
        error = await failure(api.rewards.SubmitRewards(submit, timeout=60))
    else:
        check = reward_pb2.CheckRewardsRequest(run=shared_run, outcomes=much)
        error = await failure(api.rewards.CheckRewards(check, timeout=60))
    said = f"must have at most {MAX_VALUES} rewards by turn or token together, got {MAX_VALUES + 1}; split the message"
    assert violations(error) == {"outcomes": said}


async def test_the_largest_messages_hold_nobody_up(api: Api, shared_run: str) -> None:
    largest = outcomes(4096, MAX_VALUES // 4096)
    request = reward_pb2.SubmitRewardsRequest(run=shared_run, request_id=new_id(), outcomes=largest)
    assert request.ByteSize() > LARGE_BYTES
    started = time.monotonic()
    calls = [asyncio.ensure_future(api.rewards.SubmitRewards(request, timeout=120)) for _ in range(4)]
    longest = 0.0
    while not all(call.done() for call in calls):
        asked = time.monotonic()
        await api.runs.GetRun(run_pb2.GetRunRequest(run=shared_run), timeout=60)
        longest = max(longest, time.monotonic() - asked)
    total = time.monotonic() - started
    for call in calls:
        assert {answer.answer for answer in call.result().answers} == {common_pb2.ANSWER_REJECTED}
    assert longest < total / 2, (longest, total)
