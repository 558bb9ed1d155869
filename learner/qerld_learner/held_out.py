"""Held-out evaluation inside a run: problems of a file, completed without noise, judged, and made into metrics."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from qerld_eval import Completion, Judge, Problem, ProblemFileError, Summary, chat, read_problems, summarise

from .errors import LearnerError, Violation
from .evaluation import Completed, EvaluationSpec, evaluate
from .options import LearnerOptions
from .records import FinishReason, HeldOutConfig, RunRecord, SamplingSpec
from .shared import Shared
from .tokens import PromptTokenizer

_log = logging.getLogger(__name__)

FIELD = "config.evaluation.file"


def due(config: HeldOutConfig | None, step: int, last_step: int) -> bool:
    """Whether the version of a step is evaluated: of each `every_steps` steps, and of the last one (0: none is)."""
    return config is not None and (step % config.every_steps == 0 or step == last_step)


def check_file(config: HeldOutConfig, options: LearnerOptions) -> list[Violation]:
    """Return what is wrong with a run's problem file, after reading it."""
    if options.evaluation_dir is None:
        text = "this learner lets runs name no file; start it with evaluation_dir, the folder of such files"
        return [Violation(FIELD, text)]
    if find_spec("math_verify") is None:
        return [Violation(FIELD, "the learner lacks math-verify; install it there with pip install 'qerld[eval]'")]
    root = options.evaluation_dir.resolve()
    if not (root / config.file).resolve().is_relative_to(root):
        return [
            Violation(FIELD, f"must be within the learner's evaluation_dir, got {config.file!r}; give a name in it")
        ]
    try:
        read_problems(root / config.file, config.problems)
    except ProblemFileError as error:
        return [Violation(FIELD, str(error))]
    return []


async def held_out_metrics(shared: Shared, run: RunRecord, version: int) -> Mapping[str, float]:
    """Return the `eval_…` metrics of a version; only `eval_failed` when it failed, which must not stop the run."""
    config = run.config.evaluation
    assert config is not None
    pulse, begun = shared.runs[run.name], time.monotonic()
    try:
        async with asyncio.timeout(config.time_limit):
            summary = await _summary(shared, run.name, version, config)
    except TimeoutError:
        why = f"it took longer than time_limit = {config.time_limit:g} s; raise that, or lower problems or max_tokens"
    except (LearnerError, ProblemFileError) as error:
        why = str(error)
    else:
        estimate = summary.average
        interval = f"{estimate.low:.3f} to {estimate.high:.3f}"
        what = f"{estimate.value:.3f} ({interval}) on {summary.problems} held-out problems"
        _log.info("version %d of run %s: %s in %.1f s", version, run.name, what, time.monotonic() - begun)
        return metrics_of(summary)
    finally:
        pulse.waiting_for = ""
    _log.warning("version %d of run %s goes on without its held-out evaluation: %s", version, run.name, why)
    return {"eval_failed": 1.0}


def metrics_of(summary: Summary) -> dict[str, float]:
    """Return a summary as metrics of a report."""
    return {
        "eval_accuracy": summary.average.value,
        "eval_accuracy_low": summary.average.low,
        "eval_accuracy_high": summary.average.high,
        "eval_pass_at_k": summary.passes[summary.samples].value,
        "eval_problems": float(summary.problems),
        "eval_samples": float(summary.samples),
        "eval_truncated_share": summary.truncated_share,
        "eval_tokens_mean": summary.mean_tokens,
        "eval_unjudged": float(summary.unjudged),
        "eval_failed": 0.0,
    }


async def _summary(shared: Shared, run: str, version: int, config: HeldOutConfig) -> Summary:
    folder = shared.options.evaluation_dir
    if folder is None:
        raise ProblemFileError("the learner was started without evaluation_dir; give it the folder of problem files")
    problems, prompts = await asyncio.to_thread(_load, folder / config.file, shared.options.base_model, config)
    context = shared.pool.max_model_len() or max(map(len, prompts)) + 1
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < context]
    completed = await _complete(shared, run, version, config, [prompts[i] for i in fitting]) if fitting else []
    for one in completed:
        one.prompt_index = fitting[one.prompt_index]
    judged = await _judged(problems, completed)
    # A prompt without room for a completion counts as wrong and cut off.
    too_long = set(range(len(prompts))) - set(fitting)
    judged += [Completion(i, False, 0, truncated=True) for i in sorted(too_long) for _ in range(config.samples)]
    return summarise(judged, config.samples, [config.samples])


def _load(path: Path, model: Path, config: HeldOutConfig) -> tuple[list[Problem], list[tuple[int, ...]]]:
    problems = read_problems(path, config.problems)
    tokenizer = PromptTokenizer(model)
    chats = [chat(problem, config.instruction, config.system) for problem in problems]
    return problems, [tokenizer.from_messages([(turn["role"], turn["content"]) for turn in turns]) for turns in chats]


async def _complete(
    shared: Shared, run: str, version: int, config: HeldOutConfig, prompts: Sequence[tuple[int, ...]]
) -> list[Completed]:
    sampling = SamplingSpec(config.temperature, config.max_tokens, seed=0)
    spec = EvaluationSpec(run, version, tuple(prompts), config.samples, config.greedy, sampling)
    completed: list[Completed] = []

    async def take(one: Completed) -> None:
        completed.append(one)
        of = f"{len(completed)} of {len(prompts) * config.samples} completions"
        shared.runs[run].waiting_for = f"the held-out evaluation of version {version}: {of}"

    await evaluate(shared, spec, take)
    return completed


async def _judged(problems: Sequence[Problem], completed: Sequence[Completed]) -> list[Completion]:
    """Judge in a thread, which ends soon after a cancellation."""
    stop = threading.Event()

    def judge_all() -> list[Completion]:
        with Judge() as judge:
            return [_verdict(judge, problems, one) for one in completed if not stop.is_set()]

    try:
        return await asyncio.to_thread(judge_all)
    finally:
        stop.set()


def _verdict(judge: Judge, problems: Sequence[Problem], one: Completed) -> Completion:
    cut_off = one.finish_reason is FinishReason.LENGTH
    right = judge.right(one.text, problems[one.prompt_index].answer, cut_off=cut_off)
    return Completion(one.prompt_index, right, len(one.ids), cut_off)
