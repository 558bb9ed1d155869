"""Raw stubs of the public API, and requests that are right, for tests to make wrong."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from qerld.v1 import (
    common_pb2,
    policy_pb2_grpc,
    replica_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

PROMPT_IDS = (5, 6, 7, 8)
COMPLETION_IDS = (9, 10, 11)


def new_id() -> str:
    return uuid.uuid4().hex


class Api:
    """Stubs of one channel and what most tests begin with."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.runs = run_pb2_grpc.RunServiceStub(channel)
        self.rollouts = rollout_pb2_grpc.RolloutServiceStub(channel)
        self.rewards = reward_pb2_grpc.RewardServiceStub(channel)
        self.policies = policy_pb2_grpc.PolicyServiceStub(channel)
        self.replicas = replica_pb2_grpc.ReplicaServiceStub(channel)

    async def new_run(self, **config: Any) -> str:
        name = f"run-{new_id()[:12]}"
        lora = run_pb2.LoraConfig(rank=4)
        wanted = {"lora": lora, "group_size": 2, "groups_per_step": 2, "max_tokens": 8, **config}
        request = run_pb2.CreateRunRequest(run=name, request_id=new_id(), config=run_pb2.RunConfig(**wanted))
        await self.runs.CreateRun(request, timeout=240)
        return name

    async def import_groups(self, run: str, count: int, size: int = 2) -> list[rollout_pb2.ImportedGroup]:
        """Store groups whose rollouts await rewards."""
        messages = [import_request(run, size) for _ in range(count)]
        response = await self.rollouts.ImportTrajectories(iter(messages), timeout=60)
        return list(response.groups)

    async def rollout_ids(self, run: str, count: int) -> list[str]:
        """Store `count` rollouts, two a group; returns their ids."""
        groups = await self.import_groups(run, (count + 1) // 2)
        return [rollout_id for group in groups for rollout_id in group.rollout_ids][:count]

    async def submit(
        self, run: str, outcomes: Sequence[reward_pb2.Outcome], request_id: str | None = None
    ) -> list[reward_pb2.OutcomeAnswer]:
        request = reward_pb2.SubmitRewardsRequest(run=run, request_id=request_id or new_id(), outcomes=outcomes)
        return list((await self.rewards.SubmitRewards(request, timeout=60)).answers)


def import_request(run: str, size: int = 2, request_id: str | None = None) -> rollout_pb2.ImportTrajectoriesRequest:
    trajectories = [
        rollout_pb2.Trajectory(segments=[segment()], finish_reason=common_pb2.FINISH_REASON_STOP) for _ in range(size)
    ]
    return rollout_pb2.ImportTrajectoriesRequest(
        run=run,
        request_id=request_id or new_id(),
        prompt=common_pb2.Prompt(ids=common_pb2.TokenIds(ids=PROMPT_IDS)),
        trajectories=trajectories,
        labels={"origin": "test"},
    )


def segment(**changes: Any) -> rollout_pb2.Segment:
    wanted = {
        "tokens": common_pb2.TokenIds(ids=COMPLETION_IDS),
        "logprobs": [-1.0] * len(COMPLETION_IDS),
        "trainable": True,
        "version": 0,
        **changes,
    }
    return rollout_pb2.Segment(**wanted)


def sample_request(run: str, /, **changes: Any) -> rollout_pb2.SampleRequest:
    prompt = common_pb2.Prompt(ids=common_pb2.TokenIds(ids=PROMPT_IDS))
    return rollout_pb2.SampleRequest(**{"run": run, "request_id": new_id(), "prompt": prompt, **changes})


def reward(rollout_id: str, value: float) -> reward_pb2.Outcome:
    return reward_pb2.Outcome(rollout_id=rollout_id, reward=value)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Await a call, unary or streaming, that must fail; returns its error."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded")


def status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def violations(error: grpc.aio.AioRpcError) -> dict[str, str]:
    """Return description by field of the BadRequest details."""
    found = {}
    for detail in status(error).details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found.update({item.field: item.description for item in bad.field_violations})
    return found


def retry_seconds(error: grpc.aio.AioRpcError) -> float | None:
    detail: any_pb2.Any
    for detail in status(error).details:
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return retry.retry_delay.ToNanoseconds() / 1e9
    return None


async def messages(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item
