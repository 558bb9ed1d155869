"""Groups and rollouts in the store: each function works inside the caller's transaction."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, bindparam, case, func, insert, select, update

from ..errors import NotFoundError
from ..records import (
    FinishReason,
    GroupRecord,
    GroupState,
    PromptSpec,
    Receipt,
    ReceiptState,
    RolloutRecord,
    RolloutState,
    SamplingSpec,
    SpanRecord,
)
from . import rows
from .chunks import chunks
from .schema import groups, outcomes, rollouts

# States that fill a run's buffer; a queued group waits for room in it.
BUFFERED_STATES = (GroupState.SAMPLING, GroupState.AWAITING_REWARDS, GroupState.READY)


@dataclass(frozen=True)
class OpenGroup:
    """A group that is to be sampled, with the indices of the rollouts that are not finished."""

    group: GroupRecord
    prompt_ids: tuple[int, ...]
    sampling: SamplingSpec
    reward_deadline: float
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """What sampling made of one rollout; `problem` is "" unless it failed."""

    rollout_id: str
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[SpanRecord, ...] = ()
    finish_reason: FinishReason | None = None
    text: str = ""
    problem: str = ""
    turns: int = 1


def add_group(
    connection: Connection, run: str, prompt: PromptSpec, reward_deadline: float, version: int, state: GroupState
) -> str:
    """Store a group and its unsampled rollouts; returns its id."""
    group_id = uuid.uuid4().hex
    now = time.time()
    connection.execute(
        insert(groups),
        {
            "group_id": group_id,
            "run": run,
            "state": state.value,
            "prompt_ids": rows.pack_ids(prompt.prompt_ids),
            "group_size": prompt.group_size,
            "sampling": rows.dump(prompt.sampling),
            "labels": rows.dump(dict(prompt.labels)),
            "reward_deadline": prompt.reward_deadline or reward_deadline,
            "deadline": None,
            "version": version,
            "outcomes": 0,
            "created_at": now,
        },
    )
    ids = rows.rollout_ids(group_id, prompt.group_size)
    connection.execute(insert(rollouts), [_unsampled(run, group_id, i, name, now) for i, name in enumerate(ids)])
    return group_id


def _unsampled(run: str, group_id: str, position: int, rollout_id: str, now: float) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id,
        "group_id": group_id,
        "run": run,
        "position": position,
        "state": RolloutState.SAMPLING.value,
        "completion_ids": b"",
        "logprobs": b"",
        "tokens": 0,
        "turns": 1,
        "spans": "[]",
        "text": "",
        "problem": "",
        "receipt": ReceiptState.PENDING.value,
        "receipt_at": now,
    }


def begin_sampling(connection: Connection, group_id: str, version: int) -> None:
    """Move a queued group into the buffer, to be sampled by a version; or change the version of one that is there.

    Not one whose run has ended meanwhile.
    """
    not_sampled = groups.c.state.in_((GroupState.QUEUED.value, GroupState.SAMPLING.value))
    connection.execute(
        update(groups)
        .where(groups.c.group_id == group_id, not_sampled)
        .values(state=GroupState.SAMPLING.value, version=version)
    )


_STORE_SAMPLED = update(rollouts).where(
    rollouts.c.rollout_id == bindparam("of_id"), rollouts.c.state == RolloutState.SAMPLING.value
)


def store_sampled(connection: Connection, sampled: Sampled) -> bool:
    """Store a finished or failed rollout; returns whether it was the last of its group, which then awaits rewards."""
    now = time.time()
    failed = bool(sampled.problem)
    stored = connection.execute(
        _STORE_SAMPLED,
        {
            "of_id": sampled.rollout_id,
            "state": (RolloutState.FAILED if failed else RolloutState.FINISHED).value,
            "completion_ids": rows.pack_ids(sampled.completion_ids),
            "logprobs": rows.pack_floats(sampled.logprobs),
            "tokens": len(sampled.completion_ids),
            "turns": sampled.turns,
            "spans": rows.dump_spans(sampled.spans),
            "finish_reason": sampled.finish_reason.value if sampled.finish_reason else None,
            "text": sampled.text,
            "problem": sampled.problem,
            "finished_at": now,
            "receipt": (ReceiptState.FAILED if failed else ReceiptState.PENDING).value,
            "receipt_at": now,
        },
    )
    if not stored.rowcount:
        return False  # stored before, or cancelled with its run
    return _finish_group(connection, sampled.rollout_id.rsplit("-", 1)[0], sampled.spans, now)


def _finish_group(connection: Connection, group_id: str, spans: tuple[SpanRecord, ...], now: float) -> bool:
    left = connection.execute(
        select(func.count()).where(rollouts.c.group_id == group_id, rollouts.c.state == RolloutState.SAMPLING.value)
    ).scalar_one()
    made = [span.version for span in spans if not span.environment]
    values: dict[str, Any] = {}
    if made:
        # The group is as old as its oldest token.
        values["version"] = case((groups.c.version > min(made), min(made)), else_=groups.c.version)
    if not left:
        values |= {"state": GroupState.AWAITING_REWARDS.value, "deadline": now + groups.c.reward_deadline}
    if values:
        connection.execute(update(groups).where(groups.c.group_id == group_id).values(values))
    return not left


def _rollouts_query() -> Select[Any]:
    return select(
        rollouts,
        groups.c.prompt_ids,
        groups.c.labels,
        groups.c.deadline,
        groups.c.reward_deadline,
        groups.c.outcomes,
        groups.c.group_size,
    ).join(groups, groups.c.group_id == rollouts.c.group_id)


# Without tokens and prompt: receipts are read in the transactions that store rewards.
_RECEIPTS = select(
    rollouts.c.rollout_id,
    rollouts.c.group_id,
    rollouts.c.run,
    rollouts.c.receipt,
    rollouts.c.receipt_at,
    rollouts.c.step,
    rollouts.c.version,
    rollouts.c.advantage,
    rollouts.c.ratio,
    rollouts.c.clipped_share,
    groups.c.outcomes,
    groups.c.group_size,
).join(groups, groups.c.group_id == rollouts.c.group_id)


def _rows_of(connection: Connection, query: Select[Any], ids: Sequence[str]) -> Iterator[RowMapping]:
    for chunk in chunks(ids):
        yield from connection.execute(query.where(rollouts.c.rollout_id.in_(chunk))).mappings()


def find_rollouts(connection: Connection, ids: Sequence[str]) -> dict[str, RolloutRecord]:
    """Return the rollouts that exist, by id."""
    return {row["rollout_id"]: rows.rollout_record(row) for row in _rows_of(connection, _rollouts_query(), ids)}


def find_rollout(connection: Connection, rollout_id: str) -> RolloutRecord:
    """Return a rollout, or raise `NotFoundError`."""
    found = find_rollouts(connection, [rollout_id])
    if not found:
        raise NotFoundError(f"unknown rollout {rollout_id!r}; ListGroups lists the ids of a run's rollouts")
    return found[rollout_id]


def find_receipts(connection: Connection, ids: Sequence[str], run: str | None = None) -> dict[str, Receipt]:
    """Return the receipts of the rollouts that exist (of `run`, when one is named), by id."""
    found = _rows_of(connection, _RECEIPTS, ids)
    return {row["rollout_id"]: rows.receipt(row) for row in found if run is None or row["run"] == run}


def group_rollouts(connection: Connection, group_id: str) -> list[RolloutRecord]:
    """Return the rollouts of a group, by index."""
    query = _rollouts_query().where(rollouts.c.group_id == group_id).order_by(rollouts.c.position)
    return [rows.rollout_record(row) for row in connection.execute(query).mappings()]


def unscored_rollouts(connection: Connection, run: str) -> list[str]:
    """Return ids of finished rollouts of a run that await an outcome, oldest group first."""
    query = (
        select(rollouts.c.rollout_id)
        .join(groups, groups.c.group_id == rollouts.c.group_id)
        .outerjoin(outcomes, outcomes.c.rollout_id == rollouts.c.rollout_id)
        .where(
            groups.c.run == run,
            groups.c.state.in_([GroupState.SAMPLING, GroupState.AWAITING_REWARDS]),
            rollouts.c.state == RolloutState.FINISHED.value,
            outcomes.c.rollout_id.is_(None),
        )
        .order_by(groups.c.seq, rollouts.c.position)
    )
    return list(connection.execute(query).scalars())


def find_group(connection: Connection, group_id: str) -> GroupRecord:
    """Return a group, or raise `NotFoundError`."""
    row = connection.execute(select(groups).where(groups.c.group_id == group_id)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"unknown group {group_id!r}; ListGroups lists the groups of a run")
    return rows.group_record(row)


def page_of_groups(
    connection: Connection, run: str, state: GroupState | None, below: int | None, limit: int
) -> list[tuple[int, GroupRecord]]:
    """Return at most `limit` groups below a sequence number, newest first, with their numbers."""
    query = select(groups).where(groups.c.run == run).order_by(groups.c.seq.desc()).limit(limit)
    if state is not None:
        query = query.where(groups.c.state == state.value)
    if below is not None:
        query = query.where(groups.c.seq < below)
    return [(row["seq"], rows.group_record(row)) for row in connection.execute(query).mappings()]


def open_groups(connection: Connection, run: str, state: GroupState, limit: int | None = None) -> list[OpenGroup]:
    """Return groups of a run that are to be sampled, oldest first."""
    query = select(groups).where(groups.c.run == run, groups.c.state == state.value).order_by(groups.c.seq).limit(limit)
    return [_open_group(connection, row) for row in connection.execute(query).mappings().all()]


def find_open_group(connection: Connection, group_id: str) -> OpenGroup:
    """Return one group with what of it is not sampled yet."""
    query = select(groups).where(groups.c.group_id == group_id)
    return _open_group(connection, connection.execute(query).mappings().one())


def _open_group(connection: Connection, row: RowMapping) -> OpenGroup:
    query = (
        select(rollouts.c.position)
        .where(rollouts.c.group_id == row["group_id"], rollouts.c.state == RolloutState.SAMPLING.value)
        .order_by(rollouts.c.position)
    )
    return OpenGroup(
        group=rows.group_record(row),
        prompt_ids=rows.unpack_ids(row["prompt_ids"]),
        sampling=rows.sampling_spec(row["sampling"]),
        reward_deadline=row["reward_deadline"],
        missing=tuple(connection.execute(query).scalars()),
    )


def count_groups(connection: Connection, run: str) -> dict[GroupState, int]:
    """Return how many groups of a run are queued, sampled, awaiting rewards, ready or in training."""
    states = [GroupState.QUEUED, *BUFFERED_STATES, GroupState.BATCHED]
    query = (
        select(groups.c.state, func.count())
        .where(groups.c.run == run, groups.c.state.in_([state.value for state in states]))
        .group_by(groups.c.state)
    )
    found = {GroupState(state): count for state, count in connection.execute(query)}
    return {state: found.get(state, 0) for state in states}


def group_versions(connection: Connection, run: str, state: GroupState) -> set[int]:
    """Return the versions that made the groups in a state: a look into the index for each, however many groups."""
    found = [-1]
    wanted = {"of_run": run, "in_state": state.value}
    while (number := connection.execute(_NEXT_VERSION, {**wanted, "last": found[-1]}).scalar()) is not None:
        found.append(number)
    return set(found[1:])


_NEXT_VERSION = (
    select(groups.c.version)
    .where(
        groups.c.run == bindparam("of_run"),
        groups.c.state == bindparam("in_state"),
        groups.c.version > bindparam("last"),
    )
    .order_by(groups.c.version)
    .limit(1)
)


def groups_of(connection: Connection, run: str, state: GroupState, made_by: Collection[int]) -> list[str]:
    """Return the groups in a state that some versions made."""
    query = select(groups.c.group_id).where(
        groups.c.run == run, groups.c.state == state.value, groups.c.version.in_(made_by)
    )
    return list(connection.execute(query).scalars())


def count_queued(connection: Connection, run: str, at_most: int) -> int:
    """Return how many groups of a run are queued, counting no further than `at_most`."""
    some = select(groups.c.seq).where(groups.c.run == run, groups.c.state == GroupState.QUEUED.value).limit(at_most)
    return connection.execute(select(func.count()).select_from(some.subquery())).scalar_one()


def buffered_groups(connection: Connection, run: str) -> list[str]:
    """Return the groups that fill a run's buffer."""
    states = [state.value for state in BUFFERED_STATES]
    query = select(groups.c.group_id).where(groups.c.run == run, groups.c.state.in_(states))
    return list(connection.execute(query).scalars())


def newest_sampled_groups(connection: Connection, run: str, limit: int) -> list[str]:
    """Return the newest groups of a run whose rollouts are all finished or failed."""
    unsampled = [GroupState.QUEUED.value, GroupState.SAMPLING.value]
    query = select(groups.c.group_id).where(groups.c.run == run, groups.c.state.not_in(unsampled))
    return list(connection.execute(query.order_by(groups.c.seq.desc()).limit(limit)).scalars())
