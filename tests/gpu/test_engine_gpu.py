"""The policy engine on a GPU: noise by slot under compilation and CUDA graphs, NVFP4 by Marlin with LoRA.

bf16 products depend on the batch size, so versions are compared by log-probabilities of given tokens, one sequence at a
time, and not by sampled text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.noise import Noise, scaled_noise
from qerld_kernels.nvfp4 import dequantize
from qerld_service.adapters import AdapterKey
from qerld_service.engine import EngineConfig, PolicyEngine, Sampling
from safetensors.torch import load_file
from support.tiny import make_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = [5, 17, 300, 41, 9, 123, 88, 7, 250, 31, 64, 402, 12, 90, 77, 3]
COMPLETION = [210, 55, 19, 8, 301, 44, 5, 99, 12, 12, 480, 1]
NOISE = Noise(sigma=0.1, seed=5)
CLEAN, NOISY = AdapterKey("gpu", 1, False), AdapterKey("gpu", 1, True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gpu_engine(tiny_model: tuple[Path, Path]) -> AsyncIterator[PolicyEngine]:
    """Compiled and with CUDA graphs, as in production."""
    config = EngineConfig(
        tiny_model[1], max_loras=4, max_lora_rank=8, max_model_len=256, max_num_seqs=16, gpu_memory_utilization=0.3
    )
    engine = await PolicyEngine.start(config)
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "a", seed=0, scale=0.1)


def reference(model: Path, nvfp4: Path, adapter: Path, noise: Noise | None) -> torch.Tensor:
    """Log-probabilities [completion] in fp32 by transformers on the dequantised, merged, noisy weights."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    reader, lora, modules = CheckpointReader(nvfp4), load_file(adapter / "adapter_model.safetensors"), {}
    modules.update(llama.named_modules())
    for name in reader.linear_names:
        a, b = (lora[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
        modules[name].weight.data = dequantize(reader.linear(name)) + b @ a
    for name in reader.architecture.noisy_norms(reader.layers) if noise is not None else ():
        modules[name].weight.data += scaled_noise(noise, name, modules[name].weight)
    ids = torch.tensor(PROMPT + COMPLETION)
    with torch.no_grad():
        logprobs = llama(ids.unsqueeze(0)).logits[0].log_softmax(-1)
    return logprobs[len(PROMPT) - 1 : -1].gather(1, ids[len(PROMPT) :].unsqueeze(1)).squeeze(1)


async def test_slots_under_cuda_graphs(gpu_engine: PolicyEngine, adapter: Path) -> None:
    await gpu_engine.load(CLEAN, adapter, None)
    before = await gpu_engine.score(CLEAN, PROMPT, COMPLETION)
    await gpu_engine.load(NOISY, adapter, NOISE)
    noisy = await gpu_engine.score(NOISY, PROMPT, COMPLETION)
    assert await gpu_engine.score(CLEAN, PROMPT, COMPLETION) == before, "a clean slot is bit-equal beside noise"
    assert (torch.tensor(noisy) - torch.tensor(before)).abs().max() > 0.05
    assert gpu_engine.stats.noise_realised[NOISY] == pytest.approx(1.0, abs=0.15)


async def test_decoding_sees_the_noise(gpu_engine: PolicyEngine, adapter: Path) -> None:
    """Decode steps run from captured graphs and prefills do not: the two must agree on each version."""
    for key, noise in ((CLEAN, None), (NOISY, NOISE)):
        if key not in gpu_engine.loaded:
            await gpu_engine.load(key, adapter, noise)
        ids: list[int] = []
        sampled: list[float] = []
        async for delta in gpu_engine.generate(key, f"decode-{key.name}", PROMPT, Sampling(max_tokens=32, seed=1)):
            ids += delta.token_ids
            sampled += delta.logprobs
        scored = await gpu_engine.score(key, PROMPT, ids)
        torch.testing.assert_close(torch.tensor(sampled), torch.tensor(scored), atol=0.1, rtol=0)


@pytest.mark.parametrize(("key", "noise"), [(CLEAN, None), (NOISY, NOISE)], ids=["clean", "noisy"])
async def test_marlin_with_lora_and_noise_equals_transformers(
    gpu_engine: PolicyEngine, adapter: Path, tiny_model: tuple[Path, Path], key: AdapterKey, noise: Noise | None
) -> None:
    if key not in gpu_engine.loaded:
        await gpu_engine.load(key, adapter, noise)
    scored = torch.tensor(await gpu_engine.score(key, PROMPT, COMPLETION))
    expected = reference(*tiny_model, adapter, noise)
    difference = (scored - expected).abs()
    assert difference.mean() < 0.05, difference  # bf16 activations against fp32; the noise itself moves it far more
    other = reference(*tiny_model, adapter, NOISE if noise is None else None)
    assert difference.mean() < 0.5 * (scored - other).abs().mean()
