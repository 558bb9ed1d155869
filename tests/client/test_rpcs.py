"""Each method of both clients calls its own RPC with the right request, seen on the wire to a real learner."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from qerld.v1 import common_pb2, policy_pb2, reward_pb2, rollout_pb2, run_pb2
from qerld_client import AsyncClient, Client, QerldError, Task
from qerld_client.sync_calls import Stream
from support.recorder import Recorder, recording

from .conftest import Target
from .test_learner import PROMPT, imported, new_run, trajectories
from .test_surface import PUBLIC, snake

METHODS: dict[str, MethodDescriptor] = {method.name: method for service in PUBLIC for method in service.methods}


@dataclass(frozen=True)
class Case:
    """How to call a method, and what must go over the wire (request ids aside)."""

    sent: tuple[Message, ...]
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def cases(run: str, rollout_id: str, folder: Path) -> dict[str, Case]:
    """One case an RPC; every argument differs from its default."""
    config = run_pb2.RunConfig(group_size=3)
    prompt, policy = common_pb2.Prompt(text="seven"), common_pb2.Policy(run=run, version=0)
    sampling = common_pb2.Sampling(seed=7)
    outcome = reward_pb2.Outcome(rollout_id=rollout_id, reward=0.5)
    return {
        "CreateRun": Case(
            (run_pb2.CreateRunRequest(run=run, config=config, initial_adapter=b"x"),),
            (run, config),
            {"initial_adapter": b"x"},
        ),
        "GetRun": Case((run_pb2.GetRunRequest(run=run),), (run,)),
        "ListRuns": Case((run_pb2.ListRunsRequest(),)),
        "UpdateRun": Case((run_pb2.UpdateRunRequest(run=run, etag="3", max_steps=5),), (run, "3"), {"max_steps": 5}),
        "PauseRun": Case((run_pb2.PauseRunRequest(run=run, reason="lunch"),), (run, "lunch")),
        "ResumeRun": Case((run_pb2.ResumeRunRequest(run=run),), (run,)),
        "CheckpointRun": Case((run_pb2.CheckpointRunRequest(run=run),), (run,)),
        "DeleteRun": Case((run_pb2.DeleteRunRequest(run="nobody"),), ("nobody",)),
        "WatchRun": Case((run_pb2.WatchRunRequest(run=run, after_step=0),), (run,), {"after_step": 0}),
        "ListReplicas": Case((run_pb2.ListReplicasRequest(),)),
        "Sample": Case(
            (
                rollout_pb2.SampleRequest(
                    run="nobody",
                    prompt=prompt,
                    group_size=3,
                    sampling=sampling,
                    labels={"a": "b"},
                    reward_deadline=Duration(seconds=9),
                ),
            ),
            ("nobody", "seven"),
            {"group_size": 3, "sampling": sampling, "labels": {"a": "b"}, "reward_deadline": 9.0},
        ),
        "SubmitPrompts": Case(
            (
                rollout_pb2.SubmitPromptsRequest(
                    run="nobody",
                    prompts=[rollout_pb2.PromptItem(prompt=prompt, group_size=3, sampling=sampling, labels={"a": "b"})],
                ),
            ),
            ("nobody", [Task("seven", {"a": "b"})]),
            {"group_size": 3, "sampling": sampling},
        ),
        "ImportTrajectories": Case(
            tuple(
                rollout_pb2.ImportTrajectoriesRequest(
                    run=run,
                    prompt=common_pb2.Prompt(ids=common_pb2.TokenIds(ids=PROMPT)),
                    trajectories=trajectories(),
                    labels={"number": number},
                )
                for number in ("1", "2")
            ),
            (run, [(Task(PROMPT, {"number": number}), trajectories()) for number in ("1", "2")]),
        ),
        "GetRollout": Case((rollout_pb2.GetRolloutRequest(rollout_id=rollout_id),), (rollout_id,)),
        "ListGroups": Case(
            (rollout_pb2.ListGroupsRequest(run=run, state=rollout_pb2.GROUP_STATE_READY),),
            (run, rollout_pb2.GROUP_STATE_READY),
        ),
        "SubmitRewards": Case(
            (reward_pb2.SubmitRewardsRequest(run=run, outcomes=[outcome]),), (run, {rollout_id: 0.5})
        ),
        "StreamRewards": Case(
            (
                reward_pb2.StreamRewardsRequest(
                    open=reward_pb2.OpenStream(run=run, worker="me", lease=Duration(seconds=5))
                ),
                reward_pb2.StreamRewardsRequest(credits=reward_pb2.Credits(count=3)),
            ),
            (run, lambda rollout: 0.0),
            {"worker": "me", "credits": 3, "lease": 5.0},
        ),
        "CheckRewards": Case((reward_pb2.CheckRewardsRequest(run=run, outcomes=[outcome]),), (run, {rollout_id: 0.5})),
        "GetReceipt": Case((reward_pb2.GetReceiptRequest(rollout_id=rollout_id),), (rollout_id,)),
        "WatchReceipts": Case(
            (reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=[rollout_id]),), (run, [rollout_id])
        ),
        "GetPolicy": Case((policy_pb2.GetPolicyRequest(run=run, version=0),), (run, 0)),
        "ListVersions": Case((policy_pb2.ListVersionsRequest(run=run),), (run,)),
        "WatchPolicy": Case((policy_pb2.WatchPolicyRequest(run=run),), (run,)),
        "DownloadAdapter": Case(
            (policy_pb2.DownloadAdapterRequest(policy=policy, file="adapter_config.json"),), (run, folder, 0)
        ),
        "RollbackPolicy": Case(
            (policy_pb2.RollbackPolicyRequest(run=run, version=1, reason="worse"),), (run, 1, "worse")
        ),
        "PinPolicy": Case((policy_pb2.PinPolicyRequest(policy=policy, pinned=True),), (run, 0)),
        "Evaluate": Case(
            (policy_pb2.EvaluateRequest(policy=policy, prompts=[prompt], samples=2, greedy=True, sampling=sampling),),
            (run, 0, ["seven"]),
            {"samples": 2, "greedy": True, "sampling": sampling},
        ),
    }


@dataclass(frozen=True)
class Wire:
    """A recorder in front of the learner, and what is there to ask about."""

    recorder: Recorder
    address: str
    run: str
    rollout_id: str


@pytest_asyncio.fixture(loop_scope="session")
async def wire(client: AsyncClient, learner_target: Target) -> AsyncIterator[Wire]:
    run = await new_run(client)
    rollout_id = (await imported(client, run, 1))[0]
    async with recording(learner_target.address) as (recorder, address):
        yield Wire(recorder, address, run, rollout_id)


def use_sync(client: Client, name: str, case: Case) -> None:
    """Call and read what comes, until the client is closed."""
    with contextlib.suppress(QerldError, ValueError):  # ValueError: the channel is closed already
        answer = getattr(client, name)(*case.arguments, **case.options)
        if isinstance(answer, Stream) or inspect.isgenerator(answer):
            list(answer)


async def use_async(client: AsyncClient, name: str, case: Case) -> None:
    with contextlib.suppress(QerldError):
        answer = getattr(client, name)(*case.arguments, **case.options)
        if inspect.isawaitable(answer):
            await answer
        else:
            async for _ in answer:
                pass


def path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def decoded(method: MethodDescriptor, messages: list[bytes]) -> list[Message]:
    """Return what was sent, after a look at the request ids, which each mutation must have."""
    found = [GetMessageClass(method.input_type).FromString(data) for data in messages]
    for message in found:
        if "request_id" in message.DESCRIPTOR.fields_by_name:
            assert len(message.request_id) == 36  # type: ignore[attr-defined]
            message.ClearField("request_id")
    return found


def check(wire: Wire, method: MethodDescriptor, case: Case, messages: list[bytes]) -> None:
    assert decoded(method, messages[: len(case.sent)]) == list(case.sent)
    assert {call.method for call in wire.recorder.calls} == {path(method)}


def test_every_rpc_has_a_case(tmp_path: Path) -> None:
    assert set(cases("run", "rollout", tmp_path)) == set(METHODS)


@pytest.mark.parametrize("rpc", METHODS)
async def test_a_sync_method_calls_its_own_rpc(wire: Wire, tmp_path: Path, rpc: str) -> None:
    method, case = METHODS[rpc], cases(wire.run, wire.rollout_id, tmp_path)[rpc]
    with Client(wire.address) as client:
        using = asyncio.ensure_future(asyncio.to_thread(use_sync, client, snake(rpc), case))
        recorded = await wire.recorder.first(len(case.sent))
        await _until_over(using, client.close)
    check(wire, method, case, recorded.messages)


@pytest.mark.parametrize("rpc", METHODS)
async def test_an_asyncio_method_calls_its_own_rpc(wire: Wire, tmp_path: Path, rpc: str) -> None:
    method, case = METHODS[rpc], cases(wire.run, wire.rollout_id, tmp_path)[rpc]
    async with AsyncClient(wire.address) as client:
        using = asyncio.ensure_future(use_async(client, snake(rpc), case))
        recorded = await wire.recorder.first(len(case.sent))
        await _until_over(using, using.cancel)
    check(wire, method, case, recorded.messages)


async def _until_over(using: asyncio.Future[None], end: Callable[[], object]) -> None:
    """Give the call a moment to be answered, for calls that it should not make; end it when it goes on."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(using), 0.2)
    end()
    with contextlib.suppress(asyncio.CancelledError):
        await using


