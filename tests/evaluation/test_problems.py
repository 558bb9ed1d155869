"""Files of problems: both public forms, odd lines, and the real files where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from qerld_eval import INSTRUCTION, Problem, ProblemFileError, chat, read_problems

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
GSM8K = {"question": "How many?", "answer": "She has 2 + 3 = <<2+3=5>>5.\n#### 5"}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_gsm8k(tmp_path: Path) -> None:
    odd = {"question": "How much?", "answer": "#### not this\n#### $1,234 "}
    path = write(tmp_path, GSM8K, "", "   ", odd, {"question": "Bare?", "answer": -7})
    assert read_problems(path) == [Problem("How many?", "5"), Problem("How much?", "1234"), Problem("Bare?", "-7")]


def test_math_500(tmp_path: Path) -> None:
    published = {"problem": "Find $x$.", "solution": "…", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 2}
    complete = {"prompt": "Find $y$, boxed.", "answer": "p - q"}
    path = write(tmp_path, published, complete)
    assert read_problems(path) == [Problem("Find $x$.", "\\frac{1}{2}"), Problem("Find $y$, boxed.", "p - q", True)]


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GSM8K).encode() + b"\r\n\r\n" + json.dumps(GSM8K).encode())
    assert read_problems(path) == [Problem("How many?", "5")] * 2


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    assert len(read_problems(write(tmp_path, GSM8K, GSM8K, "broken"), limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object, got list"),
        ({"text": "x"}, "has none of question, problem, prompt"),
        ({"question": "x"}, "answer must be a text that is not empty, got nothing"),
        ({"question": "", "answer": "#### 1"}, "question must be a text"),
        ({"question": ["x"], "answer": "#### 1"}, "question must be a text"),
        ({"problem": "x", "answer": True}, "answer must be a text that is not empty, got True"),
        ({"problem": "x", "answer": "  "}, "answer must be a text"),
        ({"question": "x", "answer": "It is\n####  "}, "nothing behind its ####"),
    ],
)
def test_an_odd_line_is_named_with_the_way_out(tmp_path: Path, line: object, problem: str) -> None:
    path = write(tmp_path, GSM8K, line)
    with pytest.raises(ProblemFileError) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)
    assert "#### 42" in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ProblemFileError, match="cannot be read"):
        read_problems(tmp_path / "missing.jsonl")
    with pytest.raises(ProblemFileError, match="cannot be read"):
        read_problems(tmp_path)
    with pytest.raises(ProblemFileError, match="has no problem"):
        read_problems(write(tmp_path, "", " "))
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\x80\x81\xff")
    with pytest.raises(ProblemFileError, match="is not UTF-8"):
        read_problems(binary)


def test_the_instruction_goes_below_questions_and_not_below_complete_prompts() -> None:
    assert chat(Problem("Q", "1")) == [{"role": "user", "content": f"Q\n{INSTRUCTION}"}]
    assert chat(Problem("Q", "1", complete=True)) == [{"role": "user", "content": "Q"}]
    assert chat(Problem("Q", "1"), instruction="", system="S") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
    ]


@pytest.mark.parametrize(("name", "count"), [("gsm8k/test.jsonl", 1319), ("math500/test.jsonl", 500)])
def test_the_real_files(name: str, count: int) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    assert len(read_problems(path)) == count
