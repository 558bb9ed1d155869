"""Time of one call on a GPU: CUDA graphs, buffers in turn so that none is in the cache, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
REPLAYS = 15
LEAST_CALLS = 8


def microseconds(calls: Sequence[Call]) -> float:
    """Median over replays of the mean time of a call. Each of `calls` does the same work on buffers of its own."""
    rounds = -(-LEAST_CALLS // len(calls))
    if not torch.cuda.is_available():  # to try a script
        begun = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - begun) / len(calls)
    for call in calls:  # compiles, tunes, fills pools
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    taken = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1e3 * begin.elapsed_time(end) / (rounds * len(calls)))
    return statistics.median(taken)


def copies(bytes_each: int, most: int = 32) -> int:
    """How many buffers in turn exceed the cache three times."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 1
    return max(1, min(most, -(-3 * cache // bytes_each)))
