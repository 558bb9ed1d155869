"""Extreme values in every field of every request: each answer is clear, none is INTERNAL, no run stops over it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qerld.v1 import common_pb2, policy_pb2, replica_pb2, reward_pb2, rollout_pb2, run_pb2
from qerld_learner.app import running_learner
from qerld_learner.fingerprints import fingerprints_of
from qerld_learner.settings import LearnerSettings
from support.api import Api, import_request, new_id, sample_request, violations
from support.extremes import extreme

SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (run_pb2, "RunService"),
        (rollout_pb2, "RolloutService"),
        (reward_pb2, "RewardService"),
        (policy_pb2, "PolicyService"),
        (replica_pb2, "ReplicaService"),
    )
]
METHODS = {method.name: method for service in SERVICES for method in service.methods if method.input_type.fields}
BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
LEFT = "Internal error from Core"
"""grpc.aio's own word, not the server's, for a stream that the server ended while this client wrote to it."""
IDLE_SECONDS = 0.1
"""How long a stream that goes on may be silent before it counts as served."""


@dataclass(frozen=True)
class Fuzzed:
    """A learner of its own, with a run whose rollouts await rewards."""

    api: Api
    run: str
    rollout_ids: Iterator[str]
    hello: replica_pb2.Hello
    metrics_port: int


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fuzzed(learner_settings: LearnerSettings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fuzzed]:
    own = learner_settings.model_copy(update={"state_dir": tmp_path_factory.mktemp("fuzzed")})
    async with running_learner(own) as ports, grpc.aio.insecure_channel(f"127.0.0.1:{ports.port}") as channel:
        api = Api(channel)
        run = await api.new_run(groups_per_step=4096)  # never a full batch, never a full buffer
        yield Fuzzed(api, run, cycle(await api.rollout_ids(run, 64)), await _hello(own), ports.metrics_port)


async def _hello(own: LearnerSettings) -> replica_pb2.Hello:
    found = await fingerprints_of(own.model)
    return replica_pb2.Hello(
        replica_id="fuzzed",
        endpoint="127.0.0.1:1",
        base_sha256=found.base,
        tokenizer_sha256=found.tokenizer,
        chat_template_sha256=found.chat_template,
        slots=100,
        max_lora_rank=512,
        max_model_len=512,
        dtype="float32",
    )


def outcomes(ids: Sequence[str]) -> list[reward_pb2.Outcome]:
    """One outcome of each kind, of rollouts of one segment with three tokens."""
    values = reward_pb2.Values
    return [
        reward_pb2.Outcome(rollout_id=ids[0], reward=1.0, components={"length": 0.5}),
        reward_pb2.Outcome(rollout_id=ids[1], turn_rewards=values(values=[1.0])),
        reward_pb2.Outcome(rollout_id=ids[2], token_rewards=values(values=[0.0, 0.5, 1.0])),
        reward_pb2.Outcome(rollout_id=ids[3], error=reward_pb2.OutcomeError(kind=1, message="down")),
        reward_pb2.Outcome(rollout_id=ids[4], abstention=reward_pb2.Abstention(reason="unsure")),
    ]


def right_requests(rpc: str, it: Fuzzed, ids: Sequence[str]) -> list[Message]:
    """Return a right request; of a client stream its first messages."""
    run, key = it.run, new_id()
    policy = common_pb2.Policy(run=run, version=0)
    prompt = common_pb2.Prompt(text="seven")
    chat = common_pb2.Prompt(messages=common_pb2.Messages(messages=[common_pb2.Message(role="user", content="hi")]))
    lease, state = (
        Duration(seconds=5),
        replica_pb2.ReplicaState(
            adapters=[replica_pb2.AdapterState(policy=policy, serving=True, load_seconds=0.1)], generation=1
        ),
    )
    attach, stream = replica_pb2.AttachRequest, reward_pb2.StreamRewardsRequest
    table: dict[str, Callable[[], Sequence[Message]]] = {
        "CreateRun": lambda: [run_pb2.CreateRunRequest(run=f"run-{key[:12]}", request_id=key, config=full_config())],
        "GetRun": lambda: [run_pb2.GetRunRequest(run=run)],
        "UpdateRun": lambda: [run_pb2.UpdateRunRequest(run=run, request_id=key, etag="1", max_steps=3)],
        "PauseRun": lambda: [run_pb2.PauseRunRequest(run="nobody", request_id=key, reason="lunch")],
        "ResumeRun": lambda: [run_pb2.ResumeRunRequest(run=run, request_id=key)],
        "CheckpointRun": lambda: [run_pb2.CheckpointRunRequest(run=run, request_id=key)],
        "DeleteRun": lambda: [run_pb2.DeleteRunRequest(run="nobody", request_id=key)],
        "WatchRun": lambda: [run_pb2.WatchRunRequest(run=run, after_step=0)],
        "Sample": lambda: [sample_request(run, prompt=chat, sampling=common_pb2.Sampling(seed=1, stop_ids=[5]))],
        "SubmitPrompts": lambda: [
            rollout_pb2.SubmitPromptsRequest(
                run=run, request_id=key, prompts=[rollout_pb2.PromptItem(prompt=prompt, labels={"a": "b"})]
            )
        ],
        "ImportTrajectories": lambda: [import_request(run), import_request(run)],
        "GetRollout": lambda: [rollout_pb2.GetRolloutRequest(rollout_id=ids[0])],
        "ListGroups": lambda: [rollout_pb2.ListGroupsRequest(run=run, page_size=3, page_token="3")],
        "SubmitRewards": lambda: [reward_pb2.SubmitRewardsRequest(run=run, request_id=key, outcomes=outcomes(ids))],
        "StreamRewards": lambda: [
            stream(open=reward_pb2.OpenStream(run=run, worker="w", lease=lease)),
            stream(credits=reward_pb2.Credits(count=1)),
            stream(outcomes=reward_pb2.OutcomeBatch(request_id=key, outcomes=outcomes(ids))),
        ],
        "CheckRewards": lambda: [reward_pb2.CheckRewardsRequest(run=run, outcomes=outcomes(ids))],
        "GetReceipt": lambda: [reward_pb2.GetReceiptRequest(rollout_id=ids[0])],
        "WatchReceipts": lambda: [reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=ids[:3])],
        "GetPolicy": lambda: [policy_pb2.GetPolicyRequest(run=run, version=0)],
        "ListVersions": lambda: [policy_pb2.ListVersionsRequest(run=run, page_size=3, page_token="3")],
        "WatchPolicy": lambda: [policy_pb2.WatchPolicyRequest(run=run)],
        "DownloadAdapter": lambda: [policy_pb2.DownloadAdapterRequest(policy=policy, offset=10)],
        "RollbackPolicy": lambda: [policy_pb2.RollbackPolicyRequest(run=run, request_id=key, version=0)],
        "PinPolicy": lambda: [policy_pb2.PinPolicyRequest(policy=policy, request_id=key, pinned=True)],
        "Evaluate": lambda: [policy_pb2.EvaluateRequest(policy=policy, prompts=[prompt], samples=2)],
        "Attach": lambda: [attach(hello=it.hello), attach(state=state)],
    }
    return list(table[rpc]())


def full_config() -> run_pb2.RunConfig:
    """A configuration whose every float matters, so that an extreme one is not read over."""
    noise = run_pb2.AdaptiveNoise(schedule=2, sigma_start=1e-2, sigma_end=1e-3, stages=3)
    return run_pb2.RunConfig(
        lora=run_pb2.LoraConfig(rank=4, alpha=8, target_modules=["q_proj"]),
        algorithm=run_pb2.Algorithm(advantage=2, aggregation=2, kl_coef=0.1),
        noise=noise,
        group_size=2,
        reward_deadline=Duration(seconds=60),
    )


async def code_of(api: Api, method: MethodDescriptor, messages: Sequence[Message]) -> grpc.StatusCode:
    """Call a method and return its code; a stream that is silent for a while is served."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    shape = f"{_side(method.client_streaming)}_{_side(method.server_streaming)}"
    open_call = getattr(api.channel, shape)(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    call = open_call(_trickle(messages) if method.client_streaming else messages[0], timeout=120)
    try:
        if not method.server_streaming:
            await call
            return grpc.StatusCode.OK
        async with asyncio.timeout(IDLE_SECONDS):
            async for _ in call:
                pass
    except TimeoutError:
        return grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        check_words(error)
        return grpc.StatusCode.CANCELLED if error.details() == LEFT else error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


def check_words(error: grpc.aio.AioRpcError) -> None:
    """Whoever is refused learns the field and the way out."""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        found = violations(error)
        assert found, error
        assert all("; " in text for text in found.values()), error


def _side(streaming: bool) -> str:
    return "stream" if streaming else "unary"


async def _trickle(messages: Sequence[Message]) -> AsyncIterator[Message]:
    for message in messages:
        yield message


@pytest.mark.parametrize("rpc", METHODS)
@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_no_answer_is_internal(fuzzed: Fuzzed, rpc: str, data: st.DataObject) -> None:
    right = right_requests(rpc, fuzzed, [next(fuzzed.rollout_ids) for _ in range(5)])
    chosen = data.draw(st.integers(0, len(right) - 1))
    right[chosen] = data.draw(extreme(right[chosen]))
    code = await code_of(fuzzed.api, METHODS[rpc], right)
    assert code not in BROKEN
    if rpc == "CreateRun" and code is grpc.StatusCode.OK:
        name = right[0].run  # type: ignore[attr-defined]
        await fuzzed.api.runs.DeleteRun(run_pb2.DeleteRunRequest(run=name, request_id=new_id()), timeout=120)


async def test_the_server_counted_no_broken_call_and_no_run_stopped(fuzzed: Fuzzed) -> None:
    """It also saw the calls that this client left, and went on with what it had answered."""
    assert await asyncio.to_thread(broken_calls, fuzzed.metrics_port) == []
    runs = (await fuzzed.api.runs.ListRuns(run_pb2.ListRunsRequest(), timeout=30)).runs
    assert fuzzed.run in [run.name for run in runs]
    assert {(run.state, run.reason) for run in runs} == {(run_pb2.RUN_STATE_RUNNING, "")}


def broken_calls(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        lines = page.read().decode().splitlines()
    return [line for line in lines if "handled_total{" in line and any(f'"{code.name}"' in line for code in BROKEN)]
