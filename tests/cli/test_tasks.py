"""Splits never share an item, whatever the seed; scoring is strict."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qerld_service.quickstart.tasks import TASKS, Task, UnknownTaskError, make_task, reward

SEEDS = st.integers(0, 2**32)


@given(name=st.sampled_from(sorted(TASKS)), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_nothing_is_on_two_sides(name: str, seed: int) -> None:
    task = make_task(name, seed)
    sides = [{item.key for item in side} for side in (task.shots, task.train, task.held_out)]
    assert sides[0].isdisjoint(sides[1] | sides[2])
    assert sides[1].isdisjoint(sides[2])
    questions = [{item.question for item in side} for side in (task.train, task.held_out)]
    assert questions[0].isdisjoint(questions[1])
    assert len(task.held_out) >= 30
    assert len(task.shots) == 3


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_no_held_out_sum_is_trained_the_other_way_round(seed: int) -> None:
    def pairs(items: Task) -> tuple[set[frozenset[str]], set[frozenset[str]]]:
        def numbers(question: str) -> frozenset[str]:
            first, _, second = question.removeprefix("What is ").removesuffix("?").partition(" + ")
            return frozenset((first, second))

        return {numbers(i.question) for i in items.train}, {numbers(i.question) for i in items.held_out}

    train, held_out = pairs(make_task("sums", seed))
    assert train.isdisjoint(held_out)


def test_same_seed_same_split_other_seed_another() -> None:
    assert make_task("next", 1) == make_task("next", 1)
    assert make_task("next", 1).held_out != make_task("next", 2).held_out


def test_prompts_come_once_before_any_comes_twice() -> None:
    task = make_task("sums", 0)
    first = list(islice(task.prompts(5), len(task.train)))
    assert sorted(item.question for item in first) == sorted(item.question for item in task.train)
    assert list(islice(task.prompts(5), 10)) == first[:10]


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        ("next", "What number comes after 378?", "379"),
        ("sums", "What is 9 + 4?", "<answer>13</answer>"),
        ("swap", "Swap the two words: apple river", "river apple"),
        ("swap", "Swap the two words: river apple", "apple river"),
    ],
)
def test_answers(name: str, question: str, answer: str) -> None:
    task = make_task(name, 0)
    items = {item.question: item.answer for item in (*task.shots, *task.train, *task.held_out)}
    assert items[question] == answer


def test_sort_answers_are_sorted_and_half_of_them_swap() -> None:
    task = make_task("sort", 0)
    items = [*task.train, *task.held_out]
    assert all(item.answer.split() == sorted(item.answer.split()) for item in items)
    kept = sum(item.question.endswith(item.answer) for item in items) / len(items)
    assert 0.4 < kept < 0.6


def test_prompt_is_three_examples_and_the_question() -> None:
    task = make_task("next", 0)
    messages = task.messages(task.held_out[0])
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3 + ["user"]
    assert messages[-1]["content"] == task.held_out[0].question
    assert messages[1]["content"] == task.shots[0].answer


@pytest.mark.parametrize(
    ("text", "stopped", "expected"),
    [("378", True, 1.0), ("378", False, 0.0), ("378.", True, 0.0), (" 378", True, 0.0), ("37", True, 0.0)],
)
def test_scoring_is_strict(text: str, stopped: bool, expected: float) -> None:
    assert reward("378", text, stopped) == expected


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(UnknownTaskError, match="next, sums, swap, sort, copy"):
        make_task("chess", 0)
