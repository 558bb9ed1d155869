"""Correct log-probabilities differ, by number format: server, trainer, and trainer with another order of sums.

    python benchmarks/precision.py --model FOLDER --out result.json [--dtypes float32,bfloat16,float16]

Sampled completions of held-out prompts; zero adapter, no noise, temperature 1. "Other order" sums the products of each
linear layer in two halves, in fp32, and rounds where the trainer rounds: only the order of a sum differs, as it does
between any two kernels. On the CPU only float32 is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from itertools import chain
from pathlib import Path
from unittest import mock

import torch
from qerld_learner.trainer import packed_linear
from qerld_learner.trainer.messages import InitVersion, Score, Scores, Sequence, TrainerConfig
from qerld_learner.trainer.worker import Worker
from qerld_service.adapters import AdapterKey
from qerld_service.engine import EngineConfig, PolicyEngine, Sampling
from qerld_service.quickstart.held_out import questions_of
from qerld_service.quickstart.tasks import make_task
from torch import Tensor

KEY = AdapterKey("precision", 1, False)
PROMPTS, COMPLETIONS, TOKENS = 16, 4, 12


def in_two_halves(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """`packed_linear.scaled_product` with another order of summation."""
    half, wide, columns = x.shape[-1] // 2, x.float(), weight.float()
    return ((wide[..., half:] @ columns[half:] + wide[..., :half] @ columns[:half]) * scale).to(x.dtype)


class Trainer:
    """Scores sequences under a zero adapter, as the trainer process does."""

    def __init__(self, model: Path, folder: Path, dtype: str) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._worker, self._folder = Worker(lambda _event: None), folder
        self._config = TrainerConfig(base=str(model), dtype=dtype, device=device)  # type: ignore[arg-type]
        self._worker.handle(InitVersion("precision", self._config, str(folder)))

    @property
    def adapter(self) -> Path:
        return self._folder / "adapter"

    def score(self, sequences: list[Sequence]) -> list[float]:
        reply = self._worker.handle(Score("precision", self._config, str(self._folder), sequences))
        assert isinstance(reply, Scores)
        return list(chain.from_iterable(reply.logprobs))


async def sample(engine: PolicyEngine, prompts: list[list[int]]) -> list[Sequence]:
    """Completions of each prompt, the same for every run of one machine and format."""
    sequences = []
    for number, prompt in enumerate(prompts):
        made: list[list[int]] = [[] for _ in range(COMPLETIONS)]
        sampling = Sampling(max_tokens=TOKENS, temperature=1.0, seed=number, n=COMPLETIONS)
        async for delta in engine.generate(KEY, f"sample-{number}", prompt, sampling):
            made[delta.index] += delta.token_ids
        sequences += [Sequence(prompt, ids) for ids in made]
    return sequences


async def served(engine: PolicyEngine, sequences: list[Sequence]) -> list[float]:
    """The server's log-probabilities."""
    scores = [await engine.score(KEY, one.prompt_ids, one.completion_ids) for one in sequences]
    return list(chain.from_iterable(scores))


def difference(left: list[float], right: list[float]) -> dict[str, float]:
    """Mean and largest |Δ log-probability|, in nats a token."""
    gaps = [abs(a - b) for a, b in zip(left, right, strict=True)]
    return {"mean": statistics.fmean(gaps), "max": max(gaps)}


async def measure(model: Path, dtypes: list[str], folder: Path) -> dict[str, object]:
    """Differences of each format; the first one samples."""
    on_cpu = not torch.cuda.is_available()
    prompts = [list(question.prompt_ids) for question in questions_of(make_task("next", 0), model)[:PROMPTS]]
    exact = Trainer(model, folder / "exact", "float32")
    sequences: list[Sequence] = []
    reference: list[float] = []
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in dtypes:
        trainer = Trainer(model, folder / dtype, dtype)
        server: list[float] = []
        if dtype == "float32" or not on_cpu:
            config = EngineConfig(model, dtype=dtype, max_loras=2, max_model_len=512, gpu_memory_utilization=0.3)  # type: ignore[arg-type]
            engine = await PolicyEngine.start(config)
            await engine.load(KEY, trainer.adapter, None)
            sequences = sequences or await sample(engine, prompts)
            server = await served(engine, sequences)
            await engine.stop()
        ours, reference = trainer.score(sequences), reference or exact.score(sequences)
        with mock.patch.object(packed_linear, "scaled_product", in_two_halves):
            other = trainer.score(sequences)
        rows[dtype] = {
            "trainer_against_other_order": difference(ours, other),
            "trainer_against_float32_trainer": difference(ours, reference),
        }
        if server:
            rows[dtype]["server_against_trainer"] = difference(server, ours)
            rows[dtype]["server_against_float32_trainer"] = difference(server, reference)
        print(dtype, json.dumps(rows[dtype]), flush=True)
    return {"tokens": sum(len(one.completion_ids) for one in sequences), "mean_abs_logprob_difference": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="NVFP4 model folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="number formats, the first one samples")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(args.model, args.dtypes.split(","), Path(folder)))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
