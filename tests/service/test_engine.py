"""The policy engine on the CPU with a tiny random NVFP4 Llama: exactness of versions, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.noise import Noise, scaled_noise
from qerld_kernels.nvfp4 import dequantize
from qerld_service.adapters import AdapterKey, AdapterNotLoadedError
from qerld_service.engine import EngineConfig, EngineDiedError, PolicyEngine, RequestError
from safetensors.torch import load_file
from support.engine import NOISE, PROMPT, SAMPLING, assert_same, begin, collect, key
from support.tiny import make_adapter, make_tiny_model

pytestmark = pytest.mark.engine


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


async def test_unknown_adapters_are_refused_before_the_engine(fresh: PolicyEngine) -> None:
    with pytest.raises(AdapterNotLoadedError, match="nobody@9"):
        await collect(fresh, AdapterKey("nobody", 9, True), "x", SAMPLING)
    with pytest.raises(AdapterNotLoadedError):
        await fresh.score(key(9), PROMPT, [1, 2])
    with pytest.raises(AdapterNotLoadedError):
        await fresh.unload(key(9))
    await fresh.check_health()


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


@pytest.mark.parametrize(
    "noise",
    [None, NOISE, Noise(0.1, 3, relative=True), Noise(0.1, 3, dtype="bfloat16")],
    ids=["clean", "noise", "relative", "bfloat16"],
)
async def test_nvfp4_logprobs_equal_those_of_transformers(
    fresh: PolicyEngine, adapters: list[Path], tiny_model: tuple[Path, Path], noise: Noise | None
) -> None:
    await fresh.load(key(1), adapters[0], noise)
    [(ids, logprobs, _)] = await collect(fresh, key(1), "a", replace(SAMPLING, n=1))
    expected = reference_logprobs(*tiny_model, adapters[0], noise, PROMPT + ids)[len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    scored = await fresh.score(key(1), PROMPT, ids)
    torch.testing.assert_close(torch.tensor(scored), expected, atol=1e-4, rtol=0)


async def test_rank_stabilised_adapters_are_scaled_by_the_root_of_their_rank(
    fresh: PolicyEngine, tmp_path: Path
) -> None:
    """alpha / sqrt r is 2 / 2 here, as 4 / 4 is: the same policy; and 2 / 4 is another."""
    scored = []
    for number, change in enumerate(({}, {"lora_alpha": 2, "use_rslora": True}, {"lora_alpha": 2})):
        folder = make_adapter(tmp_path / str(number), seed=1, scale=0.5, rank=4)
        config = json.loads((folder / "adapter_config.json").read_text()) | change
        (folder / "adapter_config.json").write_text(json.dumps(config))
        await fresh.load(key(number + 1), folder, None)
        scored.append(torch.tensor(await fresh.score(key(number + 1), PROMPT, list(range(20, 30)))))
    torch.testing.assert_close(scored[1], scored[0], atol=1e-6, rtol=0)
    assert float((scored[2] - scored[0]).abs().max()) > 1e-2


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
