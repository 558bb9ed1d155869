"""Runs and versions over the wire: idempotency, watches, downloads, and a training step through imported rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import json

import grpc
import pytest
from qerld.v1 import common_pb2, policy_pb2, reward_pb2, rollout_pb2, run_pb2
from support.api import Api, failure, import_request, new_id, reward, violations


async def test_create_run_fills_in_defaults(api: Api, run: str) -> None:
    got = (await api.runs.GetRun(run_pb2.GetRunRequest(run=run))).run
    assert (got.name, got.state, got.step, got.live_version) == (run, run_pb2.RUN_STATE_RUNNING, 0, 0)
    assert (got.config.lora.rank, got.config.lora.alpha, got.config.group_size) == (4, 8.0, 2)
    assert got.config.optimizer.learning_rate == pytest.approx(1e-5)
    assert got.config.reward_deadline.seconds == 600
    assert len(got.base_sha256) == 64
    assert got.etag
    assert run in [item.name for item in (await api.runs.ListRuns(run_pb2.ListRunsRequest())).runs]


async def test_create_run_is_idempotent(api: Api) -> None:
    name, request_id = f"run-{new_id()[:12]}", new_id()
    request = run_pb2.CreateRunRequest(run=name, request_id=request_id)
    first = await api.runs.CreateRun(request, timeout=120)
    assert (await api.runs.CreateRun(request, timeout=120)).run.name == first.run.name
    request.config.group_size = 4
    assert (await failure(api.runs.CreateRun(request, timeout=120))).code() is grpc.StatusCode.ALREADY_EXISTS
    request.request_id = new_id()
    assert (await failure(api.runs.CreateRun(request, timeout=120))).code() is grpc.StatusCode.ALREADY_EXISTS


async def test_pause_and_resume(api: Api, run: str) -> None:
    request = run_pb2.PauseRunRequest(run=run, request_id=new_id(), reason="lunch")
    paused = (await api.runs.PauseRun(request)).run
    assert (paused.state, paused.reason) == (run_pb2.RUN_STATE_PAUSED, "lunch")
    assert (await api.runs.PauseRun(request)).run.state == run_pb2.RUN_STATE_PAUSED
    resumed = (await api.runs.ResumeRun(run_pb2.ResumeRunRequest(run=run, request_id=new_id()))).run
    assert (resumed.state, resumed.reason) == (run_pb2.RUN_STATE_RUNNING, "")
    assert resumed.etag != paused.etag
    long = run_pb2.PauseRunRequest(run=run, request_id=new_id(), reason="x" * 1001)
    assert "got 1001" in violations(await failure(api.runs.PauseRun(long)))["reason"]


async def test_import_is_idempotent_by_message(api: Api, run: str) -> None:
    one, two = import_request(run), import_request(run)
    first = await api.rollouts.ImportTrajectories(iter([one]))
    both = await api.rollouts.ImportTrajectories(iter([one, two]))
    assert both.groups[0] == first.groups[0]
    assert both.groups[1].group_id != first.groups[0].group_id
    groups = (await api.rollouts.ListGroups(rollout_pb2.ListGroupsRequest(run=run))).groups
    assert [group.group_id for group in groups] == [both.groups[1].group_id, both.groups[0].group_id]
    one.labels["origin"] = "changed"
    assert (await failure(api.rollouts.ImportTrajectories(iter([one])))).code() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_wrong_message_leaves_the_groups_before_it(api: Api, run: str) -> None:
    good, bad = import_request(run), import_request(run, size=1)
    error = await failure(api.rollouts.ImportTrajectories(iter([good, bad])))
    assert list(violations(error)) == ["message[1].trajectories"]
    assert len((await api.rollouts.ListGroups(rollout_pb2.ListGroupsRequest(run=run))).groups) == 1


async def test_an_imported_rollout_is_returned_as_it_came(api: Api, run: str) -> None:
    (group,) = await api.import_groups(run, 1)
    rollout = (await api.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(rollout_id=group.rollout_ids[1]))).rollout
    assert (rollout.group_id, rollout.run, rollout.index) == (group.group_id, run, 1)
    assert (list(rollout.prompt.ids), list(rollout.completion.ids)) == ([5, 6, 7, 8], [9, 10, 11])
    assert list(rollout.logprobs) == [-1.0, -1.0, -1.0]
    assert [(span.begin, span.end, span.version) for span in rollout.spans] == [(0, 3, 0)]
    assert rollout.state == common_pb2.ROLLOUT_STATE_FINISHED
    assert dict(rollout.labels) == {"origin": "test"}


async def test_groups_come_in_pages_and_by_state(api: Api, run: str) -> None:
    groups = await api.import_groups(run, 5)
    found: list[str] = []
    request = rollout_pb2.ListGroupsRequest(run=run, page_size=2)
    while True:
        page = await api.rollouts.ListGroups(request)
        assert len(page.groups) <= 2
        found += [group.group_id for group in page.groups]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert found == [group.group_id for group in reversed(groups)]
    await api.submit(run, [reward(rollout_id, 1.0) for rollout_id in groups[0].rollout_ids])
    dropped = rollout_pb2.ListGroupsRequest(run=run, state=rollout_pb2.GROUP_STATE_DROPPED)
    assert [group.group_id for group in (await api.rollouts.ListGroups(dropped)).groups] == [groups[0].group_id]


async def test_version_zero_is_live_and_can_be_downloaded(api: Api, run: str) -> None:
    live = (await api.policies.GetPolicy(policy_pb2.GetPolicyRequest(run=run))).version
    assert (live.policy.version, live.state) == (0, policy_pb2.VERSION_STATE_LIVE)
    whole, first = await _download(api, run, offset=0)
    assert hashlib.sha256(whole).hexdigest() == live.adapter_sha256 == first.sha256
    assert len(whole) == live.adapter_bytes == first.total_bytes
    rest, first = await _download(api, run, offset=100)
    assert (rest, first.sha256) == (whole[100:], live.adapter_sha256)
    nothing, first = await _download(api, run, offset=len(whole))
    assert (nothing, first.total_bytes) == (b"", len(whole))
    config, _ = await _download(api, run, offset=0, file="adapter_config.json")
    assert json.loads(config)["r"] == 4


async def _download(
    api: Api, run: str, offset: int, file: str = ""
) -> tuple[bytes, policy_pb2.DownloadAdapterResponse]:
    policy = common_pb2.Policy(run=run, version=0)
    request = policy_pb2.DownloadAdapterRequest(policy=policy, file=file, offset=offset)
    chunks = [chunk async for chunk in api.policies.DownloadAdapter(request)]
    assert chunks[0].offset == offset
    assert all(len(chunk.data) <= 1 << 20 for chunk in chunks)
    return b"".join(chunk.data for chunk in chunks), chunks[0]


async def test_a_step_through_imported_rollouts_reaches_every_watcher(api: Api, run: str) -> None:
    """Two groups train; without a policy server the new version waits STAGED, and every rollout says TRAINED."""
    groups = await api.import_groups(run, 2)
    rollout_ids = [rollout_id for group in groups for rollout_id in group.rollout_ids]
    watch = api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=rollout_ids), timeout=120)
    reading = asyncio.ensure_future(_receipts(watch))
    await api.submit(run, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(rollout_ids)])
    receipts = await reading
    assert [receipt.state for receipt in receipts] == [reward_pb2.RECEIPT_STATE_TRAINED] * 4
    assert {(receipt.step, receipt.version) for receipt in receipts} == {(1, 1)}
    signs = {receipt.rollout_id: receipt.advantage for receipt in receipts}
    assert [signs[rollout_id] > 0 for rollout_id in rollout_ids] == [False, True, False, True]
    versions = (await api.policies.ListVersions(policy_pb2.ListVersionsRequest(run=run))).versions
    assert [version.policy.version for version in versions] == [1, 0]
    assert versions[0].parent == 0


async def _receipts(watch: grpc.aio.UnaryStreamCall) -> list[reward_pb2.Receipt]:  # type: ignore[type-arg]
    return [response.receipt async for response in watch]


async def test_watch_policy_begins_with_the_live_version(api: Api, run: str) -> None:
    watch = api.policies.WatchPolicy(policy_pb2.WatchPolicyRequest(run=run), timeout=60)
    assert (await watch.read()).version.policy.version == 0
    watch.cancel()
