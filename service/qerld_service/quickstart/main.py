"""`qerld quickstart`: the whole loop on a small real model: serve, sample, reward, train, swap, evaluate."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from qerld.v1 import policy_pb2, run_pb2
from qerld_client import Client, QerldError
from qerld_client.errors import from_rpc
from qerld_kernels.errors import CheckpointError, QuantizationError
from qerld_kernels.exclusive import FolderError, FolderLock
from rich.console import Console
from rich.progress import Progress

from qerld_service.quickstart.audit import Audit, audit
from qerld_service.quickstart.held_out import HeldOut, Question, evaluate, questions_of
from qerld_service.quickstart.model import ModelPackageError, prepare_smollm2
from qerld_service.quickstart.progress import follow
from qerld_service.quickstart.results import Series, draw_curves, result_table, write_summary
from qerld_service.quickstart.session import QuickstartError, rewarding, serving
from qerld_service.quickstart.swaps import swap_milliseconds
from qerld_service.quickstart.tasks import TASKS, make_task

RUN = "quickstart"
MAX_TOKENS = 12
# Groups that are sampled or scored at the same time: two batches, so that sampling goes on while a step trains. One
# version of lag is what that needs; with two the ratios spread (mismatch KL .1 to .9) and learning is slower.
IN_FLIGHT, MAX_LAG = 8, 1
STEPS = {"next": 28, "sums": 34, "swap": 22, "sort": 40, "copy": 24}
LEARNING_RATES = {"swap": 1e-4, "copy": 1e-4}
LEARNING_RATE = 3e-4
# In units of each norm's mean |w|: the paper's absolute 1e-2 is a third of this model's norm weights and only hurts.
SIGMA_START, SIGMA_END, STAGES = 0.03, 0.003, 10
# Nats a token, by the number format of both sides: bf16 products round differently in trainer and server.
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
VERSION_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    task: str
    seed: int
    steps: int
    out: Path
    cache: Path


@dataclass(frozen=True)
class Loop:
    """What the loop left: reports, versions, held-out numbers of the first and the last version, checks."""

    series: Series
    versions: list[policy_pb2.PolicyVersion]
    before: HeldOut
    after: HeldOut
    checked: Audit


@dataclass
class Clock:
    """Seconds by part of the quickstart."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - started, 2)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    console = Console()
    # As Ctrl-C: the processes that were started are stopped in order.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        # It begins with removing what an earlier one left there.
        with FolderLock(options.out, "--out", "qerld quickstart"):
            summary = quickstart(options, console)
    except FolderError as error:
        sys.stderr.write(f"qerld quickstart: {error}\n")
        return 2
    except (QuickstartError, ModelPackageError, CheckpointError, QuantizationError, OSError) as error:
        sys.stderr.write(f"qerld quickstart: {error}\n")
        return 1
    except (QerldError, grpc.RpcError) as error:
        error = error if isinstance(error, QerldError) else from_rpc(error)
        sys.stderr.write(f"qerld quickstart: {error}; the logs are in {options.out}\n")
        return 1
    console.print(result_table(summary))
    console.print(f"wrote {options.out}: summary.json, curves.png, adapter/, serve.log, client.log")
    return 0


def parse(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="qerld quickstart",
        description="Take SmolLM2-135M-Instruct, quantise it to NVFP4, serve it with vLLM, and train a LoRA adapter "
        "with GRPO and quantisation noise through the service, from a reward client of its own. Ends by itself.",
    )
    parser.add_argument("--task", choices=TASKS, default="next", help="what to learn (default: next number)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, prompts, adapter and noise (default: 0)")
    parser.add_argument("--steps", type=int, help="learner steps, fixed in advance (default: by task, 22 to 40)")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder of the results")
    parser.add_argument("--cache", type=Path, default=Path(".cache/models"), help="folder of the converted model")
    given = parser.parse_args(argv)
    steps = STEPS[given.task] if given.steps is None else given.steps
    if steps < 1:
        parser.error(f"--steps: must be at least 1, got {steps}")
    if not 0 <= given.seed < 2**63:
        parser.error(f"--seed: must be from 0 to 2^63 - 1, got {given.seed}")
    return Options(given.task, given.seed, steps, given.out, given.cache)


