"""Work beside a loop that must not wait: a thread that rests, since the two share Python's lock and the memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["resting"]

_BURST_SECONDS = 0.0005  # a step of a small model on a GPU takes 4 ms


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Make this thread sleep, after each burst of the block, for three times the processor time that it used.

    Python calls a profile function at each call and return, in its own thread alone: so the libraries that the block
    calls rest, too. One call into C is not interrupted. A thread that has a profile function already, a profiler's,
    keeps it and does not rest.
    """
    if sys.getprofile() is not None:
        yield
        return
    begun = time.thread_time()

    def rest(_frame: FrameType, _event: str, _arg: object) -> None:
        nonlocal begun
        used = time.thread_time() - begun
        if used > _BURST_SECONDS:
            time.sleep(3 * used)
            begun = time.thread_time()

    sys.setprofile(rest)
    try:
        yield
    finally:
        sys.setprofile(None)
