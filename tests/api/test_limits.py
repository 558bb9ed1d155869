"""What is accepted trains: values at their limits, side by side with requests that were refused."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from qerld.v1 import common_pb2, policy_pb2, reward_pb2, run_pb2
from qerld_learner.api.requests import LEAST_LOGPROB
from qerld_learner.outcomes import MAX_REWARD
from support.api import Api, failure, import_request, new_id, reward, segment, violations

TRAINED = reward_pb2.RECEIPT_STATE_TRAINED
Algorithm = run_pb2.Algorithm
MEAN_ONLY = run_pb2.ADVANTAGE_ESTIMATOR_MEAN_ONLY


async def four_rollouts(api: Api, run: str, logprobs: tuple[float, ...] = (-1.0, -1.0, -1.0)) -> list[str]:
    """Two groups of two rollouts that differ: of equal ones the gradients cancel."""
    requests = [import_request(run), import_request(run)]
    for number, trajectory in enumerate(item for request in requests for item in request.trajectories):
        tokens = common_pb2.TokenIds(ids=[9, 10, 20 + number])
        trajectory.segments[0].CopyFrom(segment(tokens=tokens, logprobs=logprobs))
    groups = (await api.rollouts.ImportTrajectories(iter(requests), timeout=60)).groups
    return [rollout_id for group in groups for rollout_id in group.rollout_ids]


async def trained(api: Api, run: str, outcomes: list[reward_pb2.Outcome]) -> list[reward_pb2.Receipt]:
    """Submit outcomes that fill a batch; return their final receipts."""
    request = reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=[outcome.rollout_id for outcome in outcomes])
    watch = api.rewards.WatchReceipts(request, timeout=120)
    reading = asyncio.ensure_future(_all(watch))
    answers = await api.submit(run, outcomes)
    assert {answer.answer for answer in answers} == {common_pb2.ANSWER_ACCEPTED}, answers
    return await reading


async def _all(watch: Any) -> list[reward_pb2.Receipt]:
    return [response.receipt async for response in watch]


async def check_step(api: Api, run: str, receipts: list[reward_pb2.Receipt]) -> None:
    """The step changed the weights, in finite numbers, and the run goes on."""
    assert {receipt.state for receipt in receipts} == {TRAINED}
    assert all(math.isfinite(receipt.advantage) and math.isfinite(receipt.ratio) for receipt in receipts)
    assert any(receipt.advantage > 0 for receipt in receipts)
    got = (await api.runs.GetRun(run_pb2.GetRunRequest(run=run), timeout=60)).run
    assert (got.state, got.reason) == (run_pb2.RUN_STATE_RUNNING, "")
    versions = (await api.policies.ListVersions(policy_pb2.ListVersionsRequest(run=run), timeout=60)).versions
    assert len({version.adapter_sha256 for version in versions}) == len(versions) == 2


@pytest.mark.parametrize(
    "algorithm",
    [Algorithm(), Algorithm(advantage=MEAN_ONLY, tis_cap=0), Algorithm(advantage=MEAN_ONLY, tis_cap=1e6, kl_coef=100)],
    ids=["group_norm", "no_correction", "kl"],
)
async def test_the_largest_rewards_train(api: Api, algorithm: Algorithm) -> None:
    run = await api.new_run(algorithm=algorithm)
    # Improbable to the sampler, so that importance ratios are as large as they get.
    ids = await four_rollouts(api, run, logprobs=(LEAST_LOGPROB, -1.0, 0.0))
    tokens = reward_pb2.Values(values=[MAX_REWARD, -MAX_REWARD, MAX_REWARD])
    outcomes = [reward(rollout_id, -MAX_REWARD) for rollout_id in ids[:3]]
    outcomes.append(reward_pb2.Outcome(rollout_id=ids[3], token_rewards=tokens))
    outcomes[0].reward = MAX_REWARD
    await check_step(api, run, await trained(api, run, outcomes))


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": 0.01},
        {"temperature": 2.0},
        {"lora": run_pb2.LoraConfig(rank=4, alpha=1e5)},
        {"lora": run_pb2.LoraConfig(rank=4, alpha=1e-3)},
        {"optimizer": run_pb2.Optimizer(learning_rate=1.0, weight_decay=1e3, max_grad_norm=0)},
        {"seed": 2**63 - 1 - 1024},
    ],
    ids=str,
)
async def test_configurations_at_their_limits_train(api: Api, config: dict[str, Any]) -> None:
    run = await api.new_run(**config)
    ids = await four_rollouts(api, run)
    receipts = await trained(api, run, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(ids)])
    await check_step(api, run, receipts)


async def test_a_run_that_was_refused_leaves_the_others_alone(api: Api, run: str) -> None:
    """The trainer finds out late that an adapter is none; what it has in memory is of another run and shape."""
    ids = await four_rollouts(api, run)
    for rank in (2, 3):
        config = run_pb2.RunConfig(lora=run_pb2.LoraConfig(rank=rank))
        request = run_pb2.CreateRunRequest(run="refused", request_id=new_id(), config=config, initial_adapter=b"none")
        found = violations(await failure(api.runs.CreateRun(request, timeout=120)))
        assert "the trainer refused it" in found["initial_adapter"]
    receipts = await trained(api, run, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(ids)])
    await check_step(api, run, receipts)
