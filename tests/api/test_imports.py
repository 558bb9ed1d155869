"""Imported trajectories of several turns, through the real server: stored as sent, rewarded by turn, trained."""

from __future__ import annotations

import grpc
from qerld.v1 import common_pb2, reward_pb2, rollout_pb2
from support.api import COMPLETION_IDS, Api, failure, import_request, new_id, reward, segment, violations

TOOL_IDS = (20, 21, 22, 23)
ACCEPTED, REJECTED = common_pb2.ANSWER_ACCEPTED, common_pb2.ANSWER_REJECTED


def tool_output() -> rollout_pb2.Segment:
    # The version of what the environment says is ignored, even one that the run never had.
    return segment(tokens=common_pb2.TokenIds(ids=TOOL_IDS), logprobs=[], trainable=False, version=99)


def multi_turn_request(run: str) -> rollout_pb2.ImportTrajectoriesRequest:
    """Two rollouts: two turns with a tool's output between and behind them, and a single turn."""
    request = import_request(run)
    later = segment(tokens=common_pb2.TokenIds(ids=(30, 31)), logprobs=[-0.5, -2.0])
    del request.trajectories[0].segments[:]
    request.trajectories[0].segments.extend([segment(), tool_output(), later, tool_output()])
    return request


async def imported(api: Api, run: str) -> list[str]:
    response = await api.rollouts.ImportTrajectories(iter([multi_turn_request(run)]), timeout=30)
    return list(response.groups[0].rollout_ids)


async def test_a_rollout_comes_back_with_its_spans(api: Api, run: str) -> None:
    rollout_ids = await imported(api, run)
    answer = await api.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(rollout_id=rollout_ids[0]), timeout=10)
    rollout = answer.rollout
    assert list(rollout.completion.ids) == [*COMPLETION_IDS, *TOOL_IDS, 30, 31, *TOOL_IDS]
    assert list(rollout.logprobs) == [-1.0] * 3 + [0.0] * 4 + [-0.5, -2.0] + [0.0] * 4
    found = [(span.begin, span.end, span.version, span.environment) for span in rollout.spans]
    assert found == [(0, 3, 0, False), (3, 7, 0, True), (7, 9, 0, False), (9, 13, 0, True)]
    assert [span.HasField("noise") for span in rollout.spans] == [True, False, True, False]


async def test_rewards_by_turn_count_the_policys_turns_and_by_token_all_tokens(api: Api, run: str) -> None:
    def turns(rollout_id: str, count: int) -> reward_pb2.Outcome:
        return reward_pb2.Outcome(rollout_id=rollout_id, turn_rewards=reward_pb2.Values(values=[0.5] * count))

    def tokens(rollout_id: str, count: int) -> reward_pb2.Outcome:
        return reward_pb2.Outcome(rollout_id=rollout_id, token_rewards=reward_pb2.Values(values=[0.1] * count))

    by_turn, by_token = (await imported(api, run))[0], (await imported(api, run))[0]
    wrong = await api.submit(run, [turns(by_turn, 4), tokens(by_token, 5)])
    assert [answer.answer for answer in wrong] == [REJECTED, REJECTED]
    assert "needs 2 values, one a trainable segment" in wrong[0].problem.description
    assert "needs 13 values, one a completion token" in wrong[1].problem.description
    right = await api.submit(run, [turns(by_turn, 2), tokens(by_token, 13)])
    assert [answer.answer for answer in right] == [ACCEPTED, ACCEPTED]


async def test_several_turns_are_trained(api: Api, run: str) -> None:
    rollout_ids = [*await imported(api, run), *await imported(api, run)]
    await api.submit(run, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(rollout_ids)])
    watch = api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=rollout_ids), timeout=60)
    receipts = {response.receipt.rollout_id: response.receipt async for response in watch}
    assert {receipts[rollout_id].state for rollout_id in rollout_ids} == {reward_pb2.RECEIPT_STATE_TRAINED}
    assert receipts[rollout_ids[0]].advantage < 0 < receipts[rollout_ids[1]].advantage


async def test_a_rollout_of_the_environment_alone_is_refused(api: Api, shared_run: str) -> None:
    request = multi_turn_request(shared_run)
    request.request_id = new_id()
    del request.trajectories[1].segments[:]
    request.trajectories[1].segments.append(tool_output())
    error = await failure(api.rollouts.ImportTrajectories(iter([request]), timeout=10))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    found = violations(error)
    assert list(found) == ["message[0].trajectories[1].segments"]
    assert "at least one trainable token, got none" in found["message[0].trajectories[1].segments"]
