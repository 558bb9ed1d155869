"""What a version change costs requests that are running: gaps between their tokens, with and without loads beside them.

    python benchmarks/swap.py --model FOLDER --out result.json [--streams 8] [--tokens 200] [--loads 6] [--rank 16]

Two rounds on one engine: `streams` requests sample `tokens` tokens each from one version, first undisturbed, then
while versions are loaded (and the ones before unloaded) beside them. Same prompts and seeds in both rounds: the tokens
must be equal. A gap is the time between two deltas of one request, from when all requests have got their first token:
before that the prompts of some hold up the others. Gaps of the second round are counted twice over, those beside a load
or an unload and those between: these are the control that saw the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu_engine import make_adapter
from qerld_kernels.noise import Noise
from qerld_service.adapters import AdapterKey
from qerld_service.engine import EngineConfig, PolicyEngine, Sampling

PROMPT_TOKENS = 64


async def stream(
    engine: PolicyEngine, key: AdapterKey, name: str, index: int, tokens: int
) -> tuple[list[int], list[float]]:
    """One request: its tokens, and the times at which they came."""
    draw = random.Random(index)
    prompt = [draw.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)]
    ids: list[int] = []
    times: list[float] = []
    async for delta in engine.generate(key, f"{name}-{index}", prompt, Sampling(max_tokens=tokens, seed=index)):
        ids += delta.token_ids
        times.append(time.monotonic())
    return ids, times


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both rounds."""
    engine = await PolicyEngine.start(
        EngineConfig(args.model, max_loras=4, max_lora_rank=args.rank, max_model_len=512, max_num_seqs=64)
    )
    adapters = [make_adapter(args.model, folder / str(i), args.rank, i) for i in range(args.loads + 1)]
    served = AdapterKey("swap", 0, True)
    await engine.load(served, adapters[0], Noise(0.02, 1, relative=True))

    async def round_of(name: str) -> list[tuple[list[int], list[float]]]:
        return await asyncio.gather(*(stream(engine, served, name, i, args.tokens) for i in range(args.streams)))

    await round_of("warm-up")
    quiet = await round_of("quiet")
    running = asyncio.create_task(round_of("loads"))
    await asyncio.sleep(args.pause)
    loads: list[float] = []
    busy: list[tuple[float, float]] = []
    for version in range(1, args.loads + 1):
        if running.done():
            break
        begun = time.monotonic()
        loads.append(await engine.load(AdapterKey("swap", version, True), adapters[version], Noise(0.02, version)))
        if version > 1:
            await engine.unload(AdapterKey("swap", version - 1, True))
        busy.append((begun, time.monotonic()))
        await asyncio.sleep(args.pause)
    loaded = await running
    await engine.stop()
    beside = [gap for gap in gaps(loaded) if any(gap[0] < end and begun < gap[1] for begun, end in busy)]
    return {
        "quiet": summary(gaps(quiet)),
        "beside_loads": summary(beside),
        "between_loads": summary([gap for gap in gaps(loaded) if gap not in beside]),
        "loads": len(loads),
        "load_ms_median": round(1e3 * statistics.median(loads), 1),
        "requests": args.streams,
        "failed": sum(len(ids) == 0 for ids, _ in loaded),
        "tokens_equal": [ids for ids, _ in quiet] == [ids for ids, _ in loaded],
    }


def gaps(streams: list[tuple[list[int], list[float]]]) -> list[tuple[float, float]]:
    """Begin and end of each gap between the tokens of a request, once all requests run."""
    all_run = max(times[0] for _, times in streams)
    return [gap for _, times in streams for gap in pairwise(times) if gap[0] >= all_run]


def summary(found: list[tuple[float, float]]) -> dict[str, float]:
    """Milliseconds."""
    lengths = sorted(1e3 * (end - begin) for begin, end in found)
    return {
        "gaps": len(lengths),
        "median_ms": round(statistics.median(lengths), 1),
        "p99_ms": round(lengths[int(0.99 * (len(lengths) - 1))], 1),
        "max_ms": round(lengths[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of an NVFP4 checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    parser.add_argument("--tokens", type=int, default=200, help="tokens a request")
    parser.add_argument("--loads", type=int, default=6, help="versions loaded meanwhile")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank of the versions")
    parser.add_argument("--pause", type=float, default=1.5, help="seconds between loads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(args, Path(folder)))
    options = " ".join(f"--{name} {getattr(args, name)}" for name in ("streams", "tokens", "loads", "rank"))
    machine = {
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    record = {
        "command": f"python benchmarks/swap.py {options}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        **result,
    }
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
