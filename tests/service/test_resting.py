"""Work that rests beside a loop. Sleep never ends early, so the bounds hold on any machine."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from qerld_service.resting import resting


def compute(seconds: float) -> float:
    """Use the processor in this thread; returns the time that went by."""
    begun, end = time.perf_counter(), time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return time.perf_counter() - begun


def test_a_block_sleeps_for_three_times_what_it_computes() -> None:
    with resting():
        assert compute(0.05) > 0.05 + 2 * 0.05  # a part of the profile function's own time is not counted


def test_a_profiler_keeps_its_place() -> None:
    def profile(*_: object) -> None:
        """A profiler's."""

    sys.setprofile(profile)
    try:
        with resting():
            pass
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    with resting():
        with resting():
            pass
        assert compute(0.05) > 0.05 + 2 * 0.05, "a block inside another does not end its rests"


def test_only_the_block_rests() -> None:
    profiles: list[object] = []
    with resting():
        other = threading.Thread(target=lambda: profiles.append(sys.getprofile()))
        other.start()
        other.join()
    with pytest.raises(ZeroDivisionError), resting():
        _ = 1 / 0
    assert [*profiles, sys.getprofile()] == [None, None]
