"""Queries by more ids than one statement takes: SQLite's limit is 32,766 values."""

from __future__ import annotations

import pytest
from qerld_learner.core import Learner
from qerld_learner.groups import Closing
from qerld_learner.records import GroupState
from qerld_learner.store import rewards, rollouts, runs, steps
from qerld_learner.store.chunks import chunks
from sqlalchemy import Connection

from .conftest import imported, new_run

MANY = 70_000


def test_chunks_keep_order_and_leave_nothing_out() -> None:
    assert list(chunks(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(chunks([], 3)) == []


@pytest.mark.parametrize("place", [0, MANY])
async def test_one_id_is_found_among_many(learner: Learner, place: int) -> None:
    run = await new_run(learner)
    group = await imported(learner, run)
    others = [f"no-such-{number}" for number in range(MANY)]
    groups = [*others[:place], group.group_id, *others[place:]]
    ids = [*others[:place], group.rollout_ids[0], *others[place:]]

    def look(connection: Connection) -> None:
        assert set(rollouts.find_receipts(connection, ids)) == {group.rollout_ids[0]}
        assert set(rollouts.find_receipts(connection, ids, "another run")) == set()
        assert set(rollouts.find_rollouts(connection, ids)) == {group.rollout_ids[0]}
        assert [len(members) for members in rewards.members_of(connection, groups).values()] == [4]
        rewards.close_groups(connection, groups, Closing(), rewards.Closed())
        steps._set_groups(connection, groups, GroupState.READY)
        runs.forget_folders(connection, run, list(range(1, MANY)))

    await learner._shared.store.write(look)
    assert (await learner.list_groups(run, GroupState.READY, 0, ""))[0][0].group_id == group.group_id
