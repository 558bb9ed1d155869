"""The policy engine on the CPU with a tiny random NVFP4 Llama: exactness of versions, swaps, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.noise import Noise, scaled_noise
from qerld_kernels.nvfp4 import dequantize
from qerld_service.adapters import AdapterError, AdapterKey, AdapterNotLoadedError, SlotsFullError
from qerld_service.engine import EngineConfig, EngineDiedError, PolicyEngine, RequestError, Sampling
from safetensors.torch import load_file, save_file
from support.tiny import make_adapter, make_tiny_model

pytestmark = pytest.mark.engine

PROMPT = [5, 17, 300, 41, 9, 123, 88, 7, 250, 31, 64, 402, 12, 90, 77, 3, 210, 55, 19, 8]
SAMPLING = Sampling(max_tokens=24, n=4, seed=11)
NOISE = Noise(sigma=0.05, seed=2**63 + 5)

Completion = tuple[list[int], list[float], str | None]


async def begin(
    engine: PolicyEngine, key: AdapterKey, request_id: str, sampling: Sampling
) -> asyncio.Task[list[Completion]]:
    """Start to collect; returns when the first token has come, or the request has ended without any."""
    first = asyncio.Event()
    running = asyncio.create_task(collect(engine, key, request_id, sampling, first))
    running.add_done_callback(lambda _: first.set())
    await first.wait()
    return running


async def collect(
    engine: PolicyEngine, key: AdapterKey, request_id: str, sampling: Sampling, first: asyncio.Event | None = None
) -> list[Completion]:
    """All completions of PROMPT as (token ids, log-probabilities, finish reason)."""
    done: list[Completion] = [([], [], None) for _ in range(sampling.n)]
    async for delta in engine.generate(key, request_id, PROMPT, sampling):
        if first is not None:
            first.set()
        ids, logprobs, reason = done[delta.index]
        assert len(delta.token_ids) == len(delta.logprobs)
        done[delta.index] = (ids + delta.token_ids, logprobs + delta.logprobs, delta.finish_reason or reason)
    return done


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    """Equal tokens, and log-probabilities equal but for the last bits: fp32 products depend on a batch's shape."""
    assert [(ids, reason) for ids, _, reason in got] == [(ids, reason) for ids, _, reason in expected]
    for (_, ours, _), (_, theirs, _) in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=5e-6, rtol=0)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh(engine: PolicyEngine) -> AsyncIterator[PolicyEngine]:
    """The shared engine; what the test left loaded is unloaded."""
    yield engine
    for key in engine.loaded:
        await engine.unload(key)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), seed=seed, scale=0.1) for seed in range(3)]


def key(version: int, *, noisy: bool = True, run: str = "engine-tests") -> AdapterKey:
    return AdapterKey(run, version, noisy)


