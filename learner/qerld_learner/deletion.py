"""DeleteRun: a run ends for good. Its slots are free at once; rows, files and the name stay."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from .sampler import Sampler
from .shared import Shared
from .store import deletion
from .store.requests import once
from .store.rewards import Closed
from .tasks import Tasks
from .versions import publish_desired

# Of each run, as `Learner` names them.
TASK_KINDS = ("loop", "queue", "leases")


class RunDeleter:
    """Ends runs in the store and then in memory."""

    def __init__(self, shared: Shared, sampler: Sampler, tasks: Tasks) -> None:
        self._shared, self._sampler, self._tasks = shared, sampler, tasks

    async def delete(self, name: str, request_id: str, body_hash: str) -> None:
        """See `Learner.delete_run`. Must not be cancelled: what is in memory of the run would stay."""
        open_groups: list[str] = []
        closed = Closed()

        def mutation(connection: Connection) -> bool:
            def end() -> None:
                open_groups.extend(deletion.delete_run(connection, name, closed))

            return once(connection, name, request_id, body_hash, end)[1]

        repeated = await self._shared.store.write(mutation)
        if not repeated:
            await self._let_go(name, open_groups, closed)

    async def _let_go(self, name: str, open_groups: Sequence[str], closed: Closed) -> None:
        # A step of it that is in the trainer dies with the trainer, which starts again: nothing waits for its result.
        await self._tasks.cancel([f"{kind}-{name}" for kind in TASK_KINDS])
        await self._sampler.cancel(open_groups)
        # Out of the buffer: whoever waits for room in it goes on and finds the run gone.
        self._shared.batched(name, open_groups)
        self._shared.publish(name, closed)
        self._shared.forget(name)
        await publish_desired(self._shared)
