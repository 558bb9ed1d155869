"""The processes of the quickstart: `qerld serve` and the reward client, each with a log file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerld_service.supervise import die_with

START_SECONDS = 600.0  # on a GPU vLLM compiles and captures graphs: 150 s on an H200
STOP_SECONDS = 45.0
POLL_SECONDS = 0.2
TAIL_LINES = 25


class QuickstartError(RuntimeError):
    """Something that the quickstart needs did not work; the text says what and shows the log."""


class LoggedProcess:
    """A child whose output goes to a file; it ends with us, however we end."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.log = name, log
        parent = os.getpid()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )

    def check(self) -> None:
        """Raise QuickstartError when the process has failed."""
        code = self.process.poll()
        if code not in (None, 0):
            raise QuickstartError(f"{self.name} ended with status {code}\n{self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return f"the end of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


@contextmanager
def serving(command: Sequence[str], log: Path, ready_file: Path) -> Iterator[tuple[LoggedProcess, dict[str, Any]]]:
    """Run `qerld serve`; yields it and its ready information. Raises QuickstartError when it does not come up."""
    ready_file.unlink(missing_ok=True)
    server = LoggedProcess("qerld serve", command, log)
    try:
        yield server, wait_ready(server, ready_file)
    finally:
        server.stop()


def wait_ready(server: LoggedProcess, ready_file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_SECONDS
    while not ready_file.exists():
        server.check()
        if time.monotonic() > deadline:
            raise QuickstartError(f"{server.name} was not ready after {START_SECONDS:.0f} s\n{server.tail()}")
        time.sleep(POLL_SECONDS)
    info: dict[str, Any] = json.loads(ready_file.read_text())
    return info


@contextmanager
def rewarding(target: str, run: str, task: str, seed: int, in_flight: int, log: Path) -> Iterator[LoggedProcess]:
    """Run the reward client in its own process."""
    command = [sys.executable, "-m", "qerld_service.quickstart.client", "--target", target, "--run", run]
    command += ["--task", task, "--seed", str(seed), "--in-flight", str(in_flight)]
    client = LoggedProcess("the reward client", command, log)
    try:
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.stop()