async def test_a_seed_reproduces_tokens_and_logprobs(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    first = await collect(fresh, key(1), "a", SAMPLING)
    again = await collect(fresh, key(1), "b", SAMPLING)
    assert_same(again, first)
    assert len({tuple(ids) for ids, _, _ in first}) == SAMPLING.n
    assert await collect(fresh, key(1), "c", replace(SAMPLING, seed=12)) != first


async def test_versions_with_different_noise_in_one_batch_are_as_if_alone(
    fresh: PolicyEngine, adapters: list[Path]
) -> None:
    versions = {
        key(1): (adapters[0], NOISE),
        key(2): (adapters[0], Noise(sigma=0.05, seed=6)),
        key(3): (adapters[1], Noise(sigma=0.02, seed=7, relative=True)),
        key(1, noisy=False): (adapters[0], None),
    }
    alone = []
    for version, (folder, noise) in versions.items():
        await fresh.load(version, folder, noise)
        alone.append(await collect(fresh, version, "alone", SAMPLING))
        await fresh.unload(version)
    for version, (folder, noise) in versions.items():
        await fresh.load(version, folder, noise)
    together = await asyncio.gather(*(collect(fresh, version, version.name, SAMPLING) for version in versions))
    for got, expected in zip(together, alone, strict=True):
        assert_same(got, expected)
    assert len({str(completions) for completions in together}) == len(versions), "noise must change the output"


async def test_sigma_zero_beside_noise_is_bit_equal_to_no_noise(fresh: PolicyEngine, adapters: list[Path]) -> None:
    clean, zero, noisy = key(1, noisy=False), key(1), key(2)
    await fresh.load(clean, adapters[0], None)
    clean_alone = await collect(fresh, clean, "clean", SAMPLING)
    await fresh.load(zero, adapters[0], Noise(sigma=0.0, seed=1))
    await fresh.load(noisy, adapters[0], NOISE)
    # The same shape of batch with and without noise in it: beside one other request that has the noise, or has none.
    zero_beside_noise, _ = await asyncio.gather(*(collect(fresh, k, k.name, SAMPLING) for k in (zero, noisy)))
    await fresh.unload(zero)
    await fresh.unload(noisy)
    await fresh.load(zero, adapters[0], None)
    await fresh.load(noisy, adapters[0], None)
    never_noise, _ = await asyncio.gather(*(collect(fresh, k, k.name, SAMPLING) for k in (zero, noisy)))
    assert [ids for ids, _, _ in zero_beside_noise] == [ids for ids, _, _ in never_noise]
    assert [logprobs[0] for _, logprobs, _ in zero_beside_noise] == [logprobs[0] for _, logprobs, _ in never_noise]
    assert_same(zero_beside_noise, clean_alone)


async def test_a_hot_swap_leaves_running_requests_alone(fresh: PolicyEngine, adapters: list[Path]) -> None:
    long = replace(SAMPLING, max_tokens=220)
    await fresh.load(key(1), adapters[0], NOISE)
    undisturbed = await collect(fresh, key(1), "before", long)
    running = await begin(fresh, key(1), "running", long)
    await fresh.load(key(2), adapters[1], Noise(sigma=0.1, seed=3))
    assert not running.done()
    newer = await collect(fresh, key(2), "newer", SAMPLING)
    assert_same(await running, undisturbed)
    assert newer != [(ids[:24], logprobs[:24], reason) for ids, logprobs, reason in undisturbed]


async def test_unload_waits_for_running_requests_and_refuses_new_ones(
    fresh: PolicyEngine, adapters: list[Path]
) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    running = await begin(fresh, key(1), "running", replace(SAMPLING, max_tokens=100))
    unloading = asyncio.create_task(fresh.unload(key(1)))
    await asyncio.sleep(0)
    assert not running.done()
    with pytest.raises(AdapterNotLoadedError):
        await collect(fresh, key(1), "late", SAMPLING)
    completions = await running
    assert {reason for _, _, reason in completions} <= {"length", "stop"}
    await unloading
    assert key(1) not in fresh.loaded


async def test_reloading_a_key_never_serves_a_stale_cache(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    first = await collect(fresh, key(1), "a", SAMPLING)
    await fresh.unload(key(1))
    await fresh.load(key(1), adapters[1], None)
    other = await collect(fresh, key(1), "b", SAMPLING)
    await fresh.load(key(2), adapters[1], None)
    assert_same(await collect(fresh, key(2), "c", SAMPLING), other)
    assert other != first


async def test_unknown_adapters_are_refused_before_the_engine(fresh: PolicyEngine) -> None:
    with pytest.raises(AdapterNotLoadedError, match="nobody@9"):
        await collect(fresh, AdapterKey("nobody", 9, True), "x", SAMPLING)
    with pytest.raises(AdapterNotLoadedError):
        await fresh.score(key(9), PROMPT, [1, 2])
    with pytest.raises(AdapterNotLoadedError):
        await fresh.unload(key(9))
    await fresh.check_health()


def _break(folder: Path, how: str) -> None:
    weights, config_path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    config, tensors = json.loads(config_path.read_text()), load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "no config":
        config_path.unlink()
    elif how == "rank too high":
        config["r"] = 64
    elif how == "other shape":
        tensors[name] = torch.zeros(8, 65, dtype=torch.bfloat16)
    elif how == "other model":
        tensors = {key.replace("layers.1", "layers.7"): value for key, value in tensors.items()}
    elif how == "half a pair":
        del tensors[name]
    elif how == "NaN":
        tensors[name][0, 0] = float("nan")
    elif how == "dora":
        config["use_dora"] = True
    if config_path.exists():
        config_path.write_text(json.dumps(config))
    if weights.exists() and how != "truncated":
        save_file(tensors, weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "truncated"),
        ("no weights", "no such file"),
        ("no config", "PEFT folder"),
        ("rank too high", "max_lora_rank = 8"),
        ("other shape", r"must be \[8, 64\]"),
        ("other model", "another model"),
        ("half a pair", "no lora_A"),
        ("NaN", "NaN"),
        ("dora", "use_dora"),
    ],
)
async def test_bad_adapters_cost_nothing(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path, how: str, message: str
) -> None:
    shutil.copytree(adapters[0], tmp_path / "bad")
    _break(tmp_path / "bad", how)
    with pytest.raises(AdapterError, match=message):
        await fresh.load(key(1), tmp_path / "bad", NOISE)
    assert fresh.loaded == frozenset()
    await fresh.load(key(1), adapters[0], NOISE)


