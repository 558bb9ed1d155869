"""Keeps child processes alive: own process groups, restarts with growing delays, a loud end when restarts do not help.

A child that ends is started again after a delay that doubles. A death is *quick* when the child never became ready or
had been ready for less than `quick_seconds`; after `quick_deaths` quick ones in a row, or at once on exit status 2
(wrong usage: a restart cannot help), `ChildGaveUpError` carries the last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerld_service.guard import kill_group

USAGE_ERROR = 2
PR_SET_PDEATHSIG = 1
READY_POLL_SECONDS = 0.1
PUMP_SECONDS = 2.0
CHUNK_BYTES = 1 << 16
Say = Callable[[str, str], None]


class ChildGaveUpError(RuntimeError):
    """A child died again and again, or at once of a wrong setting; the text holds the end of its log."""

    def __init__(self, text: str, *, wrong_usage: bool) -> None:
        super().__init__(text)
        self.wrong_usage = wrong_usage


@dataclass(frozen=True)
class RestartPolicy:
    """Delays in seconds between restarts, and when to give up."""

    first_delay: float = 1.0
    max_delay: float = 30.0
    quick_seconds: float = 60.0
    quick_deaths: int = 5
    # Between SIGTERM and SIGKILL; the policy server finishes what runs and the trainer its step within it.
    stop_grace: float = 20.0

    def delay(self, deaths: int) -> float:
        return float(min(self.first_delay * 2 ** max(0, deaths - 1), self.max_delay))


@dataclass(frozen=True)
class ChildSpec:
    """A command that writes `ready_file` (JSON) once it serves."""

    name: str
    command: tuple[str, ...]
    ready_file: Path
    env: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One supervised process; `ready` is set while its current incarnation serves."""

    def __init__(self, spec: ChildSpec, policy: RestartPolicy, guard: Guard, say: Say) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        # What the ready file says: ports.
        self.info: dict[str, Any] = {}
        self.process: asyncio.subprocess.Process | None = None
        self._policy, self._guard, self._say = policy, guard, say
        self._tail: deque[str] = deque(maxlen=30)

    async def keep_alive(self) -> None:
        """Run and restart until cancelled; raises ChildGaveUpError."""
        deaths = 0  # quick ones in a row
        while True:
            started = time.monotonic()
            code, ready_seconds = await self._run_once()
            deaths = deaths + 1 if ready_seconds < self._policy.quick_seconds else 0
            what = f"{describe_exit(code)} after {time.monotonic() - started:.0f} s"
            if code == USAGE_ERROR or deaths >= self._policy.quick_deaths:
                wrong_usage = code == USAGE_ERROR
                raise ChildGaveUpError(self._farewell(what, deaths, wrong_usage), wrong_usage=wrong_usage)
            delay = self._policy.delay(deaths)
            self._say("serve", f"{self.spec.name} {what}; starting it again in {delay:g} s")
            await asyncio.sleep(delay)

    async def _run_once(self) -> tuple[int, float]:
        """Run until the process ends; returns its exit status and how many seconds it had been ready."""
        self.spec.ready_file.unlink(missing_ok=True)
        process, output = await start_process(self.spec, self._guard)
        self.process = process
        watcher = asyncio.create_task(self._watch_ready())
        pump = asyncio.create_task(self._pump(output))
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            await self._stop(process)
            raise
        finally:
            kill_group(process.pid)
            self._guard.forget(process.pid)
            watcher.cancel()
            # A process that left the group may still hold the pipe; it is not waited for.
            await asyncio.wait({pump}, timeout=PUMP_SECONDS)
            pump.cancel()
            self.ready.clear()
        ready_at = await watcher if watcher.done() and not watcher.cancelled() else None
        return code, 0.0 if ready_at is None else time.monotonic() - ready_at

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._policy.stop_grace):
                await process.wait()
        except TimeoutError:
            self._say("serve", f"{self.spec.name} did not stop within {self._policy.stop_grace:g} s; killing it")

    async def _watch_ready(self) -> float:
        while not self.spec.ready_file.exists():  # noqa: ASYNC110 — a file, not an event
            await asyncio.sleep(READY_POLL_SECONDS)
        self.info = json.loads(self.spec.ready_file.read_text())
        self.ready.set()
        return time.monotonic()

    async def _pump(self, output: asyncio.StreamReader) -> None:
        rest = b""
        # In chunks, not by line: a progress bar is one endless line, and a full pipe would stop the child.
        while chunk := await output.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for raw in lines:
                self._log(raw)
            rest = rest[-CHUNK_BYTES:]  # of an endless line only its end is ever shown
        if rest:
            self._log(rest)

    def _log(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
        self._tail.append(line)
        self._say(self.spec.name, line)

    def _farewell(self, what: str, deaths: int, wrong_usage: bool) -> str:
        log = "\n".join(f"    {line}" for line in self._tail) or "    (it wrote nothing)"
        times = "no restart mends that" if wrong_usage else f"{deaths} quick deaths in a row"
        return f"{self.spec.name} {what}; giving up: {times}. The end of its log:\n{log}"


class Guard:
    """The process that ends our children should we be killed; see guard.py."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._process: asyncio.subprocess.Process | None = None
        self._writing = -1

    async def start(self) -> None:
        reading, self._writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "qerld_service.guard", str(self._grace), stdin=reading, start_new_session=True
            )
        finally:
            os.close(reading)

    def watch(self, pid: int) -> None:
        os.write(self._writing, f"+{pid}\n".encode())

    def forget(self, pid: int) -> None:
        os.write(self._writing, f"-{pid}\n".encode())

    async def stop(self) -> None:
        if self._process is not None:
            os.close(self._writing)
            await self._process.wait()


class Supervisor:
    """Runs children until `stop` is called or one of them cannot be kept alive."""

    def __init__(self, specs: list[ChildSpec], policy: RestartPolicy, say: Say) -> None:
        self._guard = Guard(policy.stop_grace)
        self.children = {spec.name: Child(spec, policy, self._guard, say) for spec in specs}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `run`; safe to call from a signal handler of the loop, and more than once."""
        self._stopping.set()

    async def run(self) -> None:
        """Return after `stop` and the end of all children; raises ChildGaveUpError after ending the others."""
        await self._guard.start()
        keepers = [asyncio.create_task(child.keep_alive()) for child in self.children.values()]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._guard.stop()
        for task in done - {stopping}:
            task.result()

    async def all_ready(self) -> dict[str, dict[str, Any]]:
        """Wait until every child serves; returns what each ready file says, by child."""
        await asyncio.gather(*(child.ready.wait() for child in self.children.values()))
        return {name: child.info for name, child in self.children.items()}


async def start_process(spec: ChildSpec, guard: Guard) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader]:
    """Start a child as the leader of its own session; returns it and its standard output and error in one stream.

    The pipe is ours: with asyncio's own, waiting for the child would also wait for grandchildren that hold its end.
    """
    supervisor = os.getpid()
    reading, writing = os.pipe()
    output = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb"))
    try:
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
            start_new_session=True,
            preexec_fn=lambda: enrol(supervisor, guard),
        )
    finally:
        os.close(writing)
    return process, output


def enrol(supervisor: int, guard: Guard) -> None:
    """In the child, before exec: the supervisor may be killed before it could tell the guard of us."""
    guard.watch(os.getpid())
    die_with(supervisor)


def die_with(parent: int) -> None:
    """In the child, before exec: ask the kernel for SIGTERM when the supervisor dies, however it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
