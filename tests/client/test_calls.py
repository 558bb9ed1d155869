"""Retries, resumed streams, prompts and errors, against a small gRPC server that fails on purpose.

The server here stands for a learner that restarts: what it says is fixed, so that each retry can be counted.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from qerld.v1 import (
    common_pb2,
    policy_pb2,
    policy_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)
from qerld_client import (
    AdapterError,
    AsyncClient,
    BusyError,
    Client,
    DeadlineError,
    InvalidRequestError,
    NotServedError,
    Outcome,
    OutcomesRejectedError,
    QerldError,
    RetryPolicy,
    UnavailableError,
)
from qerld_client.requests import prompt
from qerld_client.retry import Attempts

QUICK = RetryPolicy(first=0.01, longest=0.02)
WEIGHTS = b"0123456789" * 200_000
CONFIG = b"{}"


def fail(context: grpc.ServicerContext, code: grpc.StatusCode, *details: Any) -> None:
    status = status_pb2.Status(code=code.value[0], message="on purpose")
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, "on purpose")


class Flaky(
    run_pb2_grpc.RunServiceServicer,
    rollout_pb2_grpc.RolloutServiceServicer,
    reward_pb2_grpc.RewardServiceServicer,
    policy_pb2_grpc.PolicyServiceServicer,
):
    """Breaks each call as often as `breaks` says, then answers."""

    def __init__(self) -> None:
        self.breaks = 0
        self.code = grpc.StatusCode.UNAVAILABLE
        self.details: tuple[Any, ...] = ()
        self.seen: list[Any] = []
        self.sha256 = {"adapter_model.safetensors": hashlib.sha256(WEIGHTS).hexdigest()}

    def _maybe_fail(self, request: Any, context: Any) -> None:
        self.seen.append(request)
        if self.breaks:
            self.breaks -= 1
            fail(context, self.code, *self.details)

    def PauseRun(self, request: Any, context: Any) -> run_pb2.PauseRunResponse:
        self._maybe_fail(request, context)
        return run_pb2.PauseRunResponse(run=run_pb2.Run(name=request.run))

    def SubmitRewards(self, request: Any, context: Any) -> reward_pb2.SubmitRewardsResponse:
        problem = common_pb2.Problem(field="outcomes[0].reward", description="must be finite")
        answer = reward_pb2.OutcomeAnswer(rollout_id="a", answer=common_pb2.ANSWER_REJECTED, problem=problem)
        return reward_pb2.SubmitRewardsResponse(answers=[answer])

    def WatchRun(self, request: Any, context: Any) -> Iterator[run_pb2.WatchRunResponse]:
        self.seen.append(request)
        for step in range(request.after_step + 1, 7):
            yield run_pb2.WatchRunResponse(report=run_pb2.RunReport(step=step))
            if step % 2 == 0 and self.breaks:
                self.breaks -= 1
                fail(context, grpc.StatusCode.UNAVAILABLE)

    def Sample(self, request: Any, context: Any) -> Iterator[rollout_pb2.SampleResponse]:
        """Replay the group from its start, as the service does for a request id that it knows."""
        self.seen.append(request)
        yield rollout_pb2.SampleResponse(opened=rollout_pb2.GroupOpened(group_id="g", version=3))
        for index in (1, 0):
            rollout = common_pb2.Rollout(rollout_id=f"r{index}", index=index)
            yield rollout_pb2.SampleResponse(finished=rollout)
            if self.breaks:
                self.breaks -= 1
                fail(context, grpc.StatusCode.UNAVAILABLE)

    def WatchPolicy(self, request: Any, context: Any) -> Iterator[policy_pb2.WatchPolicyResponse]:
        """Say version 1, and nothing more until the client is gone."""
        yield policy_pb2.WatchPolicyResponse(version=policy_pb2.PolicyVersion(policy=common_pb2.Policy(version=1)))
        while context.is_active():
            time.sleep(0.02)

    def GetPolicy(self, request: Any, context: Any) -> policy_pb2.GetPolicyResponse:
        return policy_pb2.GetPolicyResponse(
            version=policy_pb2.PolicyVersion(policy=common_pb2.Policy(run=request.run, version=5))
        )

    def DownloadAdapter(self, request: Any, context: Any) -> Iterator[policy_pb2.DownloadAdapterResponse]:
        self.seen.append(request)
        whole = WEIGHTS if request.file == "adapter_model.safetensors" else CONFIG
        sha256 = self.sha256.get(request.file, hashlib.sha256(whole).hexdigest())
        for offset in range(request.offset, max(len(whole), request.offset + 1), 1 << 20):
            data = whole[offset : offset + (1 << 20)]
            yield policy_pb2.DownloadAdapterResponse(
                offset=offset, data=data, total_bytes=len(whole), sha256=sha256 if offset == request.offset else ""
            )
            if self.breaks and whole is WEIGHTS:
                self.breaks -= 1
                fail(context, grpc.StatusCode.UNAVAILABLE)


@pytest.fixture
def flaky() -> Iterator[tuple[Flaky, str]]:
    servicer = Flaky()
    server = grpc.server(ThreadPoolExecutor(4))
    run_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_mutation_is_retried_under_one_request_id(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 3
    with Client(target, retry=QUICK) as client:
        assert client.pause_run("a").name == "a"
        client.pause_run("a")
    ids = [request.request_id for request in servicer.seen]
    assert len(ids) == 5
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0]


async def test_the_async_client_retries_too(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 3
    async with AsyncClient(target, retry=QUICK) as client:
        assert (await client.pause_run("a")).name == "a"
    assert len({request.request_id for request in servicer.seen}) == 1


def test_retry_info_is_honoured(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks, servicer.code = 1, grpc.StatusCode.RESOURCE_EXHAUSTED
    servicer.details = (error_details_pb2.RetryInfo(retry_delay=Duration(nanos=400_000_000)),)
    begun = time.monotonic()
    with Client(target, retry=QUICK) as client:
        client.pause_run("a")
    assert 0.4 <= time.monotonic() - begun < 30


def test_retries_end_at_the_deadline(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 10**6
    begun = time.monotonic()
    with Client(target, retry=QUICK, timeout=2.0) as client, pytest.raises(UnavailableError):
        client.pause_run("a")
    assert time.monotonic() - begun < 30
    assert len(servicer.seen) > 3


def test_a_call_that_keeps_failing_says_so_once(
    flaky: tuple[Flaky, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, target = flaky
    with Client(target, retry=QUICK) as client:
        servicer.breaks = 5
        client.pause_run("a")
        assert caplog.records == []
        monkeypatch.setattr("qerld_client.retry.NOTICE_SECONDS", 0.0)
        servicer.breaks = 5
        client.pause_run("a")
    [record] = caplog.records
    assert (record.name, record.levelname) == ("qerld_client", "WARNING")
    assert record.getMessage() == "no success for 0 s, still trying: UNAVAILABLE: on purpose"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, NotServedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, BusyError),  # without RetryInfo: a message over the limit
    ],
)
def test_other_errors_are_not_retried(flaky: tuple[Flaky, str], code: grpc.StatusCode, kind: type[Exception]) -> None:
    servicer, target = flaky
    servicer.breaks, servicer.code = 5, code
    with Client(target, retry=QUICK) as client, pytest.raises(kind):
        client.pause_run("a")
    assert len(servicer.seen) == 1


def test_violations_are_decoded(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks, servicer.code = 1, grpc.StatusCode.INVALID_ARGUMENT
    bad = error_details_pb2.BadRequest.FieldViolation(field="run", description="must not be empty")
    servicer.details = (error_details_pb2.BadRequest(field_violations=[bad]),)
    with Client(target) as client, pytest.raises(InvalidRequestError) as caught:
        client.pause_run("")
    assert [(violation.field, violation.description) for violation in caught.value.violations] == [
        ("run", "must not be empty")
    ]


def test_a_broken_watch_goes_on_after_the_last_report(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 2
    with Client(target, retry=QUICK) as client:
        assert [report.step for report in client.watch_run("a", after_step=0)] == [1, 2, 3, 4, 5, 6]
    assert [request.after_step for request in servicer.seen] == [0, 2, 4]


async def test_a_broken_async_watch_goes_on(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 2
    async with AsyncClient(target, retry=QUICK) as client:
        assert [report.step async for report in client.watch_run("a", after_step=0)] == [1, 2, 3, 4, 5, 6]


def test_a_broken_sample_returns_each_rollout_once(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 2
    with Client(target, retry=QUICK) as client:
        group = client.sample("a", "hi")
    assert (group.group_id, group.version) == ("g", 3)
    assert [rollout.rollout_id for rollout in group.rollouts] == ["r0", "r1"]
    assert len({request.request_id for request in servicer.seen}) == 1
    assert len(servicer.seen) == 3


def test_a_watch_can_be_closed_from_another_thread(flaky: tuple[Flaky, str]) -> None:
    servicer, target = flaky
    servicer.breaks = 10**6
    slow = RetryPolicy(first=60, longest=60)
    with Client(target, retry=slow) as client:
        watch = client.watch_run("a", after_step=0)
        begun = time.monotonic()
        assert [next(watch).step, next(watch).step] == [1, 2]
        threading.Timer(0.3, watch.close).start()
        assert list(watch) == []
    assert time.monotonic() - begun < 30


def test_a_stream_has_a_deadline_when_asked(flaky: tuple[Flaky, str]) -> None:
    seen = []
    with Client(flaky[1], retry=QUICK) as client, pytest.raises(DeadlineError):
        seen.extend(version.policy.version for version in client.watch_policy("a", timeout=3.0))
    assert seen == [1]


def test_a_download_resumes_and_is_checked(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    servicer, target = flaky
    servicer.breaks = 1
    with Client(target, retry=QUICK) as client:
        folder = client.download_adapter("a", tmp_path / "adapter")
    assert (folder / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "adapter_config.json").read_bytes() == CONFIG
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert [(request.file, request.offset) for request in servicer.seen] == [
        ("adapter_config.json", 0),
        ("adapter_model.safetensors", 0),
        ("adapter_model.safetensors", 1 << 20),
    ]
    assert {request.policy.version for request in servicer.seen} == {5}


async def test_a_partial_file_of_an_earlier_process_is_used(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    servicer, target = flaky
    (tmp_path / ".adapter_model.safetensors.a@5.part").write_bytes(WEIGHTS[:100])
    (tmp_path / ".adapter_model.safetensors.a@4.part").write_bytes(b"another version")
    async with AsyncClient(target, retry=QUICK) as client:
        await client.download_adapter("a", tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert servicer.seen[-1].offset == 100


def test_a_wrong_checksum_is_refused_and_leaves_nothing(flaky: tuple[Flaky, str], tmp_path: Path) -> None:
    servicer, target = flaky
    servicer.sha256["adapter_model.safetensors"] = "0" * 64
    with Client(target) as client, pytest.raises(AdapterError, match="0" * 64):
        client.download_adapter("a", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter_config.json"]


def test_rejections_raise_unless_told_not_to(flaky: tuple[Flaky, str]) -> None:
    _, target = flaky
    with Client(target) as client:
        with pytest.raises(OutcomesRejectedError, match=r"outcomes\[0\].reward: must be finite"):
            client.submit_rewards("a", {"a": float("nan")})
        assert len(client.submit_rewards("a", [Outcome(rollout_id="a", reward=1)], strict=False)) == 1


def test_no_server_is_unavailable() -> None:
    with Client("127.0.0.1:1", timeout=0.5, retry=QUICK) as client, pytest.raises(UnavailableError):
        client.list_runs()


def test_prompts() -> None:
    assert prompt("hi").text == "hi"
    assert list(prompt([1, 2]).ids.ids) == [1, 2]
    chat = prompt([{"role": "user", "content": "hi"}]).messages.messages
    assert [(turn.role, turn.content) for turn in chat] == [("user", "hi")]
    assert prompt(prompt("hi")) == prompt("hi")
    assert prompt([]).WhichOneof("form") == "messages"
    for wrong in ([1, {"role": "user", "content": "hi"}], [True, False], [{"role": "user"}]):
        with pytest.raises(TypeError, match="a prompt is"):
            prompt(wrong)  # type: ignore[arg-type]


def test_a_stream_that_broke_while_written_to_is_opened_again() -> None:
    """grpc.aio calls that INTERNAL, whatever the service said: a reward worker must not give up over a restart."""
    none = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, details="Internal error from Core")
    assert Attempts(QUICK, None).wait_after(broken) <= QUICK.longest
    real = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, details="internal error; the log has it")
    with pytest.raises(QerldError, match="INTERNAL"):
        Attempts(QUICK, None).wait_after(real)
