"""Files of problems with reference answers, one JSON object a line: GSM8K's and MATH-500's forms.

| file | question | answer |
|---|---|---|
| GSM8K (arXiv 2110.14168) | `question` | what follows the last `####` of `answer` |
| MATH-500 (arXiv 2305.20050) | `problem` | `answer`, in LaTeX |
| complete prompts | `prompt`: no instruction is added | `answer` |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
"""Added to questions on a line of its own; Qwen2.5-Math's wording (arXiv 2409.12122)."""

_FORMS = ("question", "problem", "prompt")
_WAY_OUT = 'want {"question": …, "answer": "… #### 42"} (GSM8K) or {"problem" or "prompt": …, "answer": …} a line'


class ProblemFileError(ValueError):
    """A file that is not one of problems; the text names file and line, and says what to do."""


@dataclass(frozen=True)
class Problem:
    """One problem. `complete`: the question is the whole prompt and says itself how to answer."""

    question: str
    answer: str
    complete: bool = False


def read_problems(path: Path, limit: int | None = None) -> list[Problem]:
    """Return the problems of a file, at most the first `limit`; blank lines are skipped.

    Raises:
        ProblemFileError: The file cannot be read, a line is not a problem, or there is none.
    """
    problems: list[Problem] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(problems) >= limit:
                    break
                if line.strip():
                    problems.append(_problem(line, f"{path}:{number}"))
    except OSError as error:
        raise ProblemFileError(f"{path}: cannot be read ({error.strerror}); give a JSON-lines file") from error
    except UnicodeDecodeError as error:
        raise ProblemFileError(f"{path}: is not UTF-8 text ({error.reason}); give a JSON-lines file") from error
    if not problems:
        raise ProblemFileError(f"{path}: has no problem; {_WAY_OUT}")
    return problems


def chat(problem: Problem, instruction: str = INSTRUCTION, system: str = "") -> list[dict[str, str]]:
    """Return a problem as a chat; the instruction goes below questions that are not complete prompts."""
    text = problem.question if problem.complete or not instruction else f"{problem.question}\n{instruction}"
    turns = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *turns] if system else turns


def _problem(line: str, where: str) -> Problem:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ProblemFileError(f"{where}: is not JSON ({error}); {_WAY_OUT}") from error
    if not isinstance(item, dict):
        raise ProblemFileError(f"{where}: must be a JSON object, got {type(item).__name__}; {_WAY_OUT}")
    form = next((name for name in _FORMS if name in item), None)
    if form is None:
        raise ProblemFileError(f"{where}: has none of {', '.join(_FORMS)}; {_WAY_OUT}")
    question, answer = (_text(item, name, where) for name in (form, "answer"))
    if form == "question" and "####" in answer:
        answer = answer.rpartition("####")[2].strip().replace(",", "").removeprefix("$")
    if not answer:
        raise ProblemFileError(f"{where}: answer has nothing behind its ####; {_WAY_OUT}")
    return Problem(question, answer, complete=form == "prompt")


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    """Return a field that must be a text, or a number for an answer."""
    value = item.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and name == "answer":
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else repr(value)[:40]
        raise ProblemFileError(f"{where}: {name} must be a text that is not empty, got {got}; {_WAY_OUT}")
    return value.strip()
