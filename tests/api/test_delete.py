"""DeleteRun over the wire: slots come back, whoever waits for something of the run is told, nothing else is touched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from qerld.v1 import common_pb2, policy_pb2, replica_pb2, reward_pb2, rollout_pb2, run_pb2
from qerld_learner.fingerprints import fingerprints_of
from qerld_learner.settings import LearnerSettings
from support.api import Api, failure, import_request, new_id, retry_seconds, reward, sample_request

CANCELLED = reward_pb2.RECEIPT_STATE_CANCELLED
NOT_FOUND = grpc.StatusCode.NOT_FOUND


async def delete(api: Api, run: str, request_id: str | None = None) -> None:
    await api.runs.DeleteRun(run_pb2.DeleteRunRequest(run=run, request_id=request_id or new_id()), timeout=120)


async def refused(call: Any) -> grpc.StatusCode:
    return (await failure(call)).code()


@asynccontextmanager
async def policy_server(api: Api, settings: LearnerSettings, slots: int) -> AsyncIterator[Any]:
    """A policy server with so many slots, as far as the learner can tell; yields its Attach call."""
    found = await fingerprints_of(settings.model)
    hello = replica_pb2.Hello(
        replica_id=new_id(),
        endpoint="127.0.0.1:1",
        base_sha256=found.base,
        tokenizer_sha256=found.tokenizer,
        chat_template_sha256=found.chat_template,
        slots=slots,
        max_lora_rank=64,
        max_model_len=512,
        dtype="float32",
    )
    call = api.replicas.Attach()
    try:
        await call.write(replica_pb2.AttachRequest(hello=hello))
        yield call
    finally:
        call.cancel()


async def desired_runs(call: Any) -> set[str]:
    """Return the runs of the next desired state that a policy server is sent."""
    async with asyncio.timeout(60):
        response = await call.read()
    return {version.policy.run for version in response.desired.versions}


async def test_a_deleted_run_gives_its_slots_back(api: Api, learner_settings: LearnerSettings) -> None:
    """Runs that nobody finished used to take slots for ever, until no run could be created any more."""
    abandoned = await api.new_run()
    paused = run_pb2.PauseRunRequest(run=abandoned, request_id=new_id())
    await api.runs.PauseRun(paused, timeout=60)
    runs = len((await api.runs.ListRuns(run_pb2.ListRunsRequest(), timeout=60)).runs)
    async with policy_server(api, learner_settings, slots=2 * runs) as call:
        assert abandoned in await desired_runs(call)
        request = run_pb2.CreateRunRequest(run=f"run-{new_id()[:12]}", request_id=new_id())
        error = await failure(api.runs.CreateRun(request, timeout=120))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"has {2 * runs}" in str(error.details())
        assert "DeleteRun" in str(error.details())
        assert (retry_seconds(error) or 0) > 300  # nothing changes by itself: clients say it at once
        await delete(api, abandoned)
        assert abandoned not in await desired_runs(call)
        assert (await api.runs.CreateRun(request, timeout=120)).run.name == request.run
    await delete(api, request.run)


async def test_everything_of_a_deleted_run_is_gone_but_its_receipts(api: Api, run: str) -> None:
    (rollout_id, other, *_rest) = await api.rollout_ids(run, 4)
    await api.submit(run, [reward(rollout_id, 1.0)])
    request_id = new_id()
    await delete(api, run, request_id)
    await delete(api, run, request_id)  # the same request, answered again
    policy = common_pb2.Policy(run=run, version=0)
    calls = [
        api.runs.DeleteRun(run_pb2.DeleteRunRequest(run=run, request_id=new_id())),
        api.runs.GetRun(run_pb2.GetRunRequest(run=run)),
        api.runs.PauseRun(run_pb2.PauseRunRequest(run=run, request_id=new_id())),
        api.runs.ResumeRun(run_pb2.ResumeRunRequest(run=run, request_id=new_id())),
        api.runs.WatchRun(run_pb2.WatchRunRequest(run=run)),
        api.rollouts.Sample(sample_request(run)),
        api.rollouts.ImportTrajectories(iter([import_request(run)])),
        api.rollouts.ListGroups(rollout_pb2.ListGroupsRequest(run=run)),
        api.rewards.SubmitRewards(
            reward_pb2.SubmitRewardsRequest(run=run, request_id=new_id(), outcomes=[reward(other, 1.0)])
        ),
        api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run=run)),
        api.policies.GetPolicy(policy_pb2.GetPolicyRequest(run=run)),
        api.policies.WatchPolicy(policy_pb2.WatchPolicyRequest(run=run)),
        api.policies.DownloadAdapter(policy_pb2.DownloadAdapterRequest(policy=policy)),
    ]
    assert [await refused(call) for call in calls] == [NOT_FOUND] * len(calls)
    assert run not in [one.name for one in (await api.runs.ListRuns(run_pb2.ListRunsRequest())).runs]
    gone = await failure(api.runs.GetRun(run_pb2.GetRunRequest(run=run)))
    assert gone.details() == f"run {run!r} was deleted; ListRuns lists those there are"
    for name in (rollout_id, other):
        receipt = (await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=name))).receipt
        assert receipt.state == CANCELLED
        got = (await api.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(rollout_id=name))).rollout
        assert list(got.completion.ids) == [9, 10, 11]


async def test_the_name_of_a_deleted_run_stays_taken(api: Api, run: str, learner_settings: LearnerSettings) -> None:
    await delete(api, run)
    folder = learner_settings.state_dir / "versions" / run / "00000000"
    before = sorted(path.name for path in folder.rglob("*"))
    error = await failure(api.runs.CreateRun(run_pb2.CreateRunRequest(run=run, request_id=new_id()), timeout=120))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "was deleted" in str(error.details())
    assert "adapter" in before == sorted(path.name for path in folder.rglob("*"))


async def test_whoever_waits_is_told(api: Api, run: str) -> None:
    """Sampling, watches and reward workers of the run end by themselves, at once."""
    ids = await api.rollout_ids(run, 2)
    opened: asyncio.Future[rollout_pb2.GroupOpened] = asyncio.get_running_loop().create_future()
    sampling = asyncio.ensure_future(_sample(api, run, opened))
    sampled = list((await opened).rollout_ids)
    prompt = rollout_pb2.PromptItem(prompt=common_pb2.Prompt(text="seven"))
    queued = rollout_pb2.SubmitPromptsRequest(run=run, request_id=new_id(), prompts=[prompt] * 8)
    (group_id, *_more) = (await api.rollouts.SubmitPrompts(queued, timeout=60)).group_ids
    some = api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=ids), timeout=120)
    whole = api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run=run), timeout=120)
    watches = [
        api.runs.WatchRun(run_pb2.WatchRunRequest(run=run), timeout=120),
        api.policies.WatchPolicy(policy_pb2.WatchPolicyRequest(run=run), timeout=120),
    ]
    worker = api.rewards.StreamRewards(timeout=120)
    await worker.write(reward_pb2.StreamRewardsRequest(open=reward_pb2.OpenStream(run=run, worker="w")))
    await worker.write(reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=1)))
    assert (await worker.read()).lease.rollout.rollout_id in ids
    reading = asyncio.gather(_receipts(some), _receipts(whole), sampling, *(refused(watch) for watch in watches))
    await asyncio.sleep(0.2)  # some of them have begun to wait; those that have not are refused, which is as good
    begun = asyncio.get_running_loop().time()
    await delete(api, run)
    async with asyncio.timeout(60):
        first, second, *codes = await reading
        assert not isinstance(await worker.read(), reward_pb2.StreamRewardsResponse)
    assert asyncio.get_running_loop().time() - begun < 60
    assert codes == [NOT_FOUND] * 3
    assert {receipt.rollout_id: receipt.state for receipt in first} == dict.fromkeys(ids, CANCELLED)
    assert {receipt.state for receipt in second} == {CANCELLED}
    assert set(sampled) <= {receipt.rollout_id for receipt in second}
    receipt = await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=f"{group_id}-0"))
    assert receipt.receipt.state == CANCELLED


async def _sample(api: Api, run: str, opened: asyncio.Future[rollout_pb2.GroupOpened]) -> grpc.StatusCode:
    """Sample a group and return the code that the stream ends with."""
    try:
        async for event in api.rollouts.Sample(sample_request(run), timeout=120):
            opened.set_result(event.opened)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def _receipts(watch: Any) -> list[reward_pb2.Receipt]:
    return [response.receipt async for response in watch]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
async def test_a_run_may_be_deleted_while_it_trains(api: Api, run: str, steps_in_flight: int) -> None:
    """Its step is thrown away, and other runs train on."""
    doomed = [await api.new_run() for _ in range(steps_in_flight)]
    for name in doomed:
        ids = await api.rollout_ids(name, 4)
        await api.submit(name, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(ids)])
    await asyncio.gather(*(delete(api, name) for name in doomed))
    final = {CANCELLED, reward_pb2.RECEIPT_STATE_TRAINED}
    receipt = await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=ids[0]))
    assert receipt.receipt.state in final
    ids = await api.rollout_ids(run, 4)
    watch = api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=ids), timeout=240)
    reading = asyncio.ensure_future(_receipts(watch))
    await api.submit(run, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(ids)])
    assert {one.state for one in await reading} == {reward_pb2.RECEIPT_STATE_TRAINED}