async def test_an_adapter_that_only_vllm_refuses_costs_nothing(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(adapters[0], tmp_path / "bad")
    config = json.loads((tmp_path / "bad" / "adapter_config.json").read_text())
    del config["target_modules"]  # vLLM wants it; what is adapted is plain from the tensors, so our check does not ask
    (tmp_path / "bad" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="vLLM refused"):
        await fresh.load(key(1), tmp_path / "bad", NOISE)
    await fresh.load(key(1), adapters[0], NOISE)
    assert fresh.loaded == {key(1)}


async def test_slots_are_counted_and_given_back(fresh: PolicyEngine, adapters: list[Path]) -> None:
    for version in range(6):
        await fresh.load(key(version), adapters[version % 3], NOISE)
    with pytest.raises(SlotsFullError, match="6 slots"):
        await fresh.load(key(6), adapters[0], NOISE)
    with pytest.raises(AdapterError, match="already loaded"):
        await fresh.load(key(0), adapters[0], NOISE)
    with pytest.raises(AdapterError, match="clean"):
        await fresh.load(key(7, noisy=False), adapters[0], NOISE)
    await fresh.unload(key(0))
    await fresh.load(key(6), adapters[0], NOISE)
    assert fresh.stats.in_flight == {key(version): 0 for version in range(1, 7)}


async def test_bad_requests_are_refused_and_limits_hold(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], None)
    for ids in ([], [512], [-1], [1] * fresh.max_model_len):
        with pytest.raises(RequestError):
            await anext(fresh.generate(key(1), "bad", ids, SAMPLING))
    with pytest.raises(RequestError, match="temperature"):
        await anext(fresh.generate(key(1), "bad", PROMPT, replace(SAMPLING, temperature=0.0)))
    long = replace(SAMPLING, max_tokens=10_000, n=1)
    [(ids, _, reason)] = await collect(fresh, key(1), "long", long)
    assert reason == "stop" or (reason == "length" and len(PROMPT) + len(ids) == fresh.max_model_len)
    assert len(await fresh.score(key(1), PROMPT, ids)) == len(ids)
    assert fresh.stats.in_flight == {key(1): 0}


async def test_abort_ends_a_request_and_frees_its_adapter(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], None)
    running = await begin(fresh, key(1), "victim", replace(SAMPLING, max_tokens=200))
    await fresh.abort("victim")
    assert "abort" in {reason for _, _, reason in await running}
    stream = fresh.generate(key(1), "closed", PROMPT, replace(SAMPLING, max_tokens=200))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert fresh.stats.in_flight == {key(1): 0}


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("sigma", [1e-4, 1e-2])
async def test_realised_sigma(fresh: PolicyEngine, adapters: list[Path], sigma: float, relative: bool) -> None:
    await fresh.load(key(1), adapters[0], Noise(sigma, seed=4, relative=relative))
    assert fresh.stats.noise_realised[key(1)] == pytest.approx(1.0, abs=0.15)  # 256 draws: standard error 0.044


