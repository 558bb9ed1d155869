"""`qerld eval`: a file of problems against a version of a run, without noise; answers compared by math-verify."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from qerld.v1 import common_pb2, policy_pb2
from qerld_client import Client, QerldError
from qerld_eval import (
    INSTRUCTION,
    Completion,
    Judge,
    Problem,
    ProblemFileError,
    Summary,
    chat,
    read_problems,
    summarise,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from qerld_service.watch import WatchError, pick_run

USAGE_ERROR = 2
# Of the calls before the sampling, retries included: a learner that is not there is told of.
DEADLINE = 10.0
DEFAULT_TIMEOUT = 3600.0
MAX_SAMPLES = 1024


class EvaluationError(RuntimeError):
    """Something that the evaluation needs is not there; the text says what to do."""


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, as it is reported."""

    run: str
    version: int
    file: str
    samples: int
    greedy: bool
    temperature: float
    max_tokens: int
    seed: int
    k: list[int] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(argv)
    try:
        problems = read_problems(given.file, given.limit)
        ks = wanted_ks(given.pass_at, given.samples)
        if given.completions is not None and not given.completions.parent.is_dir():
            raise ValueError(f"--completions: there is no folder {given.completions.parent}; make it first")
    except (ProblemFileError, ValueError) as error:
        parser.error(str(error))
    begun = time.monotonic()
    with Client(given.target, timeout=DEADLINE) as client:
        try:
            evaluation = settle(client, given, ks)
            summary = evaluate(client, evaluation, problems, given)
        except (EvaluationError, WatchError, QerldError, OSError) as error:
            sys.stderr.write(f"qerld eval: {given.target}: {error}\n")
            return 1
    seconds = time.monotonic() - begun
    if given.json:
        sys.stdout.write(json.dumps(as_json(evaluation, summary, seconds), indent=2) + "\n")
    else:
        Console().print(table(evaluation, summary, seconds))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qerld eval",
        description="Evaluate a version of a run on a file of problems, without noise: pass@1, or with --samples avg@n "
        "and pass@k, with 95% confidence intervals. Nothing of it is stored or trained.",
        epilog="FILE has a JSON object a line: GSM8K's question and answer (the last ####), MATH-500's problem and "
        "answer, or prompt and answer. docs/evaluation.md says how answers are found and compared.",
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="problems with reference answers, JSON lines")
    add("--target", default="127.0.0.1:50051", help="learner's gRPC endpoint (default: %(default)s)")
    add("--run", help="name of the run (default: the newest)")
    add("--version", type=at_least(0), help="version of the run (default: the live one); 0 is before any training")
    add("--samples", type=at_least(1), default=1, help="samples a problem; 1 is greedy unless --temperature is given")
    add("--pass-at", default="", metavar="K,…", help="k of pass@k, each at most --samples (default: --samples)")
    add("--temperature", type=float, help="sampling temperature (default: the run's)")
    add("--max-tokens", type=at_least(1), help="most tokens of a completion (default: the run's)")
    add("--seed", type=at_least(0), default=0, help="seed of the sampling (default: %(default)s)")
    add("--limit", type=at_least(1), help="only the first so many problems")
    add("--instruction", default=INSTRUCTION, help='line below each question (not below a "prompt"); "" for none')
    add("--system", default="", help="system message (default: none)")
    add("--timeout", type=float, default=DEFAULT_TIMEOUT, help="seconds until it is given up (default: %(default)s)")
    add("--completions", type=Path, metavar="OUT", help="write each completion with its verdict, JSON lines")
    add("--json", action="store_true", help="print the result as JSON instead of a table")
    return parser


def at_least(least: int) -> Any:
    """Return an argparse type: a whole number that is not below `least`."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def wanted_ks(text: str, samples: int) -> list[int]:
    """Return the k of pass@k; raises ValueError for what `samples` samples cannot estimate."""
    if samples > MAX_SAMPLES:
        raise ValueError(f"--samples: must be at most {MAX_SAMPLES}, got {samples}; ask several times with other seeds")
    if not text:
        return [samples] if samples > 1 else []
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isdecimal() and 1 <= int(part) <= samples)]
    if wrong:
        raise ValueError(f"--pass-at: must be from 1 to --samples = {samples}, got {', '.join(wrong)}; raise --samples")
    return sorted(set(map(int, parts)))


def settle(client: Client, given: argparse.Namespace, ks: list[int]) -> Evaluation:
    """Return what is evaluated, with the run's defaults; raises EvaluationError when no server could answer."""
    run = pick_run(client, given.run)
    replicas = client.list_replicas()
    if not any(not replica.refused_reason for replica in replicas):
        why = "; ".join(f"{r.replica_id} was refused: {r.refused_reason}" for r in replicas) or "none was seen"
        raise EvaluationError(f"no policy server is attached ({why}); start `qerld policy`, or `qerld serve` for both")
    return Evaluation(
        run=run.name,
        version=run.live_version if given.version is None else given.version,
        file=str(given.file),
        samples=given.samples,
        greedy=given.samples == 1 and given.temperature is None,
        temperature=run.config.temperature if given.temperature is None else given.temperature,
        max_tokens=given.max_tokens or run.config.max_tokens,
        seed=given.seed,
        k=ks,
    )


