"""Ending a run in the store, inside the caller's transaction. Its rows and files stay; nothing goes on with them."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from ..records import GroupState, ReceiptState, RolloutState, RunState
from .rewards import Closed, set_receipts
from .rollouts import BUFFERED_STATES
from .runs import find_run, set_state
from .schema import batches, groups, rollouts
from .steps import ABANDONED, TRAINING

_OPEN_STATES = tuple(state.value for state in (GroupState.QUEUED, *BUFFERED_STATES, GroupState.BATCHED))
_OPEN_RECEIPTS = tuple(state.value for state in ReceiptState if not state.final)


def delete_run(connection: Connection, name: str, closed: Closed) -> list[str]:
    """Mark a run as deleted and cancel what is open in it; returns the groups that were.

    Raises `NotFoundError` for an unknown run.
    """
    find_run(connection, name)
    set_state(connection, name, RunState.DELETED, "deleted by a client")
    # A step in progress finds its batch gone when it commits, as after a rollback.
    training = update(batches).where(batches.c.run == name, batches.c.state == TRAINING)
    connection.execute(training.values(state=ABANDONED))
    return _cancel_open_groups(connection, name, "its run was deleted", closed)


def complete_run(connection: Connection, name: str, reason: str, closed: Closed) -> list[str]:
    """Mark a run as completed and cancel what is open in it, since nothing will train it; returns the groups that were.

    Its last version is live, so no batch is in training.
    """
    set_state(connection, name, RunState.COMPLETED, reason)
    return _cancel_open_groups(connection, name, "its run has completed", closed)


def _cancel_open_groups(connection: Connection, name: str, problem: str, closed: Closed) -> list[str]:
    open_groups = select(groups.c.group_id).where(groups.c.run == name, groups.c.state.in_(_OPEN_STATES))
    ids = list(connection.execute(open_groups).scalars())
    _cancel_rollouts(connection, name, problem, closed)
    connection.execute(
        update(groups)
        .where(groups.c.run == name, groups.c.state.in_(_OPEN_STATES))
        .values(state=GroupState.DROPPED.value)
    )
    return ids


def _cancel_rollouts(connection: Connection, name: str, problem: str, closed: Closed) -> None:
    of_open_groups = rollouts.c.group_id.in_(
        select(groups.c.group_id).where(groups.c.run == name, groups.c.state.in_(_OPEN_STATES))
    )
    open_rollouts = select(rollouts.c.rollout_id).where(of_open_groups, rollouts.c.receipt.in_(_OPEN_RECEIPTS))
    ids = list(connection.execute(open_rollouts).scalars())
    connection.execute(
        update(rollouts)
        .where(of_open_groups, rollouts.c.state == RolloutState.SAMPLING.value)
        .values(state=RolloutState.FAILED.value, problem=problem)
    )
    set_receipts(connection, dict.fromkeys(ids, ReceiptState.CANCELLED), closed)