def reference_logprobs(model: Path, nvfp4: Path, adapter: Path, noise: Noise | None, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T - 1] of ids[1:] from transformers in fp32 on the dequantised, merged, noisy weights."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    reader, lora = CheckpointReader(nvfp4), load_file(adapter / "adapter_model.safetensors")
    modules = dict(llama.named_modules())
    for name in reader.linear_names:
        a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
        modules[name].weight.data = dequantize(reader.linear(name)) + b @ a
    if noise is not None:
        for name in reader.architecture.noisy_norms(reader.layers):
            modules[name].weight.data += scaled_noise(noise, name, modules[name].weight)
    with torch.no_grad():
        logprobs = llama(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("noise", [None, NOISE, Noise(0.1, 3, relative=True)], ids=["clean", "noise", "relative"])
async def test_nvfp4_logprobs_equal_those_of_transformers(
    fresh: PolicyEngine, adapters: list[Path], tiny_model: tuple[Path, Path], noise: Noise | None
) -> None:
    await fresh.load(key(1), adapters[0], noise)
    [(ids, logprobs, _)] = await collect(fresh, key(1), "a", replace(SAMPLING, n=1))
    expected = reference_logprobs(*tiny_model, adapters[0], noise, PROMPT + ids)[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    scored = await fresh.score(key(1), PROMPT, ids)
    torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-4, rtol=0)


async def test_scoring_many_at_once_beside_sampling(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    await fresh.load(key(2), adapters[1], None)
    sampling = asyncio.create_task(collect(fresh, key(1), "beside", replace(SAMPLING, max_tokens=60)))
    completions = [[(7 * i + j) % 500 for j in range(9 + i)] for i in range(8)]
    together = await asyncio.gather(*(fresh.score(key(1 + i % 2), PROMPT, ids) for i, ids in enumerate(completions)))
    await sampling
    for i, ids in enumerate(completions):
        alone = await fresh.score(key(1 + i % 2), PROMPT, ids)
        torch.testing.assert_close(torch.tensor(together[i]), torch.tensor(alone), atol=1e-5, rtol=0)


async def test_logprobs_are_after_temperature(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], None)
    [(ids, hot, _)] = await collect(fresh, key(1), "hot", replace(SAMPLING, n=1, temperature=0.5))
    cold = await fresh.score(key(1), PROMPT, ids)
    assert (torch.tensor(hot) - torch.tensor(cold)).abs().max() > 0.1


async def test_a_killed_engine_ends_every_open_request(tmp_path: Path, adapters: list[Path]) -> None:
    _, nvfp4 = make_tiny_model(tmp_path)
    doomed = await PolicyEngine.start(EngineConfig(model=nvfp4, dtype="float32", max_loras=1, max_model_len=256))
    await doomed.load(key(1), adapters[0], NOISE)
    long = replace(SAMPLING, max_tokens=230)
    open_requests = [await begin(doomed, key(1), f"r{i}", long) for i in range(4)]
    for pid in doomed.core_pids:
        os.kill(pid, signal.SIGKILL)
    ended = await asyncio.wait_for(asyncio.gather(*open_requests, return_exceptions=True), timeout=120)
    assert [type(end) for end in ended] == [EngineDiedError] * 4
    assert doomed.errored
    with pytest.raises(EngineDiedError):
        await doomed.check_health()
    with pytest.raises(EngineDiedError):
        await doomed.score(key(1), PROMPT, [1])
    await doomed.stop()


_ORPHAN = """
import asyncio, os, signal, sys
from pathlib import Path
from qerld_service.engine import EngineConfig, PolicyEngine

async def main():
    engine = await PolicyEngine.start(EngineConfig(Path(sys.argv[1]), dtype="float32", max_loras=1, max_model_len=256))
    print("core", *engine.core_pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
async def test_the_engine_core_ends_when_its_parent_is_killed(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(_ORPHAN)  # a file: multiprocessing's spawn imports it again
    arguments = [sys.executable, str(tmp_path / "orphan.py"), str(tiny_model[1])]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    lines = (await process.stdout.read()).decode().splitlines()  # ends when the core, which holds the pipe too, ends
    [core] = [int(line.split()[1]) for line in lines if line.startswith("core")]
    await process.wait()
    for _ in range(600):
        if not os.path.exists(f"/proc/{core}"):  # noqa: ASYNC240
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"engine core {core} is still alive")
