"""Leases: finished rollouts without an outcome, handed to reward workers under credits. They live in memory: after a
restart every rollout without an outcome is handed out again."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass

from .records import RolloutRecord


@dataclass(frozen=True)
class Lease:
    """A rollout handed to a worker, until `expires_at` (UNIX seconds)."""

    rollout: RolloutRecord
    expires_at: float


class LeaseBoard:
    """The rollouts of one run that await an outcome, and who has them."""

    def __init__(self) -> None:
        self._rollouts: dict[str, RolloutRecord] = {}
        self._free: OrderedDict[str, None] = OrderedDict()
        self._taken: dict[str, tuple[LeaseQueue, float]] = {}
        self._queues: list[LeaseQueue] = []
        self._timer: asyncio.TimerHandle | None = None

    def offer(self, rollout: RolloutRecord) -> None:
        """A rollout has finished (or was found without an outcome)."""
        if rollout.rollout_id not in self._rollouts:
            self._rollouts[rollout.rollout_id] = rollout
            self._free[rollout.rollout_id] = None
            self.hand_out()

    def settled(self, rollout_id: str) -> None:
        """A rollout has an outcome, or takes none any more."""
        self._rollouts.pop(rollout_id, None)
        self._free.pop(rollout_id, None)
        self._taken.pop(rollout_id, None)

    def join(self, worker: str, lease: float) -> LeaseQueue:
        """Add a worker."""
        queue = LeaseQueue(self, worker, lease)
        self._queues.append(queue)
        return queue

    def leave(self, queue: LeaseQueue) -> None:
        """Remove a worker; what it has goes to others."""
        if queue in self._queues:
            self._queues.remove(queue)
            self._give_back([rid for rid, (holder, _end) in self._taken.items() if holder is queue])

    def close(self) -> None:
        """End every worker's queue."""
        if self._timer is not None:
            self._timer.cancel()
        for queue in list(self._queues):
            queue.close()

    def _give_back(self, rollout_ids: list[str]) -> None:
        for rollout_id in reversed(rollout_ids):
            del self._taken[rollout_id]
            self._free[rollout_id] = None
            self._free.move_to_end(rollout_id, last=False)
        self.hand_out()

    def hand_out(self) -> None:
        """Give free rollouts to workers with credits, most credits first."""
        while self._free:
            queue = max(self._queues, key=lambda one: one.credits, default=None)
            if queue is None or queue.credits < 1:
                return
            rollout_id, _ = self._free.popitem(last=False)
            ends = time.time() + queue.lease
            self._taken[rollout_id] = (queue, ends)
            queue.push(Lease(self._rollouts[rollout_id], ends))
            self._watch_expiry()

    def _watch_expiry(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        first = min(end for _queue, end in self._taken.values())
        self._timer = asyncio.get_running_loop().call_later(max(0.0, first - time.time()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = time.time()
        self._give_back([rid for rid, (_queue, end) in self._taken.items() if end <= now])
        if self._taken:
            self._watch_expiry()


class LeaseQueue:
    """One worker's side: iterate to get leases, as many as there are credits."""

    def __init__(self, board: LeaseBoard, worker: str, lease: float) -> None:
        self.worker = worker
        self.lease = lease
        self.credits = 0
        self._board = board
        self._queue: asyncio.Queue[Lease | None] = asyncio.Queue()

    def add_credits(self, count: int) -> None:
        """Let `count` more rollouts be pushed."""
        self.credits += count
        self._board.hand_out()

    def push(self, lease: Lease) -> None:
        """Spend a credit on a lease; called by the board."""
        self.credits -= 1
        self._queue.put_nowait(lease)

    def __aiter__(self) -> LeaseQueue:
        return self

    async def __anext__(self) -> Lease:
        lease = await self._queue.get()
        if lease is None:
            raise StopAsyncIteration
        return lease

    def close(self) -> None:
        """Give back what has no outcome; iteration ends."""
        self._board.leave(self)
        self._queue.put_nowait(None)
