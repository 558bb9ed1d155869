"""The judge: answers are compared in a process of its own, since algebra may take for ever and cannot be interrupted.

math-verify's own time limits are signals, which work in a main thread only and not inside one long operation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from importlib.util import find_spec
from types import TracebackType
from typing import Self

SECONDS = 20.0
"""More than math-verify's own limits together; a process that takes longer hangs."""
START_SECONDS = 120.0
"""Of the first answer: sympy is imported then, in seconds; on a busy machine in more."""


class Judge:
    """Says whether completions are right. Use it from one thread at a time, as a context manager or `close` it.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        if find_spec("math_verify") is None:
            raise ModuleNotFoundError("answers are compared by math-verify; install it with pip install 'qerld[eval]'")
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._warm = False

    def right(self, text: str, reference: str, *, cut_off: bool = False) -> bool | None:
        """Return what `answers.is_right` says, None when it could not say so in time."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._seconds if self._warm else max(START_SECONDS, self._seconds), process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps([text, reference, cut_off]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line.endswith("\n"):
            self.close()
            return None
        self._warm = True
        verdict: bool | None = json.loads(line)
        return verdict

    def close(self) -> None:
        """End the process; the next answer starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._warm = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "qerld_eval.judge_process"]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
        )
