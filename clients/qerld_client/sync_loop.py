"""The loop of a reward author, with threads: see `Client.train`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from qerld.v1 import run_pb2

from qerld_client.errors import PreconditionError
from qerld_client.requests import PromptLike, Task, task
from qerld_client.sync_worker import score

if TYPE_CHECKING:
    from qerld_client.sync_client import Client
    from qerld_client.sync_worker import RewardFunction

Event = run_pb2.RunReport | Exception | None
"""A step's report, the error that ends the loop, or None when one of its threads is done."""


def train(
    client: Client, run: str, tasks: Iterable[Task | PromptLike], reward: RewardFunction, concurrency: int
) -> Iterator[run_pb2.RunReport]:
    """Yield reports while `concurrency` threads sample and score."""
    loop = _Loop(client, run, tasks, reward)
    yield from loop.reports(concurrency)


class _Loop:
    def __init__(self, client: Client, run: str, tasks: Iterable[Task | PromptLike], reward: RewardFunction) -> None:
        self._client, self._run, self._reward = client, run, reward
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def reports(self, concurrency: int) -> Iterator[run_pb2.RunReport]:
        # Before the state: a step that is taken but not live yet has no report so far, and may be the run's last.
        reported = self._client.get_policy(self._run).step
        if self._completed():
            return
        watch = self._client.watch_run(self._run, after_step=reported)
        watcher = threading.Thread(target=self._watch, args=(watch,), daemon=True)
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)]
        for thread in (watcher, *workers):
            thread.start()
        try:
            yield from self._take(len(workers))
        finally:
            self._stop.set()
            watch.close()
            watcher.join()

    def _take(self, working: int) -> Iterator[run_pb2.RunReport]:
        while working:
            event = self._events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                working -= 1
                continue
            yield event
            if event.state == run_pb2.RUN_STATE_COMPLETED:
                return

    def _watch(self, watch: Iterable[run_pb2.RunReport]) -> None:
        try:
            for report in watch:
                self._events.put(report)
        except Exception as error:
            self._events.put(error)

    def _work(self) -> None:
        """Take tasks until there are none or the loop stops; a completed run's last report ends the loop."""
        try:
            while not self._stop.is_set():
                with self._lock:
                    item = next(self._tasks, None)
                if item is None:
                    self._events.put(None)
                    return
                self._one(task(item))
        except Exception as error:
            # Nobody listens after the loop's end: the run may even be deleted by then.
            if not (self._stop.is_set() or (isinstance(error, PreconditionError) and self._completed())):
                self._events.put(error)

    def _completed(self) -> bool:
        return self._client.get_run(self._run).state == run_pb2.RUN_STATE_COMPLETED

    def _one(self, item: Task) -> None:
        group = self._client.sample(self._run, item.prompt, labels=item.labels)
        # Not strict: a group may be complete or stale by now, and its receipts say so.
        outcomes = [score(self._reward, rollout) for rollout in group.rollouts]
        self._client.submit_rewards(self._run, outcomes, strict=False)
