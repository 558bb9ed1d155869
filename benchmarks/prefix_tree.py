"""Prefix-tree training against one sequence a rollout, on the same batch, in one run.

    OMP_NUM_THREADS=1 python benchmarks/prefix_tree.py --base FOLDER [--groups 1] [--repeats 5]

FOLDER is an NVFP4 checkpoint (the quickstart's cache holds SmolLM2-135M). Prompts are random ids of 160 tokens,
completions 12 different random ids each, so that nothing but the prompt is shared; with several groups the first 150
prompt tokens (system prompt and shots) are common. Both ways run in turn; medians, their ratio and the largest gradient
difference are printed and written to benchmarks/results/prefix-tree-cpu.json. What is timed is forward and backward of
a whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.batch import plan_updates
from qerld_learner.trainer.messages import Group, LoraShape, Rollout, TrainerConfig
from qerld_learner.trainer.model import BaseModel
from qerld_learner.trainer.packing import PrefixTree, pack

PROMPT, SHARED, COMPLETION, GROUP_SIZE = 160, 150, 12, 8
RESULT = Path(__file__).parent / "results" / "prefix-tree-cpu.json"


def make_groups(count: int, vocab_size: int) -> list[Group]:
    """Groups of random ids behind one shared beginning; rewards alternate."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(0, vocab_size, (length,), generator=generator).tolist()

    shared = ids(SHARED)
    return [
        Group(
            f"g{g}",
            shared + ids(PROMPT - SHARED),
            [Rollout(f"g{g}r{r}", ids(COMPLETION), [-8.0] * COMPLETION, float(r % 2), 0) for r in range(GROUP_SIZE)],
        )
        for g in range(count)
    ]


class Bench:
    """One model with a random adapter and one batch."""

    def __init__(self, config: TrainerConfig, groups: int) -> None:
        self.config, self.model = config, BaseModel(config)
        self.masters = lora.attach(self.model.causal, config.lora)
        torch.manual_seed(0)
        random = {name: torch.randn(master.shape) * 0.02 for name, master in self.masters.items()}
        step.load_weights(self.masters, random)
        self.work = step.begin(self.model, config, make_groups(groups, self.model.vocab_size), lambda *_: None)
        (self.update,) = plan_updates(self.work.batch, config.algorithm)

    def run(self, trees: list[PrefixTree]) -> tuple[float, torch.Tensor]:
        """Return the seconds of one step's forward and backward, and its whole gradient, flat."""
        for master in self.masters.values():
            master.grad = None
        start = time.perf_counter()
        for tree in trees:
            step.micro_batch(self.work, self.update, tree, learn=True)
        seconds = time.perf_counter() - start
        return seconds, torch.cat([m.grad.flatten() for m in self.masters.values() if m.grad is not None])


def measure(bench: Bench, repeats: int) -> dict[str, object]:
    """Run both ways in turn and return tokens, median seconds, ratios and the gradients' difference."""
    ways = {
        "prefix_tree": pack(bench.work.batch.sequences, bench.config.token_budget),
        "one_sequence_a_rollout": pack(bench.work.batch.sequences, bench.config.token_budget, share=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, torch.Tensor] = {}
    for name, trees in ways.items():  # warm-up: page faults of the first pass cost seconds
        gradients[name] = bench.run(trees)[1]
    for _ in range(repeats):
        for name, trees in ways.items():
            seconds[name].append(bench.run(trees)[0])
    tokens = {name: sum(tree.tokens for tree in trees) for name, trees in ways.items()}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    tree, plain = gradients.values()
    return {
        "tokens_computed": tokens,
        "seconds_median": medians,
        "seconds_all": seconds,
        "tokens_ratio": tokens["one_sequence_a_rollout"] / tokens["prefix_tree"],
        "time_ratio": medians["one_sequence_a_rollout"] / medians["prefix_tree"],
        "gradient_max_abs": float(tree.abs().max()),
        "gradient_max_abs_difference": float((tree - plain).abs().max()),
        "gradient_relative_difference": float((tree - plain).norm() / tree.norm()),
    }


def main() -> None:
    """Measure one group and `--groups` groups, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="NVFP4 checkpoint folder")
    parser.add_argument(
        "--groups", type=int, default=4, help="groups in the second measurement (the first has one); 1: no second"
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    config = TrainerConfig(base=arguments.base, lora=LoraShape(rank=16, alpha=32.0))
    result: dict[str, object] = {
        "command": f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} python benchmarks/prefix_tree.py "
        f"--base {Path(arguments.base).name} --groups {arguments.groups} --repeats {arguments.repeats}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg(),
        },
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "setting": {"prompt": PROMPT, "shared": SHARED, "completion": COMPLETION, "group_size": GROUP_SIZE},
    }
    for groups in sorted({1, arguments.groups}):
        result[f"groups_{groups}"] = measure(Bench(config, groups), arguments.repeats)
        print(json.dumps(result, indent=2), flush=True)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def cpu_name() -> str:
    """Return the processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