async def test_the_loop_asks_for_the_report_of_a_step_that_is_not_live_yet(
    client: AsyncClient, wire: Wire, learner_target: Target
) -> None:
    """It may be the run's last, and whoever waits for a later one waits for ever. Without a policy server it stays."""
    run = await new_run(client)
    rollout_ids = await imported(client, run, 2)
    await client.submit_rewards(run, {rollout_id: float(i % 2) for i, rollout_id in enumerate(rollout_ids)})
    async for receipt in client.watch_receipts(run, rollout_ids, timeout=120):
        assert receipt.step == 1
    assert (await client.get_run(run)).step == 1
    method = METHODS["WatchRun"]
    for kind in (Client, AsyncClient):
        async with recording(learner_target.address) as (recorder, address):
            training = asyncio.ensure_future(_train(kind, address, run))
            recorded = await recorder.first(method=path(method))
            assert decoded(method, recorded.messages) == [run_pb2.WatchRunRequest(run=run, after_step=0)]
            await _until_over(training, training.cancel)


async def _train(kind: type[Client] | type[AsyncClient], address: str, run: str) -> None:
    """Train until cancelled."""
    if kind is AsyncClient:
        async with AsyncClient(address) as client:
            async for _ in client.train(run, ["seven"], lambda rollout: 0.0):
                pass
        return
    stopped = threading.Event()

    def train() -> None:
        with Client(address, timeout=1) as client, contextlib.suppress(QerldError):
            reports = client.train(run, ["seven"], lambda rollout: 0.0)
            threading.Thread(target=lambda: (stopped.wait(), client.close()), daemon=True).start()
            list(reports)

    try:
        await asyncio.to_thread(train)
    finally:
        stopped.set()
