"""The README's loop and the example run as they are written, each as a program of its own, against `qerld serve`.

The served model is random and never adds right, so all its groups are dropped; steps come from rewarded groups that the
test imports into the program's run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from qerld_client import Client, FinishReason, NotFoundError, Segment, TokenIds, Trajectory
from qerld_service.serve import ServeSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SECONDS = 240.0


@dataclass
class Served:
    """Where `qerld serve` serves, the client of the test, the log, and the folder of train.jsonl and test.jsonl."""

    target: str
    client: Client
    log: Callable[[], str]
    folder: Path


@pytest.fixture(scope="module")
def served(tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("readme")
    ready = folder / "ready.json"
    flags = ["--model", str(tiny_model[1]), "--state-dir", str(folder / "state"), "--ready-file", str(ready)]
    for name in ("port", "openai-port", "learner-metrics-port", "policy-metrics-port"):
        flags += [f"--{name}", "0"]
    flags += ["--device", "cpu", "--policy", "max_model_len=384", "--learner", "trainer_threads=1"]
    flags += ["--learner", f"evaluation_dir={folder}"]
    for name in ("train", "test"):
        problems = [{"question": f"What is {i} plus 2?", "answer": f"It is.\n#### {i + 2}"} for i in range(9)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, problems)))
    text = (folder / "log.txt").read_text
    with (folder / "log.txt").open("w") as log:
        process = start(["-m", "qerld_service.cli", "serve", *flags], folder, log)
        try:
            until(lambda: ready.exists() or process.poll() is not None, text)
            assert process.poll() is None, text()
            target = json.loads(ready.read_text())["target"]
            with Client(target) as client:
                yield Served(target, client, text, folder)
        finally:
            process.terminate()
            process.wait(SECONDS)


def start(arguments: list[str], folder: Path, output: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", *arguments],
        cwd=folder,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def until(condition: Callable[[], Any], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, log()
        time.sleep(0.1)


@dataclass
class Program:
    """A running program and the lines that it has printed."""

    process: subprocess.Popen[str]
    lines: list[str]

    def printed(self, pattern: str) -> bool:
        """Whether a line is as the pattern says; fails when the program ended without one."""
        ended = self.process.poll() is not None
        found = any(re.fullmatch(pattern, line) for line in self.lines)
        assert found or not ended, self.log()
        return found

    def log(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts Python programs in an empty folder; ends those that still run."""
    started: list[Program] = []

    def begin(*arguments: str) -> Program:
        one = Program(start(list(arguments), tmp_path, subprocess.PIPE), [])
        assert one.process.stdout is not None
        threading.Thread(target=lambda: one.lines.extend(map(str.rstrip, one.process.stdout)), daemon=True).start()
        started.append(one)
        return one

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait(SECONDS)


def trajectory(last: int) -> Trajectory:
    segment = Segment(tokens=TokenIds(ids=[9, 10, last]), logprobs=[-1.0] * 3, trainable=True)
    return Trajectory(segments=[segment], finish_reason=FinishReason.FINISH_REASON_STOP)


def make_step(served: Served, run: str, groups: int) -> None:
    """Give a run what the random model does not: a batch of groups with a right and a wrong answer.

    Not before the program has sampled so many groups: its loop is under way then, and it will see the step.
    """

    def sampled() -> bool:
        try:
            return len(list(served.client.list_groups(run))) >= groups
        except NotFoundError:
            return False

    until(sampled, served.log)
    batch = [("seven", [trajectory(20 + number), trajectory(40 + number)]) for number in range(4)]
    for group in served.client.import_trajectories(run, batch):
        served.client.submit_rewards(run, dict(zip(group.rollout_ids, (1.0, 0.0), strict=True)))


def the_loop() -> str:
    """The one Python block of the README."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_loop_of_the_readme_runs(served: Served, program: Callable[..., Program], tmp_path: Path) -> None:
    defaults = ServeSettings.model_fields
    code, written = the_loop(), f'"{defaults["host"].default}:{defaults["port"].default}"'
    assert code.count(written) == 1  # where `qerld serve` serves when it is not told otherwise
    (tmp_path / "loop.py").write_text(code.replace(written, f'"{served.target}"'))
    running = program("loop.py")
    make_step(served, "sums", groups=1)
    until(lambda: running.printed(r"1 0\.\d+"), lambda: running.log() + served.log())
    config = served.client.get_run("sums").config
    assert (config.group_size, config.groups_per_step, config.max_tokens, config.max_steps) == (8, 4, 64, 100)
    sampled = [group for group in served.client.list_groups("sums") if len(group.rollout_ids) == 8]
    assert all(group.labels["answer"].isdecimal() for group in sampled)
    running.process.kill()
    served.client.delete_run("sums")


def test_the_example_runs_to_its_end(served: Served, program: Callable[..., Program], tmp_path: Path) -> None:
    running = program(str(ROOT / "examples" / "arithmetic.py"), "--target", served.target, "--steps", "1")
    make_step(served, "arithmetic", groups=2)
    last_line = r"first steps .*; adapter in runs/arithmetic/adapter"
    until(lambda: running.printed(last_line), lambda: running.log() + served.log())
    assert running.process.wait(SECONDS) == 0
    assert running.printed(r"step   1  version   1  reward 0\.\d\d  entropy .*  sigma 0\.0000")
    names = {path.name for path in (tmp_path / "runs" / "arithmetic" / "adapter").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json"}


def test_the_gsm8k_example_trains_and_evaluates(served: Served, program: Callable[..., Program]) -> None:
    script = str(ROOT / "examples" / "gsm8k.py")
    train = str(served.folder / "train.jsonl")
    running = program(script, "--target", served.target, "--train", train, "--dry-run")
    last_line = r"adapter in runs/gsm8k/adapter"
    until(lambda: running.printed(last_line), lambda: running.log() + served.log())
    assert running.process.wait(SECONDS) == 0
    assert running.printed(r"9 problems; run 'gsm8k': .*")
    for step in (1, 2):
        assert running.printed(rf"step    {step}  reward .*  test 0\.0% \(0\.0% to 49\.0%\)"), running.log()
    config = served.client.get_run("gsm8k").config
    assert (config.evaluation.problems, config.evaluation.every_steps, config.evaluation.greedy) == (4, 1, True)
    served.client.delete_run("gsm8k")


def test_the_gsm8k_example_says_what_is_wrong(served: Served, program: Callable[..., Program]) -> None:
    script = str(ROOT / "examples" / "gsm8k.py")
    missing = program(script, "--target", served.target, "--train", "nothing.jsonl")
    assert missing.process.wait(SECONDS) == 1
    unnamed = program(script, "--target", served.target)
    assert unnamed.process.wait(SECONDS) == 2
    train = str(served.folder / "train.jsonl")
    no_test = program(script, "--target", served.target, "--train", train, "--test", "none.jsonl", "--dry-run")
    assert no_test.process.wait(SECONDS) == 1
    for one, text in (
        (missing, "nothing.jsonl: cannot be read"),
        (unnamed, "--train: name GSM8K's train.jsonl"),
        (no_test, "config.evaluation.file"),
    ):
        until(lambda one=one, text=text: text in one.log(), served.log)  # type: ignore[misc]
