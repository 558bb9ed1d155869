"""Judging outcomes: pure functions from an outcome and what is known of its rollout to an answer with every problem."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .records import (
    Answer,
    GroupState,
    Outcome,
    OutcomeKind,
    ReceiptState,
    RolloutState,
)

MAX_OUTCOMES = 4096
MAX_REWARD = 1e6
"""Largest |reward|, of a rollout and of each turn and token. With importance ratios of up to e^20 and 1e8 weights, the
squared norm of a gradient then stays below the 3.4e38 of fp32; an infinite one would pause the run."""
_OPEN_GROUPS = (GroupState.QUEUED, GroupState.SAMPLING, GroupState.AWAITING_REWARDS)
_RECEIPTS = {OutcomeKind.ERROR: ReceiptState.FAILED, OutcomeKind.ABSTENTION: ReceiptState.ABSTAINED}

Problem = tuple[str, str]


@dataclass(frozen=True)
class KnownRollout:
    """What the store knows of a rollout when an outcome comes in; `stored` is an earlier outcome's canonical text."""

    rollout_id: str
    group_id: str
    run: str
    state: RolloutState
    tokens: int
    turns: int
    group_state: GroupState
    receipt: ReceiptState
    deadline: float | None
    stored: str | None


@dataclass(frozen=True)
class Judgement:
    """Answer to one outcome; `late` marks one that is stored although its group was dropped as stale before."""

    outcome: Outcome
    body: str
    answer: Answer
    problems: tuple[Problem, ...] = ()
    known: KnownRollout | None = None
    late: bool = False


def canonical(outcome: Outcome) -> str:
    """Return a text that is equal for equal outcomes and only for them; floats keep all their digits."""
    components = sorted(outcome.components.items())
    return json.dumps([outcome.kind, outcome.values, outcome.detail, components], separators=(",", ":"))


def values_of(body: str) -> tuple[float, ...]:
    """Return the values in an outcome's canonical text."""
    return tuple(json.loads(body)[1])


def receipt_of(kind: OutcomeKind) -> ReceiptState:
    """Return the receipt of a rollout with such an outcome: an error is a failure, never a zero."""
    return _RECEIPTS.get(kind, ReceiptState.BUFFERED)


def judge_all(run: str, outcomes: Sequence[Outcome], known: dict[str, KnownRollout], now: float) -> list[Judgement]:
    """Judge the outcomes of one message in order: the second of a rollout is judged against the first."""
    seen: dict[str, str] = {}
    judgements = []
    for index, outcome in enumerate(outcomes):
        judged = _judge(run, index, outcome, known.get(outcome.rollout_id), seen.get(outcome.rollout_id), now)
        if judged.answer is Answer.ACCEPTED:
            seen[outcome.rollout_id] = judged.body
        judgements.append(judged)
    return judgements


def _judge(
    run: str, index: int, outcome: Outcome, known: KnownRollout | None, seen: str | None, now: float
) -> Judgement:
    path = f"outcomes[{index}]"
    body = canonical(outcome)
    if known is None or known.run != run:
        where = "no run has it" if known is None else f"it belongs to run {known.run!r}"
        problem = f"unknown rollout {outcome.rollout_id!r} in run {run!r}: {where}; use an id that Sample returned"
        return Judgement(outcome, body, Answer.REJECTED, ((f"{path}.rollout_id", problem),))
    problems = tuple(_value_problems(path, outcome, known))
    if problems:
        return Judgement(outcome, body, Answer.REJECTED, problems, known)
    stored = seen or known.stored
    if stored is not None:
        return _judge_again(path, outcome, body, stored, known)
    problem_of_state = _state_problem(known, now)
    if problem_of_state:
        return Judgement(outcome, body, Answer.REJECTED, ((f"{path}.rollout_id", problem_of_state),), known)
    late = known.receipt is ReceiptState.DROPPED_STALE
    return Judgement(outcome, body, Answer.ACCEPTED, (), known, late)


def _judge_again(path: str, outcome: Outcome, body: str, stored: str, known: KnownRollout) -> Judgement:
    if stored == body:
        return Judgement(outcome, body, Answer.DUPLICATE, (), known)
    problem = (
        f"rollout {outcome.rollout_id!r} already has another outcome ({_said(stored)}), the first one counts;"
        " send each rollout's outcome once"
    )
    return Judgement(outcome, body, Answer.REJECTED, ((f"{path}.{outcome.kind}", problem),), known)


def _said(stored: str) -> str:
    kind, values, *_ = json.loads(stored)
    if len(values) > 1:
        return f"{kind} of sum {sum(values)}"
    return f"{kind} {values[0]}" if values else str(kind)


def _value_problems(path: str, outcome: Outcome, known: KnownRollout) -> list[Problem]:
    field = f"{path}.{outcome.kind}"
    problems = []
    wanted = {
        OutcomeKind.REWARD: (1, "reward"),
        OutcomeKind.TURN_REWARDS: (known.turns, "trainable segment"),
        OutcomeKind.TOKEN_REWARDS: (known.tokens, "completion token"),
    }.get(outcome.kind)
    sampled = known.state is RolloutState.FINISHED
    if wanted and sampled and len(outcome.values) != wanted[0]:
        problems.append((field, f"needs {wanted[0]} values, one a {wanted[1]}, got {len(outcome.values)}"))
    for position, value in enumerate(outcome.values):
        if text := _reward_problem(value):
            place = field if outcome.kind is OutcomeKind.REWARD else f"{field}.values[{position}]"
            problems.append((place, text))
    if not problems and len(outcome.values) > 1:
        problems.extend((field, text) for text in _sum_problems(outcome.values))
    for name, value in outcome.components.items():
        if not math.isfinite(value):
            problems.append((f"{path}.components[{name}]", f"must be finite, got {value}; leave it out"))
    return problems


def _sum_problems(values: Sequence[float]) -> Iterator[str]:
    """A token's advantage is made of the sum of the rewards after it."""
    for begin, left in zip(range(len(values) - 1, -1, -1), itertools.accumulate(reversed(values)), strict=True):
        if text := _reward_problem(left):
            where = f" from values[{begin}] on" if begin else ""
            yield f"the sum of its values{where} {text}"
            return


def _reward_problem(value: float) -> str:
    if not math.isfinite(value):
        return f"must be finite, got {value}; report an error or an abstention instead"
    if abs(value) > MAX_REWARD:
        return f"must be from {-MAX_REWARD:g} to {MAX_REWARD:g}, got {value:g}; scale the rewards down"
    return ""


def _state_problem(known: KnownRollout, now: float) -> str | None:
    rollout = f"rollout {known.rollout_id!r}"
    if known.state is RolloutState.SAMPLING:
        return f"{rollout} is still being sampled; send its outcome after it has finished"
    if known.state is RolloutState.FAILED:
        return f"{rollout} failed in sampling and takes no outcome"
    if known.receipt is ReceiptState.DROPPED_STALE:
        return None  # stale is a receipt, not an error
    if known.deadline is not None and now >= known.deadline:
        return f"the reward deadline of {rollout} passed {now - known.deadline:.1f} s ago; raise reward_deadline"
    if known.group_state not in _OPEN_GROUPS:
        return f"the group of {rollout} is {known.group_state}, {rollout} is {known.receipt}; it takes no more outcomes"
    return None
