"""The learner's side of the trainer process (asyncio; no torch)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping

from .messages import (
    FRAME_HEADER,
    Event,
    Failure,
    Progress,
    Ready,
    Reply,
    Request,
    body_length,
    decode_event,
    encode_frame,
)

STOP_GRACE_SECONDS = 10.0


class TrainerDiedError(RuntimeError):
    """The trainer process ended in the middle of something; start it again and repeat the request."""


class TrainerFailure(RuntimeError):  # noqa: N818 - the contract's name: the request failed, the process did not
    """The trainer refused or failed a request; `kind` is the class name of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class TrainerProcess:
    """One child process, one request at a time. After `TrainerDiedError` or `stop`, `start` begins a fresh child."""

    def __init__(self, *, threads: int | None = 1, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables on top of this process's own.

        `threads`: OpenMP threads of the child, None for all cores. Beside a busy policy server on 2 cores, a step of
        SmolLM2 took 4.2 s with one and 42 s with two: every barrier waits for the thread that has no core.
        """
        self._environment = {**os.environ, **(environment or {})}
        if threads is not None:
            self._environment["OMP_NUM_THREADS"] = str(threads)
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The child's process id, or None when none runs."""
        return self._process.pid if self.running and self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether a child was started and has not been seen to end."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the child and wait until it is ready (it imports torch: seconds). Does nothing while one runs."""
        if self.running:
            return
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "qerld_learner.trainer",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
        )
        event = await self._receive(self._process)
        if not isinstance(event, Ready):
            await self._kill()
            raise TrainerDiedError(f"the trainer's first message was {type(event).__name__}, not Ready")

    async def call(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Reply:
        """Send one request and return its reply; concurrent calls wait their turn.

        Raises `TrainerFailure` when the trainer answers with a failure (it lives on) and `TrainerDiedError` when it
        ends or was not started. A cancelled call kills the child, since its answer would be taken for the next one's.
        """
        frame = encode_frame(request)
        async with self._lock:
            if self._process is None or not self.running:
                raise TrainerDiedError("the trainer is not running; call start() first")
            try:
                return await self._exchange(self._process, frame, on_progress)
            except TrainerFailure:
                raise
            except BaseException:
                await self._kill()
                raise

    async def stop(self) -> None:
        """End the child: SIGTERM, then SIGKILL after `STOP_GRACE_SECONDS`."""
        if self._process is None or not self.running:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_GRACE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            await self._kill()

    async def _exchange(
        self, process: asyncio.subprocess.Process, frame: bytes, on_progress: Callable[[Progress], None] | None
    ) -> Reply:
        await self._send(process, frame)
        while True:
            event = await self._receive(process)
            if isinstance(event, Progress):
                if on_progress is not None:
                    on_progress(event)
            elif isinstance(event, Failure):
                raise TrainerFailure(event.kind, event.message)
            elif isinstance(event, Ready):
                raise TrainerDiedError("the trainer said Ready in the middle of a request")
            else:
                return event

    async def _send(self, process: asyncio.subprocess.Process, frame: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(frame)
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise await self._death(process) from error

    async def _receive(self, process: asyncio.subprocess.Process) -> Event:
        assert process.stdout is not None
        try:
            header = await process.stdout.readexactly(FRAME_HEADER.size)
            return decode_event(await process.stdout.readexactly(body_length(header)))
        except (asyncio.IncompleteReadError, ConnectionResetError) as error:
            raise await self._death(process) from error

    async def _death(self, process: asyncio.subprocess.Process) -> TrainerDiedError:
        code = await process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return TrainerDiedError(f"the trainer process ended ({cause}); its stderr says why")

    async def _kill(self) -> None:
        if self._process is not None and self.running:
            self._process.kill()
            await self._process.wait()
