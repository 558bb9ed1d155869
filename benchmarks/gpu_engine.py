"""The policy engine on a GPU: exactness of clean slots beside noise, hot-swap times, and the cost of noise by slot.

    python benchmarks/gpu_engine.py --model FOLDER --out result.json [--batches 8,64,256] [--dtype float16]

Runs two servers one after the other in processes of their own: ours, and vLLM with stock norms and the same adapter.
Throughputs are medians of three rounds after a warm-up, of one adapter; of our server also of two adapters in turn (as
while a version takes over) and without one. Prints nothing of value; everything goes to --out. Runs on the
CPU too (a tiny model), to try the script. On an H200 each server takes almost three minutes to start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.noise import Noise
from qerld_service.adapters import AdapterKey, linear_shapes
from qerld_service.engine import EngineConfig, PolicyEngine, Sampling
from qerld_service.vllm_start import start_vllm
from safetensors.torch import save_file

CLEAN, NOISY, OTHER = AdapterKey("bench", 1, False), AdapterKey("bench", 1, True), AdapterKey("bench", 2, True)
ROUNDS = 3
Sampler = Callable[[str, list[int], int], Awaitable[int]]


def make_adapter(model: Path, folder: Path, rank: int, seed: int = 0) -> Path:
    """A random PEFT adapter on every linear layer of the model, small enough to leave its text alone."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (out, features) in linear_shapes(CheckpointReader(model)).items():
        a = torch.randn(rank, features, generator=generator) / features**0.5
        b = 0.02 * torch.randn(out, rank, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.bfloat16()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def sequences(model: Path, count: int, length: int) -> list[list[int]]:
    """Random token ids, the same each time."""
    vocabulary, draw = int(CheckpointReader(model).config["vocab_size"]), random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


async def throughput(sample: Sampler, prompts: list[list[int]], batch: int, tokens: int) -> float:
    """Completion tokens a second of `batch` requests at once: the median of ROUNDS after a warm-up."""
    rounds = []
    for number in range(1 + ROUNDS):
        started = time.monotonic()
        made = await asyncio.gather(*(sample(f"{number}-{batch}-{i}", prompts[i], tokens) for i in range(batch)))
        rounds.append(sum(made) / (time.monotonic() - started))
    return statistics.median(rounds[1:])


async def with_noise(args: argparse.Namespace, adapter: Path) -> dict[str, Any]:
    """Our server: exactness, swap times and throughput with noise."""
    started = time.monotonic()
    engine = await PolicyEngine.start(config_of(args))
    result: dict[str, Any] = {"start_s": time.monotonic() - started}
    probes = sequences(args.model, 8, 96)
    result["load_clean_s"] = await engine.load(CLEAN, adapter, None)
    alone = [await engine.score(CLEAN, ids[:32], ids[32:]) for ids in probes]
    again = [await engine.score(CLEAN, ids[:32], ids[32:]) for ids in probes]
    result["clean_bit_equal_when_repeated"] = again == alone
    result["load_noisy_s"] = await engine.load(NOISY, adapter, Noise(args.sigma, 7))
    result["load_relative_s"] = await engine.load(OTHER, adapter, Noise(args.sigma, 8, relative=True))
    beside = [await engine.score(CLEAN, ids[:32], ids[32:]) for ids in probes]
    noisy = [await engine.score(NOISY, ids[:32], ids[32:]) for ids in probes]
    result["clean_bit_equal_beside_noise"] = beside == alone
    result["noisy_mean_abs_difference"] = mean_difference(noisy, alone)
    result["realised_sigma"] = {key.name: share for key, share in engine.stats.noise_realised.items()}
    mixed = await asyncio.gather(
        *(engine.score(CLEAN if i % 2 else NOISY, p[:32], p[32:]) for i, p in enumerate(probes))
    )
    result["mixed_batch_mean_abs_difference"] = {
        "clean": mean_difference(mixed[1::2], alone[1::2]),
        "noisy": mean_difference(mixed[0::2], noisy[0::2]),
    }

    def sample_of(*keys: AdapterKey) -> Sampler:
        """The requests of a batch take the adapters in turn."""

        async def sample(request_id: str, prompt: list[int], tokens: int) -> int:
            key = keys[int(request_id.rsplit("-", 1)[1]) % len(keys)]
            stream = engine.generate(key, f"{len(keys)}-{request_id}", prompt, Sampling(max_tokens=tokens))
            return sum([len(delta.token_ids) async for delta in stream])

        return sample

    async def sample_of_none(request_id: str, prompt: list[int], tokens: int) -> int:
        params = engine._sampling_params(prompt, Sampling(max_tokens=tokens))
        stream = engine._llm.generate({"prompt_token_ids": prompt}, params, f"none-{request_id}")
        return sum([len(completion.token_ids) async for output in stream for completion in output.outputs])

    result["scores"] = alone
    await by_batch(args, result, "tokens_per_s", sample_of(NOISY))
    await by_batch(args, result, "tokens_per_s_two_versions", sample_of(NOISY, OTHER))
    await by_batch(args, result, "tokens_per_s_without_adapter", sample_of_none)
    await engine.stop()
    return result


async def stock(args: argparse.Namespace, adapter: Path) -> dict[str, Any]:
    """vLLM with its own norms, the same adapter and settings."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    started = time.monotonic()
    llm = await asyncio.to_thread(
        start_vllm, config_of(args), CheckpointReader(args.model), not torch.cuda.is_available()
    )
    lora = LoRARequest("stock", 1, str(adapter))
    result: dict[str, Any] = {"start_s": time.monotonic() - started}
    await llm.add_lora(lora)

    async def score(name: str, ids: list[int]) -> list[float]:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        async for output in llm.generate({"prompt_token_ids": ids}, params, name, lora_request=lora):
            logprobs = output.prompt_logprobs
        return [logprobs[at][ids[at]].logprob for at in range(32, len(ids))]

    async def sample(request_id: str, prompt: list[int], tokens: int) -> int:
        params = SamplingParams(max_tokens=tokens, logprobs=0, output_kind=RequestOutputKind.DELTA)
        stream = llm.generate({"prompt_token_ids": prompt}, params, request_id, lora_request=lora)
        return sum([len(completion.token_ids) async for output in stream for completion in output.outputs])

    result["scores"] = [await score(f"score-{i}", ids) for i, ids in enumerate(sequences(args.model, 8, 96))]
    await by_batch(args, result, "tokens_per_s", sample)
    await asyncio.to_thread(llm.shutdown)
    return result


async def by_batch(args: argparse.Namespace, result: dict[str, Any], name: str, sample: Sampler) -> None:
    """Throughput for each batch size, kept at once: a run that is cut short has been worth its time."""
    prompts = sequences(args.model, max(args.batches), args.prompt)
    result[name] = {}
    for batch in args.batches:
        result[name][str(batch)] = await throughput(sample, prompts, batch, args.tokens)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"{args.mode}: {name}, batch {batch}: {result[name][str(batch)]:.0f}", flush=True)


def mean_difference(left: list[list[float]], right: list[list[float]]) -> float:
    """Mean |difference| of log-probabilities, in nats."""
    return float((torch.tensor(left) - torch.tensor(right)).abs().mean())


def config_of(args: argparse.Namespace) -> EngineConfig:
    """The engine under test, the same for both servers."""
    return EngineConfig(
        args.model,
        dtype=args.dtype,
        nvfp4_kernel=args.nvfp4_kernel,
        lora_kernel=args.lora_kernel,
        max_loras=4,
        max_lora_rank=args.rank,
        max_model_len=args.prompt + args.tokens + 128,
        max_num_seqs=max(args.batches),
        gpu_memory_utilization=args.memory,
    )


def run_both(args: argparse.Namespace) -> dict[str, Any]:
    """One process a server; the stock one must not see our plugin's environment."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_adapter(args.model, Path(folder) / "adapter", args.rank)
        for mode in args.servers.split(","):
            out = args.out.with_suffix(f".{mode}.json")
            command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--adapter", f"{folder}/adapter"]
            subprocess.run([*command, "--out", str(out)], check=True)
            results[mode] = json.loads(out.read_text())
            out.unlink()
    scores = [result.pop("scores") for result in results.values()]
    if len(scores) == 2:
        results["clean_against_stock_mean_abs_difference"] = mean_difference(*scores)
    results["settings"] = {name: str(value) for name, value in vars(args).items()}
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="NVFP4 or plain model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batches", type=lambda s: [int(part) for part in s.split(",")], default=[8, 64, 256])
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=128, help="completion tokens")
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto", help="activations"
    )
    parser.add_argument("--nvfp4-kernel", choices=["marlin", "qerld"], default="marlin", help="of our server")
    parser.add_argument("--lora-kernel", choices=["vllm", "qerld"], default="vllm", help="of our server")
    parser.add_argument("--servers", default="noise,stock", help="ours (noise), vLLM's (stock), or both")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sigma", type=float, default=0.01)
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--mode", choices=["both", "noise", "stock"], default="both", help=argparse.SUPPRESS)
    parser.add_argument("--adapter", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run and write --out."""
    args = parse()
    if args.mode == "both":
        result = run_both(args)
    else:
        result = asyncio.run((with_noise if args.mode == "noise" else stock)(args, args.adapter))
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
