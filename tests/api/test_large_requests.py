"""Large messages of outcomes: what is too much is refused by its size; what is large is converted in a thread."""

from __future__ import annotations

import threading

import pytest
from qerld.v1 import common_pb2, reward_pb2, run_pb2
from qerld_learner.api.requests import MAX_VALUES
from qerld_learner.api.service import LARGE_BYTES, off_loop
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


async def test_the_largest_message_is_answered(api: Api, shared_run: str) -> None:
    request = reward_pb2.SubmitRewardsRequest(
        run=shared_run, request_id=new_id(), outcomes=outcomes(4096, MAX_VALUES // 4096)
    )
    answer = await api.rewards.SubmitRewards(request, timeout=300)
    assert {one.answer for one in answer.answers} == {common_pb2.ANSWER_REJECTED}
    assert len(answer.answers) == 4096


async def test_only_large_messages_are_worth_a_thread() -> None:
    small, large = (run_pb2.CreateRunRequest(initial_adapter=b"x" * size) for size in (1, LARGE_BYTES))
    assert await off_loop(small, threading.get_ident) == threading.get_ident()
    assert await off_loop(large, threading.get_ident) != threading.get_ident()
