"""The supervisor with small real children: restarts, giving up, stopping, and being killed itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from qerld_service.supervise import ChildGaveUpError, ChildSpec, RestartPolicy, Supervisor

# Serves (writes its ready file) and starts a grandchild in its own process group, as the policy server does.
SERVER = """
import json, os, subprocess, sys, time
ready = sys.argv[1]
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(ready + ".part", "w") as file:
    json.dump({"pid": os.getpid(), "grandchild": grandchild.pid}, file)
os.rename(ready + ".part", ready)
print("serving", flush=True)
time.sleep(600)
"""
IGNORES_SIGTERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
QUICK = RestartPolicy(first_delay=0.05, quick_seconds=60, quick_deaths=3, stop_grace=1.0)

# A supervisor of its own, to be killed.
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from qerld_service.supervise import ChildSpec, RestartPolicy, Supervisor
ready = Path(sys.argv[1])
spec = ChildSpec("server", (sys.executable, "-c", sys.argv[2], str(ready)), ready)
asyncio.run(Supervisor([spec], RestartPolicy(stop_grace=1.0), lambda name, line: None).run())
"""


def spec_of(folder: Path, code: str, name: str = "server") -> ChildSpec:
    ready = folder / f"{name}.json"
    return ChildSpec(name, (sys.executable, "-c", code, str(ready)), ready)


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for (a zombie) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.05)


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def __contains__(self, text: str) -> bool:
        return any(text in line for _, line in self.lines)


async def test_a_killed_child_comes_back_and_its_grandchild_goes(tmp_path: Path) -> None:
    log = Log()
    supervisor = Supervisor([spec_of(tmp_path, SERVER)], QUICK, log)
    running = asyncio.create_task(supervisor.run())
    first = (await supervisor.all_ready())["server"]
    os.kill(first["pid"], signal.SIGKILL)
    await until(lambda: supervisor.children["server"].info["pid"] != first["pid"])
    second = (await supervisor.all_ready())["server"]
    await until(lambda: not alive(first["grandchild"]))
    assert "server was killed by SIGKILL" in log
    supervisor.stop()
    await running
    assert not alive(second["pid"])
    assert not alive(second["grandchild"])
    assert ("server", "serving") in log.lines


async def test_repeated_quick_deaths_end_loudly_and_stop_the_others(tmp_path: Path) -> None:
    bad = spec_of(tmp_path, "raise SystemExit('no such model folder')", "bad")
    good = spec_of(tmp_path, SERVER, "good")
    supervisor = Supervisor([bad, good], QUICK, Log())
    with pytest.raises(ChildGaveUpError, match="3 quick deaths in a row") as caught:
        await supervisor.run()
    assert "no such model folder" in str(caught.value)
    assert not caught.value.wrong_usage
    good_child = supervisor.children["good"].process
    assert good_child is not None
    assert not alive(good_child.pid)


async def test_wrong_usage_is_not_tried_again(tmp_path: Path) -> None:
    log = Log()
    supervisor = Supervisor([spec_of(tmp_path, "raise SystemExit(2)")], QUICK, log)
    with pytest.raises(ChildGaveUpError, match=r"status 2 .* no restart mends that") as caught:
        await supervisor.run()
    assert caught.value.wrong_usage
    assert "starting it again" not in log


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    log = Log()
    supervisor = Supervisor([spec_of(tmp_path, IGNORES_SIGTERM)], QUICK, log)
    running = asyncio.create_task(supervisor.run())
    info = (await supervisor.all_ready())["server"]
    supervisor.stop()
    await running
    assert not alive(info["pid"])
    assert not alive(info["grandchild"])
    assert "killing it" in log


async def test_long_lines_without_an_end_do_not_block_the_child(tmp_path: Path) -> None:
    code = "import sys\nsys.stdout.write('#' * (1 << 21) + '\\rdone')\nsys.stdout.flush()\n" + SERVER
    supervisor = Supervisor([spec_of(tmp_path, code)], QUICK, Log())
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(supervisor.all_ready(), 15)
    supervisor.stop()
    await running


@pytest.mark.parametrize("code", [SERVER, IGNORES_SIGTERM], ids=["obedient", "ignores SIGTERM"])
async def test_killing_the_supervisor_takes_all_down(tmp_path: Path, code: str) -> None:
    ready = tmp_path / "server.json"
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(ready), code])  # noqa: ASYNC220
    await until(ready.exists)
    info = json.loads(ready.read_text())
    supervisor.kill()
    supervisor.wait()
    await until(lambda: not alive(info["pid"]) and not alive(info["grandchild"]))


def test_delays_double_up_to_the_limit() -> None:
    policy = RestartPolicy(first_delay=1.0, max_delay=30.0)
    assert [policy.delay(deaths) for deaths in (1, 2, 3, 4, 5, 6, 20)] == [1, 2, 4, 8, 16, 30, 30]