def evaluate(client: Client, what: Evaluation, problems: Sequence[Problem], given: argparse.Namespace) -> Summary:
    """Complete and judge every problem, with a progress bar on standard error."""
    prompts = [chat(problem, given.instruction, given.system) for problem in problems]
    sampling = common_pb2.Sampling(temperature=what.temperature, max_tokens=what.max_tokens, seed=what.seed)
    stream = client.evaluate(
        what.run,
        what.version,
        prompts,
        samples=what.samples,
        greedy=what.greedy,
        sampling=sampling,
        timeout=given.timeout,
    )
    judged: list[Completion] = []
    with ExitStack() as stack:
        out = stack.enter_context(given.completions.open("w", encoding="utf-8")) if given.completions else None
        judge, responses = stack.enter_context(Judge()), stack.enter_context(stream)
        for response in followed(responses, len(problems) * what.samples):
            problem = problems[response.prompt_index]
            right = judge.right(response.text, problem.answer, cut_off=was_cut_off(response))
            judged.append(judged_completion(response, right))
            if out is not None:
                write_completion(out, response, problem, right)
    return summarise(judged, what.samples, what.k)


def followed(responses: Iterator[policy_pb2.EvaluateResponse], total: int) -> Iterator[policy_pb2.EvaluateResponse]:
    """Yield the responses, counted by a progress bar."""
    columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield from progress.track(responses, total=total)


def judged_completion(response: policy_pb2.EvaluateResponse, right: bool | None) -> Completion:
    return Completion(response.prompt_index, right, len(response.completion.ids), was_cut_off(response))


def was_cut_off(response: policy_pb2.EvaluateResponse) -> bool:
    return response.finish_reason == common_pb2.FINISH_REASON_LENGTH


def write_completion(out: TextIO, response: policy_pb2.EvaluateResponse, problem: Problem, right: bool | None) -> None:
    line = {
        "problem": response.prompt_index,
        "sample": response.sample_index,
        "question": problem.question,
        "reference": problem.answer,
        "completion": response.text,
        "right": right,
        "tokens": len(response.completion.ids),
        "truncated": was_cut_off(response),
    }
    out.write(json.dumps(line, ensure_ascii=False) + "\n")


def as_json(what: Evaluation, summary: Summary, seconds: float) -> dict[str, Any]:
    """Return the result for programs; `estimates` has value, low, high and method by name."""
    return asdict(what) | {
        "problems": summary.problems,
        "estimates": {name: asdict(estimate) for name, estimate in summary.estimates.items()},
        "truncated_share": summary.truncated_share,
        "unjudged": summary.unjudged,
        "mean_tokens": summary.mean_tokens,
        "seconds": round(seconds, 3),
    }


def table(what: Evaluation, summary: Summary, seconds: float) -> Table:
    """Return the result for people."""
    how = "greedy" if what.greedy else f"{what.samples} samples at temperature {what.temperature:g}, seed {what.seed}"
    title = f"{what.run}@{what.version}, no noise, {how}"
    shown = Table("", "", "95% interval", title=title, title_justify="left")
    for name, estimate in summary.estimates.items():
        shown.add_row(name, f"{estimate.value:.1%}", f"{estimate.low:.1%} to {estimate.high:.1%} ({estimate.method})")
    shown.add_section()
    shown.add_row("problems", str(summary.problems), what.file)
    shown.add_row("tokens of a completion", f"{summary.mean_tokens:.1f}", f"at most {what.max_tokens}")
    shown.add_row("cut off", f"{summary.truncated_share:.1%}", "raise --max-tokens" if summary.truncated_share else "")
    if summary.unjudged:
        shown.add_row("not judged in time", str(summary.unjudged), "count as wrong")
    shown.add_row("seconds", f"{seconds:.1f}", "")
    return shown
