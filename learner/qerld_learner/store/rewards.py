"""Outcomes in the store, and groups that they (or the clock) close. Each works inside the caller's transaction."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, RowMapping, bindparam, case, insert, select, update

from ..groups import Closing, Member, Verdict, receipts_on, verdict
from ..outcomes import Judgement, KnownRollout, judge_all, receipt_of, values_of
from ..records import (
    Answer,
    GroupState,
    Outcome,
    OutcomeAnswer,
    OutcomeKind,
    Receipt,
    ReceiptState,
    RolloutState,
)
from .chunks import chunks
from .requests import once
from .rollouts import find_receipts
from .schema import groups, outcomes, rollouts, runs


@dataclass
class Closed:
    """What a transaction closed: verdicts by group id and the receipts that became final."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)


_KNOWN = (
    select(
        rollouts.c.rollout_id,
        rollouts.c.group_id,
        rollouts.c.run,
        rollouts.c.state,
        rollouts.c.tokens,
        rollouts.c.turns,
        rollouts.c.receipt,
        groups.c.state.label("group_state"),
        groups.c.deadline,
        outcomes.c.body,
    )
    .join(groups, groups.c.group_id == rollouts.c.group_id)
    .outerjoin(outcomes, outcomes.c.rollout_id == rollouts.c.rollout_id)
    .where(rollouts.c.rollout_id.in_(bindparam("ids", expanding=True)))
)
_SET_RECEIPT = (
    update(rollouts)
    .where(rollouts.c.rollout_id == bindparam("of_id"))
    .values(receipt=bindparam("new_receipt"), receipt_at=bindparam("now"))
)
_COUNT_OUTCOMES = (
    update(groups).where(groups.c.group_id == bindparam("of_id")).values(outcomes=groups.c.outcomes + bindparam("more"))
)
_BY_STEP = (OutcomeKind.TURN_REWARDS.value, OutcomeKind.TOKEN_REWARDS.value)
_MEMBERS = (
    select(
        rollouts.c.group_id,
        rollouts.c.rollout_id,
        rollouts.c.state,
        outcomes.c.kind,
        outcomes.c.reward,
        case((outcomes.c.kind.in_(_BY_STEP), outcomes.c.body)).label("body"),
    )
    .outerjoin(outcomes, outcomes.c.rollout_id == rollouts.c.rollout_id)
    .where(rollouts.c.group_id.in_(bindparam("ids", expanding=True)))
    .order_by(rollouts.c.group_id, rollouts.c.position)
)
_DEADLINES = select(groups.c.group_id, groups.c.deadline, groups.c.state).where(
    groups.c.group_id.in_(bindparam("ids", expanding=True))
)
_SET_GROUP_STATE = update(groups).where(groups.c.group_id == bindparam("of_id")).values(state=bindparam("new_state"))
_INSERT_OUTCOME = insert(outcomes)
_COUNT_EQUAL = (
    update(runs)
    .where(runs.c.name == select(groups.c.run).where(groups.c.group_id == bindparam("of_id")).scalar_subquery())
    .values(zero_variance=runs.c.zero_variance + 1)
)


def judge_against_store(connection: Connection, run: str, said: Sequence[Outcome], now: float) -> list[Judgement]:
    """Judge outcomes against what is stored; stores nothing."""
    known = {
        row["rollout_id"]: _known(row)
        for ids in chunks({outcome.rollout_id for outcome in said})
        for row in connection.execute(_KNOWN, {"ids": ids}).mappings()
    }
    return judge_all(run, said, known, now)


def _known(row: RowMapping) -> KnownRollout:
    values = dict(row)
    stored = values.pop("body")
    values["state"] = RolloutState(values["state"])
    values["group_state"] = GroupState(values["group_state"])
    values["receipt"] = ReceiptState(values["receipt"])
    return KnownRollout(**values, stored=stored)


def submit(
    connection: Connection, run: str, request_id: str, body_hash: str, said: Sequence[Outcome], closing: Closing
) -> tuple[list[OutcomeAnswer], Closed, bool]:
    """Store a message of outcomes; returns the answers, what they closed, and whether it is a repeated request."""
    closed = Closed()

    def make() -> list[list[str]]:
        judgements = judge_against_store(connection, run, said, time.time())
        accepted = [judged for judged in judgements if judged.answer is Answer.ACCEPTED]
        if accepted:
            _store(connection, accepted, closed)
            touched = {j.known.group_id for j in accepted if j.known is not None and not j.late}
            close_groups(connection, touched, closing, closed)
        return [
            [j.outcome.rollout_id, j.answer.value, *(j.problems[0] if j.problems else ("", ""))] for j in judgements
        ]

    answers, repeated = once(connection, run, request_id, body_hash, make)
    return (
        [OutcomeAnswer(rid, Answer(answer), path, problem) for rid, answer, path, problem in answers],
        closed,
        repeated,
    )