def quickstart(options: Options, console: Console) -> dict[str, Any]:
    """Run everything and write the results; returns summary.json's content. Raises QuickstartError, QerldError."""
    clock = Clock()
    task = make_task(options.task, options.seed)
    with clock.part("prepare"):
        model = prepare(options.cache, console)
        questions = questions_of(task, model)
    ready_file = options.out / "ready.json"
    console.print(f"starting qerld serve (log: {options.out / 'serve.log'})")
    started = time.monotonic()
    with serving(serve_command(options, model, ready_file), options.out / "serve.log", ready_file) as (server, ready):
        clock.seconds["start"] = round(time.monotonic() - started, 2)
        with Client(ready["target"]) as client:
            create_run(client, options)
            before = measured(client, 0, questions, clock, "evaluate_before", console)
            with (
                clock.part("loop"),
                rewarding(
                    ready["target"], RUN, task.name, options.seed, IN_FLIGHT, options.out / "client.log"
                ) as rewarder,
            ):
                reports = follow(client, RUN, options.steps, [server, rewarder], console)
            final = reports[-1].version
            after = measured(client, final, questions, clock, "evaluate_after", console)
            checked = audit(client, RUN, questions)
            loop = Loop(Series(reports), list(client.list_versions(RUN)), before, after, checked)
            check_gap(loop.series, LARGEST_GAP[ready["dtype"]])
            swaps = swap_milliseconds(loop.versions, ready["policy_metrics_port"])
            digest = client.get_policy(RUN, final).adapter_sha256
            client.download_adapter(RUN, options.out / "adapter", final)
    summary = summarise(options, loop, clock) | {
        "swap_ms": swaps,
        "adapter_sha256": digest,
        "device": ready["device"],
        "dtype": ready["dtype"],
    }
    write_summary(options.out / "summary.json", summary)
    draw_curves(options.out / "curves.png", loop.series, f"qerld quickstart: {task.name}, seed {options.seed}")
    return summary


def prepare(cache: Path, console: Console) -> Path:
    with Progress(console=console) as bar:
        job = bar.add_task("preparing SmolLM2-135M-Instruct", total=None)
        model = prepare_smollm2(
            cache, lambda done, total, what: bar.update(job, completed=done, total=total, description=what)
        )
        bar.update(job, completed=1, total=1, description=f"model: {model}")
    return model


def serve_command(options: Options, model: Path, ready_file: Path) -> list[str]:
    """`qerld serve` with a fresh state folder, on free ports."""
    state = options.out / "service-state"
    shutil.rmtree(state, ignore_errors=True)
    command = [sys.executable, "-m", "qerld_service.cli", "serve", "--model", str(model), "--state-dir", str(state)]
    command += ["--ready-file", str(ready_file)]
    for name in ("port", "openai-port", "learner-metrics-port", "policy-metrics-port"):
        command += [f"--{name}", "0"]
    for setting in ("max_model_len=512", "max_num_seqs=64", "max_lora_rank=16"):
        command += ["--policy", setting]
    for setting in ("cache_dequantized=true", "canary_probes=2"):
        command += ["--learner", setting]
    return command


def create_run(client: Client, options: Options) -> None:
    config = run_pb2.RunConfig(
        lora=run_pb2.LoraConfig(rank=16, alpha=32),
        optimizer=run_pb2.Optimizer(learning_rate=LEARNING_RATES.get(options.task, LEARNING_RATE)),
        noise=run_pb2.AdaptiveNoise(
            schedule=run_pb2.NOISE_SCHEDULE_EXPONENTIAL,
            sigma_start=SIGMA_START,
            sigma_end=SIGMA_END,
            stages=STAGES,
            relative=True,
        ),
        group_size=8,
        groups_per_step=4,
        max_lag=MAX_LAG,
        # Kept, so that the mean reward is that of all groups and not of the mixed ones alone; they add no gradient.
        drop_zero_variance=False,
        max_tokens=MAX_TOKENS,
        max_steps=options.steps,
        seed=options.seed,
    )
    client.create_run(RUN, config)


def measured(
    client: Client, version: int, questions: Sequence[Question], clock: Clock, part: str, console: Console
) -> HeldOut:
    """Held-out numbers of one version, once a policy server serves it."""
    with clock.part(part):
        endpoint = endpoint_serving(client, version)
        result = evaluate(endpoint, RUN, version, questions, MAX_TOKENS)
    console.print(
        f"held out, version {version}: exact probability {result.exact_probability:.3f}, greedy "
        f"{result.greedy_accuracy:.3f} on {result.prompts} prompts"
    )
    return result


def endpoint_serving(client: Client, version: int) -> str:
    deadline = time.monotonic() + VERSION_SECONDS
    while time.monotonic() < deadline:
        for replica in client.list_replicas():
            if any(policy.run == RUN and policy.version == version for policy in replica.loaded):
                return replica.endpoint
        time.sleep(0.2)
    raise QuickstartError(f"no policy server served version {version} within {VERSION_SECONDS:.0f} s")


def summarise(options: Options, loop: Loop, clock: Clock) -> dict[str, Any]:
    """The content of summary.json, but for what is fetched at the end."""
    return {
        "task": options.task,
        "seed": options.seed,
        "steps": options.steps,
        "seconds": clock.seconds,
        "versions_served": sum(version.HasField("live_at") for version in loop.versions),
        "held_out": {"before": asdict(loop.before), "after": asdict(loop.after)},
        **loop.series.summary(),
        "checks": asdict(loop.checked),
    }


def check_gap(series: Series, limit: float) -> None:
    """Server and trainer must agree on the same tokens, version and noise."""
    gap = series.mean("behaviour_gap")
    if gap is None:
        raise QuickstartError("the learner reported no behaviour_gap: server and trainer cannot be compared")
    if gap >= limit:
        raise QuickstartError(
            f"server and trainer differ by {gap:.1e} a token on average, the limit is {limit:g}: they do not "
            "compute the same model; this is a bug"
        )
