"""Sampling from an engine in tests: one prompt, and what it takes for two answers to be the same."""

from __future__ import annotations

import asyncio

import torch
from qerld_kernels.noise import Noise
from qerld_service.adapters import AdapterKey
from qerld_service.engine import PolicyEngine, Sampling

PROMPT = [5, 17, 300, 41, 9, 123, 88, 7, 250, 31, 64, 402, 12, 90, 77, 3, 210, 55, 19, 8]
SAMPLING = Sampling(max_tokens=24, n=4, seed=11)
NOISE = Noise(sigma=0.05, seed=2**63 + 5)

Completion = tuple[list[int], list[float], str | None]


async def begin(
    engine: PolicyEngine, key: AdapterKey, request_id: str, sampling: Sampling
) -> asyncio.Task[list[Completion]]:
    """Start to collect; returns when the first token has come, or the request has ended without any."""
    first = asyncio.Event()
    running = asyncio.create_task(collect(engine, key, request_id, sampling, first))
    running.add_done_callback(lambda _: first.set())
    await first.wait()
    return running


async def collect(
    engine: PolicyEngine, key: AdapterKey, request_id: str, sampling: Sampling, first: asyncio.Event | None = None
) -> list[Completion]:
    """All completions of PROMPT as (token ids, log-probabilities, finish reason)."""
    done: list[Completion] = [([], [], None) for _ in range(sampling.n)]
    async for delta in engine.generate(key, request_id, PROMPT, sampling):
        if first is not None:
            first.set()
        ids, logprobs, reason = done[delta.index]
        assert len(delta.token_ids) == len(delta.logprobs)
        done[delta.index] = (ids + delta.token_ids, logprobs + delta.logprobs, delta.finish_reason or reason)
    return done


def assert_same(got: list[Completion], expected: list[Completion]) -> None:
    """Equal tokens, and log-probabilities equal but for the last bits: fp32 products depend on a batch's shape."""
    assert [(ids, reason) for ids, _, reason in got] == [(ids, reason) for ids, _, reason in expected]
    for (_, ours, _), (_, theirs, _) in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=5e-6, rtol=0)


def key(version: int, *, noisy: bool = True, run: str = "engine-tests") -> AdapterKey:
    return AdapterKey(run, version, noisy)
