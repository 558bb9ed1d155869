"""`python -m qerld_learner.trainer`: the child that the learner talks to over stdin and stdout."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Take over the pipes, then load torch: whatever libraries print goes to stderr, never into a frame."""
    os.nice(5)  # The API answers first: a step takes seconds, a reward must be durable within milliseconds.
    requests = os.fdopen(os.dup(0), "rb")
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the learner decides
    from .worker import serve

    with contextlib.suppress(SystemExit):
        serve(requests, events)
    sys.stderr.flush()
    os._exit(0)  # taking torch and transformers down in order takes more than a second, and nothing is left to do


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """Unwind, so that a version being written aside is removed."""
    sys.exit(0)


if __name__ == "__main__":
    main()
