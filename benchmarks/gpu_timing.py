"""Time of one call on a GPU: CUDA graphs, buffers in turn so that none is in the cache, medians."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], object]
REPLAYS = 15
LEAST_CALLS = 8


def library(module: str) -> Any:
    """A module to compare with, where it is installed and there is a GPU; else None."""
    if not torch.cuda.is_available():
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def elapsed(call: Call) -> float:
    """Microseconds of one call, waiting for the device."""
    if not torch.cuda.is_available():  # to try a script
        begun = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begun)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def eager(call: Call, repeats: int = 7) -> float:
    """Median microseconds without a graph, after a warm-up: for calls that wait for the device in between."""
    elapsed(call)
    return statistics.median(elapsed(call) for _ in range(repeats))


def microseconds(calls: Sequence[Call]) -> float:
    """Median over replays of the mean time of a call. Each of `calls` does the same work on buffers of its own."""
    if not torch.cuda.is_available():
        return statistics.fmean(elapsed(call) for call in calls)
    rounds = -(-LEAST_CALLS // len(calls))
    for call in calls:  # compiles, tunes, fills pools
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return statistics.median(elapsed(graph.replay) for _ in range(REPLAYS)) / (rounds * len(calls))


def copies(bytes_each: int, most: int = 32) -> int:
    """How many buffers in turn exceed the cache three times."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 1
    return max(1, min(most, -(-3 * cache // bytes_each)))
