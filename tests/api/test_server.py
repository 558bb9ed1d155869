"""The server itself: what it does not serve, health, reflection, sizes, metrics, attaching, stopping."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from qerld.v1 import common_pb2, policy_pb2, replica_pb2, rollout_pb2, run_pb2
from qerld_kernels.exclusive import FolderError, PortError
from qerld_kernels.fingerprint import base_fingerprint, chat_template_fingerprint, tokenizer_fingerprint
from qerld_learner.api.streams import Streams
from qerld_learner.app import Ports, running_learner
from qerld_learner.errors import PreconditionError, RetryLaterError
from qerld_learner.metrics import MAX_RUN_LABELS, LearnerMetrics
from qerld_learner.settings import LearnerSettings
from qerld_service import doctor, watch
from support.api import Api, failure, messages, retry_seconds, reward, sample_request, violations

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_what_is_not_served_says_so(api: Api, shared_run: str) -> None:
    policy = common_pb2.Policy(run=shared_run)
    calls: dict[str, Any] = {
        "RollbackPolicy": api.policies.RollbackPolicy(policy_pb2.RollbackPolicyRequest(run=shared_run)),
        "PinPolicy": api.policies.PinPolicy(policy_pb2.PinPolicyRequest(policy=policy)),
        "UpdateRun": api.runs.UpdateRun(run_pb2.UpdateRunRequest(run=shared_run)),
        "CheckpointRun": api.runs.CheckpointRun(run_pb2.CheckpointRunRequest(run=shared_run)),
    }
    for name, call in calls.items():
        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert str(error.details()).startswith(f"{name} is not served by this version of qerld; ")


async def test_health_by_service(api: Api) -> None:
    health = health_pb2_grpc.HealthStub(api.channel)
    for name in ("", "qerld.v1.RunService", "qerld.v1.RewardService", "qerld.v1.PolicyService"):
        assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING, name
    # No policy server is attached, so sampling is not possible.
    sampling = health_pb2.HealthCheckRequest(service="qerld.v1.RolloutService")
    assert (await health.Check(sampling)).status == NOT_SERVING
    watch = health.Watch(health_pb2.HealthCheckRequest(service="qerld.v1.RunService"))
    assert (await watch.read()).status == SERVING
    watch.cancel()
    unknown = health_pb2.HealthCheckRequest(service="nobody")
    assert (await failure(health.Check(unknown))).code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(api: Api) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(api.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = [item async for item in stub.ServerReflectionInfo(messages(request))]
    names = {service.name for service in response.list_services_response.service}
    assert {"qerld.v1.RolloutService", "qerld.v1.ReplicaService", "grpc.health.v1.Health"} <= names


async def test_large_messages_pass_and_larger_ones_are_refused(ports: Ports, shared_run: str) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.port}", options) as channel:
        big = Api(channel)
        request = sample_request(shared_run, labels={"k": "x" * (20 << 20)})
        error = await failure(big.rollouts.Sample(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT  # it was read, and the label refused
        assert "labels[k]" in violations(error)
        request = sample_request(shared_run, labels={"k": "x" * (65 << 20)})
        assert (await failure(big.rollouts.Sample(request))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# Attaching


@pytest.fixture(scope="module")
def hello(tiny_model: tuple[Path, Path]) -> replica_pb2.Hello:
    folder = tiny_model[1]
    return replica_pb2.Hello(
        replica_id="by-hand",
        endpoint="127.0.0.1:9",
        base_sha256=base_fingerprint(folder),
        tokenizer_sha256=tokenizer_fingerprint(folder),
        chat_template_sha256=chat_template_fingerprint(folder),
        engine_version="0",
        slots=1024,
        max_lora_rank=16,
        max_model_len=512,
        dtype="float32",
    )


async def _attached(api: Api, hello: replica_pb2.Hello) -> Any:
    """The call of a server that is attached; it has read what it should serve."""
    call = api.replicas.Attach(timeout=60)
    await call.write(replica_pb2.AttachRequest(hello=hello))
    await call.read()
    return call


@pytest.fixture
async def misfit(api: Api, hello: replica_pb2.Hello) -> AsyncIterator[replica_pb2.Hello]:
    """What a server says that the test spoils and has refused; no later test hears of it."""
    changed = replica_pb2.Hello()
    changed.CopyFrom(hello)
    changed.replica_id, changed.endpoint = "misfit", "127.0.0.1:7"
    yield changed
    (await _attached(api, changed)).cancel()
    await _replicas(api, _none_attached)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_sha256", "0" * 64),
        ("tokenizer_sha256", "0" * 64),
        ("chat_template_sha256", "0" * 64),
        ("dtype", "bfloat16"),
    ],
)
async def test_another_model_cannot_attach(api: Api, misfit: replica_pb2.Hello, field: str, value: str) -> None:
    changed = replica_pb2.Hello()
    changed.CopyFrom(misfit)
    setattr(changed, field, value)
    error = await failure(api.replicas.Attach(messages(replica_pb2.AttachRequest(hello=changed)), timeout=60))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert value in str(error.details())


async def test_a_refused_server_is_told_of(
    api: Api,
    ports: Ports,
    hello: replica_pb2.Hello,
    misfit: replica_pb2.Hello,
    run: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By ListReplicas, by Sample while none is attached, by `qerld doctor` and `qerld watch`, and by the metrics."""
    changed = replica_pb2.Hello()
    changed.CopyFrom(misfit)
    changed.dtype = "bfloat16"
    await failure(api.replicas.Attach(messages(replica_pb2.AttachRequest(hello=changed)), timeout=60))
    why = "policy server does not fit: dtype is 'bfloat16', the learner has 'float32'"
    replica = (await _list(api))[0]
    assert (replica.replica_id, replica.endpoint, replica.refused_reason) == ("misfit", "127.0.0.1:7", why)
    error = await failure(api.rollouts.Sample(sample_request(run), timeout=60))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"the last policy server that tried to attach was refused: {why}" in str(error.details())
    target = f"127.0.0.1:{ports.port}"
    monkeypatch.setenv("COLUMNS", "200")
    assert await asyncio.to_thread(doctor.main, ["--target", target]) == 1
    assert await asyncio.to_thread(watch.main, [run, "--target", target, "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("refused:") == 2
    await scrape_until(ports.metrics_port, lambda page: page['qerld_replicas{state="refused"}'] >= 1)

    # Once one is attached, Sample waits for it: it may load the version soon.
    call = await _attached(api, hello)
    sampling = api.rollouts.Sample(sample_request(run), timeout=60)
    assert (await sampling.read()).HasField("opened")
    sampling.cancel()
    # The same server with the right number format is no longer refused.
    again = await _attached(api, misfit)
    found = {replica.replica_id: replica.refused_reason for replica in await _list(api)}
    assert found["misfit"] == ""
    call.cancel()
    again.cancel()
    await _replicas(api, _none_attached)


async def test_attach_begins_with_hello(api: Api, hello: replica_pb2.Hello) -> None:
    state = replica_pb2.AttachRequest(state=replica_pb2.ReplicaState())
    error = await failure(api.replicas.Attach(messages(state), timeout=60))
    assert "Hello" in violations(error)["hello"]
    nameless = replica_pb2.AttachRequest(hello=replica_pb2.Hello(endpoint="x"))
    assert "hello.replica_id" in violations(await failure(api.replicas.Attach(messages(nameless), timeout=60)))


async def test_an_attached_server_is_listed_until_it_falls_silent(api: Api, hello: replica_pb2.Hello, run: str) -> None:
    call = api.replicas.Attach(timeout=60)
    await call.write(replica_pb2.AttachRequest(hello=hello))
    desired = (await call.read()).desired
    assert run in {version.policy.run for version in desired.versions}
    adapters = [replica_pb2.AdapterState(policy=version.policy, serving=True) for version in desired.versions]
    state = replica_pb2.ReplicaState(adapters=adapters, generation=desired.generation, reconciled=True)

    async def report() -> None:
        while True:
            await call.write(replica_pb2.AttachRequest(state=state))
            await asyncio.sleep(0.2)

    reporting = asyncio.create_task(report())
    replica = (await _replicas(api, lambda found: bool(found) and found[0].reconciled))[0]
    assert (replica.replica_id, replica.slots) == ("by-hand", 1024)
    assert run in {policy.run for policy in replica.loaded}
    await _health(api, "qerld.v1.RolloutService", SERVING)
    reporting.cancel()
    error = await _end(call)  # replica_timeout is short here
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_seconds(error) == 1.0
    await _replicas(api, _none_attached)


async def _end(call: Any) -> grpc.aio.AioRpcError:
    """Read a stream, opened with `read`, to its failure."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the stream ended well")


async def _replicas(api: Api, wanted: Any) -> list[run_pb2.Replica]:
    async with asyncio.timeout(60):
        while not wanted(found := await _list(api)):  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.1)
    return found


def _none_attached(found: list[run_pb2.Replica]) -> bool:
    return all(replica.refused_reason for replica in found)


async def _list(api: Api) -> list[run_pb2.Replica]:
    return list((await api.runs.ListReplicas(run_pb2.ListReplicasRequest(), timeout=60)).replicas)


async def _health(api: Api, service: str, wanted: Any) -> None:
    """Wait until a service's health is as wanted: it is looked at once a second."""
    health, request = health_pb2_grpc.HealthStub(api.channel), health_pb2.HealthCheckRequest(service=service)
    async with asyncio.timeout(60):
        while (await health.Check(request)).status != wanted:  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.1)


# Metrics


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        text = page.read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


async def scrape_until(port: int, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Scrape until the page is as wanted; returns it."""
    async with asyncio.timeout(120):
        while not wanted(page := await asyncio.to_thread(scrape, port)):  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.1)
    return page


async def test_outcomes_and_groups_are_counted_by_what_became_of_them(api: Api, ports: Ports, run: str) -> None:
    rollout_ids = await api.rollout_ids(run, 8)
    await api.submit(run, [reward("nowhere", 1.0)])
    await api.submit(run, [reward(rollout_id, 1.0) for rollout_id in rollout_ids[:2]])  # zero variance
    await api.submit(run, [reward(rollout_id, float(i % 2)) for i, rollout_id in enumerate(rollout_ids[2:6])])
    await api.submit(run, [reward(rollout_ids[0], 1.0)])
    hasty = await api.new_run(reward_deadline=Duration(seconds=1))
    await api.import_groups(hasty, 1)
    expected = {
        f'qerld_outcomes_total{{answer="accepted",run="{run}"}}': 6,
        f'qerld_outcomes_total{{answer="duplicate",run="{run}"}}': 1,
        f'qerld_outcomes_total{{answer="rejected",run="{run}"}}': 1,
        f'qerld_groups_total{{how="dropped_zero_variance",run="{run}"}}': 1,
        f'qerld_groups_total{{how="ready",run="{run}"}}': 2,
        f'qerld_groups_total{{how="trained",run="{run}"}}': 2,
        f'qerld_groups_total{{how="dropped_expired",run="{hasty}"}}': 1,
        f'qerld_buffer_groups{{run="{run}",state="awaiting_rewards"}}': 1,
        f'qerld_buffer_groups{{run="{run}",state="batched"}}': 0,
        f'qerld_buffer_groups{{run="{hasty}",state="awaiting_rewards"}}': 0,
        f'qerld_buffer_capacity_groups{{run="{run}"}}': 2 * (2 + 1),
        f'qerld_live_version{{run="{run}"}}': 0,  # no server: the version that was trained waits
        'qerld_replicas{state="serving"}': 0,
    }
    # Groups train and expire in their time, gauges are set once a second.
    await scrape_until(ports.metrics_port, lambda page: expected.items() <= page.items())


async def test_codes_are_counted(api: Api, ports: Ports) -> None:
    def series(code: str, method: str, service: str) -> str:
        labels = f'grpc_code="{code}",grpc_method="{method}",grpc_service="qerld.v1.{service}"'
        return f"grpc_server_handled_total{{{labels}}}"

    unknown = series("NOT_FOUND", "GetRun", "RunService")
    before = (await asyncio.to_thread(scrape, ports.metrics_port)).get(unknown, 0.0)
    await failure(api.runs.GetRun(run_pb2.GetRunRequest(run="nobody")))
    # A call is counted once its answer is on its way.
    wanted = before + 1
    await scrape_until(ports.metrics_port, lambda page: page.get(unknown, 0.0) == wanted)
    watch = api.policies.WatchPolicy(policy_pb2.WatchPolicyRequest(run=await api.new_run()))
    assert (await watch.read()).version.policy.version == 0
    cancelled = series("CANCELLED", "WatchPolicy", "PolicyService")
    before = (await asyncio.to_thread(scrape, ports.metrics_port)).get(cancelled, 0.0)
    watch.cancel()
    await scrape_until(ports.metrics_port, lambda page: page.get(cancelled, 0.0) >= before + 1)


def test_run_labels_are_bounded() -> None:
    metrics = LearnerMetrics()
    for number in range(MAX_RUN_LABELS + 50):
        metrics.outcomes_answered(f"run-{number}", "accepted", 1)
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    runs = {sample.labels["run"] for sample in samples if sample.name == "qerld_outcomes_total"}
    assert len(runs) == MAX_RUN_LABELS + 1
    assert "other" in runs


# Streams and stopping


async def test_outbox_holds_back_fast_tasks_and_frees_them_at_the_end() -> None:
    box = Streams().outbox()
    made = 0

    async def fast() -> AsyncIterator[int]:
        nonlocal made
        for number in range(1000):
            made += 1
            yield number

    box.pump(fast())
    drained = box.drain()
    assert await anext(drained) == 0
    await asyncio.sleep(0.01)
    assert made < 100
    await drained.aclose()
    assert made < 100


async def test_a_failed_task_fails_the_stream_after_what_is_queued() -> None:
    box = Streams().outbox()

    async def broken() -> AsyncIterator[int]:
        yield 1
        raise PreconditionError("broken")

    box.pump(broken())
    drained = box.drain()
    assert await anext(drained) == 1
    with pytest.raises(PreconditionError, match="broken"):
        await anext(drained)


async def test_stopping_ends_open_and_later_streams() -> None:
    streams = Streams()
    early = streams.outbox()
    streams.stop()
    for box in (early, streams.outbox()):
        with pytest.raises(RetryLaterError):
            _ = [item async for item in box.drain()]


async def test_a_stop_is_graceful(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    """Watchers are told to come back, and the learner starts again with everything it had."""
    settings = LearnerSettings(
        model=tiny_model[1], state_dir=tmp_path, port=0, metrics_port=0, device="cpu", dtype="float32", stop_grace=5
    )
    async with running_learner(settings) as ports:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{ports.port}")
        api = Api(channel)
        run = await api.new_run()
        (group,) = await api.import_groups(run, 1)
        watch = api.policies.WatchPolicy(policy_pb2.WatchPolicyRequest(run=run))
        assert (await watch.read()).version.policy.version == 0
    error = await _end(watch)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert retry_seconds(error) == 1.0
    await channel.close()
    async with running_learner(settings) as ports, grpc.aio.insecure_channel(f"127.0.0.1:{ports.port}") as channel:
        api = Api(channel)
        request = rollout_pb2.GetRolloutRequest(rollout_id=group.rollout_ids[0])
        assert (await api.rollouts.GetRollout(request)).rollout.run == run


async def test_two_learners_cannot_share_a_folder_or_a_port(
    ports: Ports, learner_settings: LearnerSettings, tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(FolderError, match="is in use by qerld learner, process"):
        async with running_learner(learner_settings):
            pass
    other = LearnerSettings(model=tiny_model[1], state_dir=tmp_path, port=ports.port, metrics_port=0, device="cpu")
    with pytest.raises(PortError, match="0 takes a free one"):
        async with running_learner(other):
            pass
