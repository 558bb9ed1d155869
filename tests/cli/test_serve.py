"""`qerld serve` as a process, with both real roles: what dies comes back, SIGTERM leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from qerld_client import Client, LoraConfig, QerldError, RunConfig
from qerld_kernels.exclusive import FolderLock
from support.bad_models import make_bad_model

RUN = "served"
SECONDS = 240.0
T = TypeVar("T")


def command(model: Path, folder: Path, *more: str) -> list[str]:
    flags = [sys.executable, "-m", "qerld_service.cli", "serve", "--model", str(model)]
    flags += ["--state-dir", str(folder / "state"), "--ready-file", str(folder / "ready.json"), "--device", "cpu"]
    for name in ("port", "openai-port", "learner-metrics-port", "policy-metrics-port"):
        flags += [f"--{name}", "0"]
    for setting in ("max_loras=6", "max_lora_rank=8", "max_model_len=256", "reconnect_seconds=0.5"):
        flags += ["--policy", setting]
    return [*flags, "--learner", "trainer_threads=1", *more]


def until(condition: Callable[[], Any], server: Server) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert server.process.poll() is None, server.log.read_text()
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)


@dataclass
class Server:
    """A running `qerld serve`."""

    process: subprocess.Popen[bytes]
    log: Path
    ready_file: Path

    def child(self, module: str) -> psutil.Process:
        """The child, or grandchild, that runs a module of ours."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline():
                    return process
        raise AssertionError(f"no {module} runs\n{self.log.read_text()}")

    def all_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[Server, dict[str, Any]]]:
    """Yields it once both roles serve, and what its ready file says."""
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(model, folder, "--restart-delay", "0.1"),
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    server = Server(process, log, folder / "ready.json")
    try:
        until(server.ready_file.exists, server)
        yield server, json.loads(server.ready_file.read_text())
    finally:
        process.kill()  # its guard ends the children
        process.wait()


def runs(process: psutil.Process) -> bool:
    """One that nobody has waited for (a zombie) does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def eventually(call: Callable[[], T], server: Server) -> T:
    """What a call returns once the learner and a policy server are there for it."""
    results: list[T] = []

    def done() -> bool:
        with contextlib.suppress(QerldError):
            results.append(call())
        return bool(results)

    until(done, server)
    return results[0]


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_what_dies_comes_back_and_sigterm_ends_all(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    config = RunConfig(lora=LoraConfig(rank=4), group_size=2, groups_per_step=1, max_tokens=4, max_lag=4)
    with serving(tiny_model[1], tmp_path) as (server, ready), Client(ready["target"]) as client:
        client.create_run(RUN, config)
        group = client.sample(RUN, "three plus four", timeout=SECONDS)
        [before] = client.list_replicas()

        everything = server.all_processes()
        for module in ("qerld_service.policy", "qerld_learner"):  # the trainer goes with its learner
            server.child(module).kill()
        rewards = {rollout.rollout_id: float(rollout.index) for rollout in group.rollouts}
        eventually(lambda: client.submit_rewards(RUN, rewards), server)
        until(lambda: eventually(lambda: client.get_run(RUN), server).live_version == 1, server)
        group = eventually(lambda: client.sample(RUN, "three plus four", timeout=SECONDS), server)
        assert {span.version for rollout in group.rollouts for span in rollout.spans} == {1}
        assert before.replica_id not in {replica.replica_id for replica in client.list_replicas()}

        everything += server.all_processes()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SECONDS) == 0, server.log.read_text()
        deadline = time.monotonic() + 30
        while left := [process for process in everything if runs(process)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        assert not server.ready_file.exists()
        log = server.log.read_text()
        assert log.count("starting it again") == 2, log
        assert "Exception ignored" not in log


def refusal(model: Path, folder: Path, *more: str) -> str:
    """Output of a `qerld serve` that must end by itself, with status 2 and without a second try."""
    done = subprocess.run(command(model, folder, *more), capture_output=True, text=True, timeout=SECONDS, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "starting it again" not in output
    return done.stderr


def test_a_held_state_folder_is_refused_at_once(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    with FolderLock(tmp_path / "state", "state_dir", "qerld serve"):
        said = refusal(tiny_model[1], tmp_path)
    [line] = said.splitlines()
    assert line.startswith(
        f"qerld serve: state_dir: {tmp_path / 'state'} is in use by qerld serve, process {os.getpid()};"
    )


@pytest.mark.parametrize("flag", ["port", "openai-port", "learner-metrics-port", "policy-metrics-port"])
def test_a_taken_port_is_refused_at_once(flag: str, tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [line] = refusal(tiny_model[1], tmp_path, f"--{flag}", str(port)).splitlines()
    name = flag.replace("-", "_")
    assert line == (
        f"qerld serve: {name}: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "give another, 0 takes a free one"
    )
    assert not (tmp_path / "state" / "ready").exists()


def test_equal_ports_are_refused_at_once(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    same = ("--port", "18888", "--openai-port", "18888")  # refused before it matters whether it is free
    [line] = refusal(tiny_model[1], tmp_path, *same).splitlines()
    assert line.startswith("qerld serve: openai_port: must differ from port, both are 18888;")


def test_a_ready_file_that_cannot_be_written_is_refused_at_once(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [line] = refusal(tiny_model[1], tmp_path, "--ready-file", str(tmp_path / "file" / "ready.json")).splitlines()
    assert line.startswith("qerld serve: ready_file: ")


def test_a_setting_that_a_role_refuses_ends_all(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    said = refusal(tiny_model[1], tmp_path, "--learner", "lease=-1")
    assert said.startswith("qerld serve: learner ended with status 2 after ")
    assert "lease: Input should be greater than 0 (got '-1')" in said


def test_a_broken_model_ends_all(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    said = refusal(make_bad_model("truncated safetensors", tiny_model[1], tmp_path), tmp_path)
    assert "ended with status 2 after " in said.splitlines()[0]
    assert "model.safetensors" in said


@pytest.mark.parametrize("setting", ["port=1", "ready-file=x"])
def test_settings_that_follow_from_serve_are_refused(
    setting: str, tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    assert "follows from serve's own" in refusal(tiny_model[1], tmp_path, "--learner", setting)