def _store(connection: Connection, accepted: Sequence[Judgement], closed: Closed) -> None:
    now = time.time()
    connection.execute(_INSERT_OUTCOME, [_outcome_row(judged, now) for judged in accepted])
    in_time = [judged for judged in accepted if not judged.late]
    if not in_time:
        return
    counts: dict[str, int] = {}
    receipts: dict[str, ReceiptState] = {}
    for judged in in_time:
        assert judged.known is not None
        counts[judged.known.group_id] = counts.get(judged.known.group_id, 0) + 1
        receipts[judged.outcome.rollout_id] = receipt_of(judged.outcome.kind)
    connection.execute(_COUNT_OUTCOMES, [{"of_id": group, "more": more} for group, more in counts.items()])
    set_receipts(connection, receipts, closed)


def _outcome_row(judged: Judgement, now: float) -> dict[str, object]:
    outcome = judged.outcome
    return {
        "rollout_id": outcome.rollout_id,
        "kind": outcome.kind.value,
        "reward": outcome.reward if outcome.values else None,
        "body": judged.body,
        "at": now,
    }


def set_receipts(connection: Connection, states: Mapping[str, ReceiptState], closed: Closed) -> None:
    """Move rollouts to receipt states and note those that became final."""
    if not states:
        return
    now = time.time()
    connection.execute(
        _SET_RECEIPT, [{"of_id": rid, "new_receipt": state.value, "now": now} for rid, state in states.items()]
    )
    final = [rollout_id for rollout_id, state in states.items() if state.final]
    if final:
        closed.receipts.extend(find_receipts(connection, final).values())


def close_groups(
    connection: Connection, group_ids: Iterable[str], closing: Closing, closed: Closed, now: float | None = None
) -> None:
    """Judge sampled groups and move them on: ready, or dropped with the receipts that say why."""
    now = time.time() if now is None else now
    found = (row for ids in chunks(group_ids) for row in connection.execute(_DEADLINES, {"ids": ids}))
    deadlines = {row.group_id: row.deadline for row in found if row.state == GroupState.AWAITING_REWARDS}
    if not deadlines:
        return
    for group_id, members in members_of(connection, deadlines).items():
        judged = verdict(members, deadline=deadlines[group_id], now=now, closing=closing)
        if judged is not Verdict.WAIT:
            close_group(connection, group_id, members, judged, closed)


def close_group(
    connection: Connection, group_id: str, members: Sequence[Member], judged: Verdict, closed: Closed
) -> None:
    """Apply a verdict to one group."""
    state = GroupState.READY if judged is Verdict.READY else GroupState.DROPPED
    connection.execute(_SET_GROUP_STATE, {"of_id": group_id, "new_state": state.value})
    if judged is Verdict.ZERO_VARIANCE:
        connection.execute(_COUNT_EQUAL, {"of_id": group_id})
    set_receipts(connection, receipts_on(judged, members), closed)
    closed.verdicts[group_id] = judged


def members_of(connection: Connection, group_ids: Iterable[str]) -> dict[str, list[Member]]:
    """Return the members of groups by group id, by index."""
    members: dict[str, list[Member]] = {}
    for row in (row for ids in chunks(group_ids) for row in connection.execute(_MEMBERS, {"ids": ids})):
        kind = OutcomeKind(row.kind) if row.kind else None
        values = values_of(row.body) if row.body else ()
        member = Member(row.rollout_id, RolloutState(row.state), kind, row.reward, values)
        members.setdefault(row.group_id, []).append(member)
    return members


def overdue_groups(connection: Connection, limit: int) -> list[tuple[str, str]]:
    """Return (run, group id) of at most `limit` groups whose reward deadline has passed, longest ago first."""
    query = (
        select(groups.c.run, groups.c.group_id)
        .where(groups.c.state == GroupState.AWAITING_REWARDS.value, groups.c.deadline <= time.time())
        .order_by(groups.c.deadline)
        .limit(limit)
    )
    return [(row.run, row.group_id) for row in connection.execute(query)]


def dry_run(
    connection: Connection, run: str, said: Sequence[Outcome]
) -> tuple[list[Judgement], dict[str, dict[str, float]]]:
    """Judge outcomes without storing them; also returns the rewards that their groups would then have.

    Groups with rewards by turn or token, whose advantages differ from token to token, are left out.
    """
    judged = judge_against_store(connection, run, said, time.time())
    touched = {one.known.group_id for one in judged if one.known is not None}
    members = members_of(connection, touched)
    would_be = {g: {m.rollout_id: m.reward for m in found if m.reward is not None} for g, found in members.items()}
    by_step = {group for group, found in members.items() if any(m.values for m in found)}
    for one in judged:
        if one.answer is Answer.ACCEPTED and one.known is not None and one.outcome.values:
            would_be[one.known.group_id][one.outcome.rollout_id] = one.outcome.reward
            if one.outcome.kind is not OutcomeKind.REWARD:
                by_step.add(one.known.group_id)
    return judged, {group: found for group, found in would_be.items() if group not in by_step}


def rewarded_members(connection: Connection, group_ids: Iterable[str]) -> dict[str, list[Member]]:
    """Return the members of groups that have a reward, by group id, by index."""
    found = members_of(connection, group_ids)
    return {group: [member for member in members if member.reward is not None] for group, members in found.items()}


def closed_by_training(connection: Connection, rollout_ids: Sequence[str]) -> Closed:
    """Return the final receipts of rollouts that were just trained."""
    return Closed(receipts=list(find_receipts(connection, rollout_ids).values()))
