"""The policy server on a real engine, attached to a learner's end of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from qerld.v1 import common_pb2, replica_pb2, replica_pb2_grpc
from qerld_kernels.exclusive import FolderError
from qerld_kernels.fingerprint import base_fingerprint, chat_template_fingerprint, tokenizer_fingerprint
from qerld_service.engine import PolicyEngine
from qerld_service.policy import RunningPolicy, running_policy
from safetensors.torch import load_file, save_file
from support.peer_learner import PeerLearner
from support.policy import (
    SLOTS,
    WEIGHTS,
    begin,
    collect,
    failed,
    reconciled,
    refused,
    request,
    sample,
    score,
    scrape,
    settings_for,
    state_of,
    until,
)
from support.tiny import make_adapter

pytestmark = pytest.mark.engine


async def test_hello_carries_fingerprints_and_limits(
    policy: RunningPolicy, peer: PeerLearner, tiny_model: tuple[Path, Path]
) -> None:
    await peer.attached()
    hello, model = peer.hellos[0], tiny_model[1]
    assert hello.base_sha256 == base_fingerprint(model)
    assert hello.tokenizer_sha256 == tokenizer_fingerprint(model)
    assert hello.chat_template_sha256 == chat_template_fingerprint(model)
    assert (hello.slots, hello.max_lora_rank, hello.max_model_len) == (SLOTS // 2, 8, policy.engine.max_model_len)
    assert hello.dtype == "float32"
    assert (await peer.report(reconciled)).adapters == []


async def test_a_desired_version_is_served_with_and_without_its_noise(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path
) -> None:
    await peer.desire("p", 3, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05, seed=9)
    report = await peer.report(reconciled)
    served = state_of(report, 3)
    assert served.serving
    assert not served.error
    assert served.load_seconds > 0
    assert served.noise_ratio == pytest.approx(1, abs=0.05)

    first = await anext(aiter(stub.Generate(request(3))))
    assert (first.noise.sigma, first.noise.seed) == (0.05, 9)
    [(noisy_ids, noisy)] = await collect(stub, request(3))
    [(clean_ids, clean)] = await collect(stub, request(3, noise_free=True))
    of_noisy, of_clean = await score(stub, 3, [noisy_ids, clean_ids])
    # Score is without noise: equal to what the clean instance sampled with, and not to the noisy one's.
    assert of_clean == pytest.approx(clean, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(of_noisy, noisy, strict=True)) > 1e-3


async def test_group_seeds_reproduce_and_greedy_needs_no_noise(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path
) -> None:
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05)
    await peer.report(reconciled)
    once, again = await collect(stub, request(1, count=4)), await collect(stub, request(1, count=4))
    assert [ids for ids, _ in once] == [ids for ids, _ in again]
    for (_, first), (_, second) in zip(once, again, strict=True):
        # The second prompt comes from the prefix cache: other shapes, other rounding.
        assert first == pytest.approx(second, abs=1e-5)
    assert len({tuple(ids) for ids, _ in once}) > 1
    greedy = request(1, greedy=True, noise_free=True)
    other_seed = request(1, greedy=True, noise_free=True)
    other_seed.sampling.seed = 6
    assert (await collect(stub, greedy))[0][0] == (await collect(stub, other_seed))[0][0]
    for wanted, text in (
        (request(1, greedy=True), "greedy: needs noise_free"),
        (request(1, greedy=True, noise_free=True, count=2), "count: must be 1 with greedy"),
    ):
        code, details = await refused(collect(stub, wanted))
        assert (code, details[: len(text)]) == (grpc.StatusCode.INVALID_ARGUMENT, text)


async def test_hot_swap_leaves_running_requests_alone_and_drains_the_old_version(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path
) -> None:
    long = request(1, count=8, max_tokens=200)
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05)
    await peer.report(reconciled)
    undisturbed = await collect(stub, long)

    running = await begin(stub, long)
    await peer.desire("p", 2, make_adapter(tmp_path / "b", 2, 0.5), sigma=0.05)
    await peer.drop("p", 1)
    new = await peer.report(lambda r: any(a.policy.version == 2 and a.serving for a in r.adapters))
    assert not running.done()
    assert state_of(new, 1).in_flight > 0
    assert not state_of(new, 1).serving
    code, text = await refused(collect(stub, request(1)))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "p@1 is not served here: draining" in text
    assert (await collect(stub, request(2)))[0][0]

    assert [ids for ids, _ in await running] == [ids for ids, _ in undisturbed]
    gone = await peer.report(lambda r: len(r.adapters) == 1 and r.reconciled)
    assert gone.adapters[0].policy.version == 2
    assert {key.version for key in policy.engine.loaded if key.run == "p"} == {2}
    cached = [folder.name for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]
    assert [name.split("-")[0] for name in cached] == ["p@2"]


async def test_a_corrupted_download_is_reported_and_tried_again(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path
) -> None:
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5))
    await peer.report(reconciled)
    peer.tamper = lambda file, offset, data: data[:-1] + b"\0" if file == WEIGHTS and offset == 0 else data
    await peer.desire("p", 2, make_adapter(tmp_path / "b", 2, 0.5))
    report = await peer.report(failed(2))
    assert "download: adapter_model.safetensors of p@2: sha256 must be" in state_of(report, 2).error
    assert state_of(report, 2).retrying
    assert state_of(report, 1).serving
    assert (await collect(stub, request(1)))[0][0]
    peer.tamper = None
    assert state_of(await peer.report(reconciled), 2).serving


async def test_a_broken_download_resumes_where_it_ended(
    policy: RunningPolicy, peer: PeerLearner, tmp_path: Path
) -> None:
    def break_once(file: str, offset: int, data: bytes) -> bytes:
        if file == WEIGHTS and offset == 4096:
            peer.tamper = None
            raise ConnectionError("cable pulled")
        return data

    peer.tamper = break_once
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5))
    await peer.report(reconciled)
    assert [offset for file, offset in peer.downloads if file == WEIGHTS] == [0, 4096]


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def not_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def nonsense_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def rank_too_large(folder: Path) -> None:
    shutil.rmtree(folder)
    make_adapter(folder, 1, 0.5, rank=16)


def other_shape(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith("down_proj.lora_A.weight"))
    tensors[name] = tensors[name][:, :64].clone()
    save_file(tensors, folder / WEIGHTS)


def other_rank_in_config(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 4}))


@pytest.mark.parametrize(
    "spoil", [truncate, not_safetensors, nonsense_config, rank_too_large, other_shape, other_rank_in_config]
)
async def test_a_bad_adapter_is_reported_and_hurts_nothing_else(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path, spoil: Any
) -> None:
    good, bad = make_adapter(tmp_path / "good", 1, 0.5), make_adapter(tmp_path / "bad", 2, 0.5)
    spoil(bad)
    await peer.desire("p", 1, good, sigma=0.05)
    await peer.desire("p", 2, bad, sigma=0.05, live=False)
    report = await peer.report(lambda r: failed(2)(r) and state_of(r, 1).serving)
    assert state_of(report, 2).error.startswith("adapter: ")
    assert not report.reconciled
    assert (await collect(stub, request(1)))[0][0]
    code, _ = await refused(collect(stub, request(2)))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert not policy.engine.errored
    await peer.drop("p", 2)
    assert (await peer.report(reconciled)).adapters[0].policy.version == 1


async def test_more_versions_than_slots_are_refused_by_name(
    policy: RunningPolicy, peer: PeerLearner, tmp_path: Path
) -> None:
    for version in range(4):
        await peer.desire("p", version, make_adapter(tmp_path / str(version), version, 0.5), sigma=0.05)
    report = await peer.report(lambda r: sum(a.serving for a in r.adapters) == 3 and any(a.error for a in r.adapters))
    assert [a.serving for a in report.adapters] == [False, True, True, True]
    assert state_of(report, 0).error.startswith(f"slots: {SLOTS} (max_loras) are taken")
    await peer.drop("p", 1)
    assert [a.serving for a in (await peer.report(reconciled)).adapters] == [True, True, True]


async def test_noise_that_is_none_is_reported(policy: RunningPolicy, peer: PeerLearner, tmp_path: Path) -> None:
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5), sigma=float("nan"))
    report = await peer.report(failed(1))
    assert state_of(report, 1).error == "noise: sigma: must be finite and at least 0, got nan"
    assert not report.reconciled


async def test_serving_goes_on_while_the_learner_is_away(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    peer = PeerLearner()
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05)
    async with contextlib.AsyncExitStack() as stack:
        serving = peer.serving()
        port = await serving.__aenter__()
        policy = await stack.enter_async_context(
            running_policy(settings_for(tiny_model[1], port, tmp_path / "cache"), engine)
        )
        await peer.report(reconciled)
        await serving.__aexit__(None, None, None)
        async with grpc.aio.insecure_channel(policy.hello.endpoint) as channel:
            stub = replica_pb2_grpc.PolicyReplicaServiceStub(channel)
            assert (await collect(stub, request(1)))[0][0]
        while sample(await scrape(policy), "qerld_policy_attached"):  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.05)
        peer.reports.clear()
        async with peer.serving(port):
            await peer.attached(2)
            await peer.report(reconciled)
            assert peer.hellos[0].replica_id == peer.hellos[1].replica_id
            assert [file for file, _ in peer.downloads].count(WEIGHTS) == 1


async def test_a_refused_attachment_is_tried_again(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    peer = PeerLearner(refuse_attach="base_sha256: another model")
    async with (
        peer.serving() as port,
        running_policy(settings_for(tiny_model[1], port, tmp_path / "cache"), engine),
    ):
        await peer.attached(2)
        peer.refuse_attach = ""
        await peer.report(reconciled)


async def test_two_servers_cannot_share_a_cache(policy: RunningPolicy, tiny_model: Any, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=rf"cache_dir: .* is in use by qerld policy, process {os.getpid()}; stop it"):
        async with running_policy(settings_for(tiny_model[1], 1, tmp_path / "cache"), policy.engine):
            pass


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"count": 0}, "count: must be from 1 to 1024, got 0"),
        ({"sampling": common_pb2.Sampling(max_tokens=4)}, "sampling.temperature: must be above 0, got 0"),
        ({"sampling": common_pb2.Sampling(temperature=1.0)}, "sampling.max_tokens: must be at least 1, got 0"),
        ({"prompt": common_pb2.TokenIds(ids=[])}, "prompt_ids: must have from 1 to"),
        ({"prompt": common_pb2.TokenIds(ids=[1] * 400)}, "prompt_ids: must have from 1 to"),
        ({"prompt": common_pb2.TokenIds(ids=[1, 512])}, "prompt_ids: must be from 0 to 511, got 512"),
        ({"prompt": common_pb2.TokenIds(ids=[-1])}, "prompt_ids: must be from 0 to 511, got -1"),
    ],
)
async def test_bad_requests_are_named(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5))
    await peer.report(reconciled)
    wanted = request(1)
    for name, value in change.items():
        wanted.ClearField(name)
        wanted.MergeFrom(replica_pb2.GenerateRequest(**{name: value}))
    code, details = await refused(collect(stub, wanted))
    assert (code, details[: len(text)]) == (grpc.StatusCode.INVALID_ARGUMENT, text)


async def test_a_cancelled_call_is_aborted_in_the_engine(
    policy: RunningPolicy, peer: PeerLearner, stub: Any, tmp_path: Path
) -> None:
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5))
    await peer.report(reconciled)
    call = stub.Generate(request(1, count=32, max_tokens=240))
    await anext(aiter(call))
    call.cancel()
    await until(lambda: not sum(policy.engine.stats.in_flight.values()))
    text = await scrape(policy)
    assert sample(text, 'qerld_policy_generated_tokens_total{method="Generate"}') < 32 * 200
    assert sample(text, 'qerld_policy_requests_total{code="CANCELLED",method="Generate"}') == 1


async def test_reflection_lists_the_services(policy: RunningPolicy) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{policy.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"qerld.v1.PolicyReplicaService", "grpc.health.v1.Health"} <= names


async def test_health_follows_the_desired_state(policy: RunningPolicy, peer: PeerLearner, tmp_path: Path) -> None:
    await peer.attached()

    async def status(name: str) -> int:
        async with grpc.aio.insecure_channel(policy.hello.endpoint) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name))
        return int(answer.status)

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert [await status(name) for name in ("", "started")] == [serving, serving]
    bad = make_adapter(tmp_path / "bad", 2, 0.5)
    truncate(bad)
    await peer.desire("p", 1, bad)
    await peer.report(failed(1))
    assert [await status(name) for name in ("", "qerld.v1.PolicyReplicaService", "started")] == [
        not_serving,
        not_serving,
        serving,
    ]
