"""The rewards of examples/gsm8k.py, case by case."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "gsm8k.py"
    spec = importlib.util.spec_from_file_location("gsm8k_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\n9 * 2\n</think>\n#### 18", 1.2),
        ("<think>9 * 2</think> #### 18.", 1.2),
        ("#### 18", 1.0),
        ("<think>9 * 2</think>\n#### 17", 0.2),
        ("<think></think>\n#### 18", 1.0),
        ("<think>9 * 2\n#### 18", 1.0),
        ("#### 18\n#### 19", 0.0),
        ("#### 19\n#### 18", 1.0),
        ("18", 0.0),
        ("####18", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_format_and_the_exact_answer(example: ModuleType, text: str, expected: float) -> None:
    assert example.score(text, "18") == pytest.approx(expected)


def test_separators_of_thousands_do_not_matter(example: ModuleType) -> None:
    assert example.score("#### 1,234,567", "1234567") == 1.0
    assert example.score("#### -3", "-3") == 1.0
