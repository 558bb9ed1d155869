"""The loop of a reward author, with asyncio tasks: see `AsyncClient.train`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from qerld.v1 import run_pb2

from qerld_client.aio_worker import score
from qerld_client.errors import PreconditionError
from qerld_client.requests import PromptLike, Task, task

if TYPE_CHECKING:
    from qerld_client.aio_client import AsyncClient
    from qerld_client.aio_worker import AsyncRewardFunction

Event = run_pb2.RunReport | Exception | None
"""A step's report, the error that ends the loop, or None when one of its tasks is done."""


async def train(
    client: AsyncClient, run: str, tasks: Iterable[Task | PromptLike], reward: AsyncRewardFunction, concurrency: int
) -> AsyncIterator[run_pb2.RunReport]:
    """Yield reports while `concurrency` asyncio tasks sample and score."""
    # Before the state: a step that is taken but not live yet has no report so far, and may be the run's last.
    reported = (await client.get_policy(run)).step
    if await _completed(client, run):
        return
    events: asyncio.Queue[Event] = asyncio.Queue()
    source = iter(tasks)
    work = [
        _watch(client, run, reported, events),
        *(_work(client, run, source, reward, events) for _ in range(concurrency)),
    ]
    running = [asyncio.create_task(item) for item in work]
    try:
        working = concurrency
        while working:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                working -= 1
                continue
            yield event
            if event.state == run_pb2.RUN_STATE_COMPLETED:
                return
    finally:
        for item in running:
            item.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _watch(client: AsyncClient, run: str, step: int, events: asyncio.Queue[Event]) -> None:
    try:
        async for report in client.watch_run(run, after_step=step):
            events.put_nowait(report)
    except Exception as error:
        events.put_nowait(error)


async def _work(
    client: AsyncClient,
    run: str,
    tasks: Iterable[Task | PromptLike],
    reward: AsyncRewardFunction,
    events: asyncio.Queue[Event],
) -> None:
    """Take tasks until there are none; when the run is completed its last report ends the loop."""
    try:
        for item in map(task, tasks):
            group = await client.sample(run, item.prompt, labels=item.labels)
            outcomes = await asyncio.gather(*(score(reward, rollout) for rollout in group.rollouts))
            # Not strict: a group may be complete or stale by now, and its receipts say so.
            await client.submit_rewards(run, outcomes, strict=False)
        events.put_nowait(None)
    except Exception as error:
        completed = isinstance(error, PreconditionError) and await _completed(client, run)
        if not completed:
            events.put_nowait(error)


async def _completed(client: AsyncClient, run: str) -> bool:
    return (await client.get_run(run)).state == run_pb2.RUN_STATE_COMPLETED
