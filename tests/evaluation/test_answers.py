"""Answers are compared as mathematics, and no completion can break or hold up the judge."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from qerld_eval import Judge, read_problems
from qerld_eval.answers import final_answer, plain

from .test_problems import DATA


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Judge() as running:
        yield running


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("So it is \\boxed{18}.", "18"),
        ("First \\boxed{3}, no: \\boxed{18}", "18"),
        ("\\boxed{1,080}", "1080"),
        ("\\boxed{\\$18.00}", "18"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("\\boxed{\\dfrac{1}{2}}", "\\frac12"),
        ("\\boxed{x = 5}", "5"),
        ("\\boxed{2(x+1)}", "2x + 2"),
        ("\\boxed{(3,\\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}"),
        ("<think>2 and 2</think>\n#### 4", "4"),
        ("<think>2 and 2</think><answer> 4 </answer>", "4"),
        ("The answer is 4.", "4"),
    ],
)
def test_right(judge: Judge, text: str, reference: str) -> None:
    assert judge.right(text, reference) is True


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("\\boxed{17}", "18"),
        ("\\boxed{18}, no: \\boxed{3}", "18"),
        ("#### 18\n#### 19", "18"),
        ("", "18"),
        ("I do not know.", "18"),
        ("\\boxed{", "18"),
        ("\\boxed{}", "18"),
        ("\\boxed{\\frac{1}{0}}", "18"),
        ("{{{{", "18"),
        ("😀 \x00", "18"),
        ("\\boxed{(4,3)}", "(3,4)"),
    ],
)
def test_wrong(judge: Judge, text: str, reference: str) -> None:
    assert judge.right(text, reference) is False


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The answer is 80", False),
        ("80", False),
        ("#### 80", False),
        ("#### 80\nThat", True),
        ("#### 80\nThat is #### 90", True),
        ("So \\boxed{80} and", True),
        ("So \\boxed{80", False),
        ("<answer>80</answer>", True),
        ("<answer>80", False),
    ],
)
def test_what_was_cut_off_is_right_by_a_closed_answer_only(judge: Judge, text: str, right: bool) -> None:
    assert judge.right(text, "80", cut_off=True) is right


def test_a_judge_that_hangs_is_ended_and_the_next_answer_has_another() -> None:
    with Judge(seconds=0.5) as judge:
        assert judge.right("\\boxed{1}", "1") is True
        # math-verify itself gives this up after 5 s.
        assert judge.right("\\boxed{9^{9^{9^{9^9}}}}", "7") is None
        assert judge.right("\\boxed{2}", "2") is True


def test_the_last_answer_that_is_marked_counts() -> None:
    assert final_answer("\\boxed{a} <answer>b</answer> #### c") == "a"
    assert final_answer("<answer>b</answer> #### c") == "b"
    assert final_answer("#### c\n#### d ") == "d"
    assert final_answer("\\boxed{\\frac{1}{2}} and \\boxed{3") == "\\frac{1}{2}"
    assert final_answer("nothing") is None


def test_what_carries_no_meaning_is_left_out() -> None:
    assert plain("$ 12,345,678. $") == "12345678"
    assert plain("\\left(1,\\, 2\\right)") == "(1,2)"


@pytest.mark.parametrize("name", ["gsm8k/test.jsonl", "math500/test.jsonl"])
def test_references_are_right_and_their_neighbours_are_not(judge: Judge, name: str) -> None:
    path = Path(DATA / name)
    if not path.exists():
        pytest.skip(f"{path} is not here")
    problems = read_problems(path, limit=120)
    answers = [problem.answer for problem in problems]
    assert [a for a in answers if judge.right(f"It is $\\boxed{{{a}}}$.", a) is not True] == []
    pairs = [(a, b) for a, b in itertools.pairwise(answers) if plain(a) != plain(b)]
    accepted = [(a, b) for a, b in pairs if judge.right(f"\\boxed{{{b}}}", a) is not False]
    # "x = 5" and "5" are the same.
    assert [(a, b) for a, b in accepted if a.rpartition("=")[2].strip() != b.rpartition("=")[2].strip()] == []
