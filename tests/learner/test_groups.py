"""The pure rules: when a group is ready, what its rollouts become, what an outcome is answered."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qerld_learner.groups import (
    Closing,
    Member,
    Verdict,
    closing_of,
    lag,
    least_group,
    receipts_on,
    rewards_of,
    verdict,
    would_be_advantages,
)
from qerld_learner.outcomes import MAX_REWARD, KnownRollout, canonical, judge_all
from qerld_learner.records import Answer, GroupState, Outcome, OutcomeKind, ReceiptState, RolloutState, RunConfig

REWARD = OutcomeKind.REWARD


def member(index: int, said: float | str | None) -> Member:
    """A number is a reward, "error" and "abstention" are those, "failed" is a failed rollout, None is no outcome."""
    name = f"r{index}"
    if said == "failed":
        return Member(name, RolloutState.FAILED)
    if isinstance(said, str):
        return Member(name, RolloutState.FINISHED, OutcomeKind(said))
    if said is None:
        return Member(name, RolloutState.FINISHED)
    return Member(name, RolloutState.FINISHED, REWARD, said)


SAID = st.one_of(st.floats(-10, 10), st.sampled_from(["failed", "error", "abstention"]), st.none())
GROUPS = st.lists(SAID, min_size=2, max_size=8).map(lambda said: [member(i, s) for i, s in enumerate(said)])


@given(GROUPS, st.one_of(st.none(), st.floats(0, 100)), st.floats(0, 100), st.booleans())
def test_verdict_and_receipts_hold_together(
    members: list[Member], deadline: float | None, now: float, drop: bool
) -> None:
    judged = verdict(members, deadline=deadline, now=now, closing=Closing(drop))
    rewards = rewards_of(members)
    complete = all(m.resolved for m in members)
    expired = deadline is not None and now >= deadline
    assert (judged is Verdict.WAIT) == (not complete and not expired)
    if judged is Verdict.READY:
        assert len(rewards) >= 2
        assert len(set(rewards)) > 1 or not drop
    if judged is Verdict.ZERO_VARIANCE:
        assert drop
        assert len(set(rewards)) == 1
    if judged is Verdict.EXPIRED:
        assert len(rewards) < 2
    receipts = receipts_on(judged, members)
    for m in members:
        own = m.state is RolloutState.FAILED or (m.kind is not None and m.reward is None)
        if own or judged is Verdict.WAIT:
            assert m.rollout_id not in receipts  # errors, abstentions and failures keep their own receipt
        elif judged is Verdict.READY:
            expected = ReceiptState.DROPPED_EXPIRED if m.reward is None else None
            assert receipts.get(m.rollout_id) == expected
        else:
            assert receipts[m.rollout_id].final


def test_an_error_is_never_a_zero() -> None:
    members = [member(0, 0.0), member(1, "error"), member(2, "failed"), member(3, 1.0)]
    assert rewards_of(members) == [0.0, 1.0]
    assert verdict(members, deadline=None, now=0, closing=Closing()) is Verdict.READY
    one = [member(0, 1.0), member(1, "error")]
    assert verdict(one, deadline=None, now=0, closing=Closing()) is Verdict.EXPIRED


@given(st.dictionaries(st.text("ab", min_size=1), st.floats(-100, 100), max_size=8))
def test_would_be_advantages_are_finite_and_centred(rewards: dict[str, float]) -> None:
    found = would_be_advantages(RunConfig(), rewards)
    assert (found == {}) == (len(rewards) < 2)
    assert all(math.isfinite(value) for value in found.values())
    assert sum(found.values()) == pytest.approx(0, abs=1e-6)


def test_a_group_of_equal_sums_has_a_signal_in_its_turns() -> None:
    def turns(index: int, *values: float) -> Member:
        return Member(f"r{index}", RolloutState.FINISHED, OutcomeKind.TURN_REWARDS, sum(values), values)

    early, late = turns(0, 1.0, 0.0), turns(1, 0.0, 1.0)
    assert verdict([early, late], deadline=None, now=0, closing=Closing()) is Verdict.READY
    equal = [turns(0, 1.0, 1.0), turns(1, 1.0, 1.0)]
    assert verdict(equal, deadline=None, now=0, closing=Closing()) is Verdict.ZERO_VARIANCE


def test_a_group_of_one_is_ready_only_where_the_batch_is_the_baseline() -> None:
    one = [member(0, 1.0)]
    batch = RunConfig(advantage="batch_norm", drop_zero_variance=False)
    assert verdict(one, deadline=None, now=0, closing=closing_of(batch)) is Verdict.READY
    assert verdict(one, deadline=None, now=0, closing=closing_of(RunConfig())) is Verdict.EXPIRED
    assert (least_group(batch), least_group(RunConfig())) == (1, 2)


@pytest.mark.parametrize(
    "config",
    [RunConfig(advantage="batch_norm"), RunConfig(overlong="penalty"), RunConfig(kl_in="reward", kl_coef=0.1)],
    ids=["batch", "overlong", "kl"],
)
def test_advantages_that_more_than_the_rewards_decide_are_not_foretold(config: RunConfig) -> None:
    assert would_be_advantages(config, {"a": 0.0, "b": 1.0}) == {}


@given(st.integers(0, 100), st.integers(0, 100))
def test_lag_is_never_negative(parent: int, made: int) -> None:
    assert lag(parent, made) == max(0, parent - made)


def known(rollout_id: str = "r", **changes: object) -> KnownRollout:
    wanted: dict[str, object] = {
        "rollout_id": rollout_id,
        "group_id": "g",
        "run": "run",
        "state": RolloutState.FINISHED,
        "tokens": 3,
        "turns": 2,
        "group_state": GroupState.AWAITING_REWARDS,
        "receipt": ReceiptState.PENDING,
        "deadline": 100.0,
        "stored": None,
    }
    return KnownRollout(**{**wanted, **changes})  # type: ignore[arg-type]


def judge(outcome: Outcome, rollout: KnownRollout | None, now: float = 50.0) -> tuple[Answer, list[tuple[str, str]]]:
    (judged,) = judge_all("run", [outcome], {} if rollout is None else {rollout.rollout_id: rollout}, now)
    return judged.answer, list(judged.problems)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_rejected(value: float) -> None:
    answer, problems = judge(Outcome("r", REWARD, (value,)), known())
    assert answer is Answer.REJECTED
    assert problems[0][0] == "outcomes[0].reward"
    assert str(value) in problems[0][1]


def test_values_that_are_too_large_together_are_rejected() -> None:
    answer, problems = judge(Outcome("r", OutcomeKind.TURN_REWARDS, (0.6 * MAX_REWARD, 0.6 * MAX_REWARD)), known())
    assert answer is Answer.REJECTED
    assert "sum" in problems[0][1]
    assert judge(Outcome("r", OutcomeKind.TURN_REWARDS, (MAX_REWARD, -MAX_REWARD)), known()) == (Answer.ACCEPTED, [])
    fading = (-MAX_REWARD, 0.6 * MAX_REWARD, 0.6 * MAX_REWARD)  # what the second token is credited with is the most
    answer, problems = judge(Outcome("r", OutcomeKind.TOKEN_REWARDS, fading), known())
    assert answer is Answer.REJECTED
    assert "the sum of its values from values[1] on" in problems[0][1]


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (OutcomeKind.TURN_REWARDS, (1.0,), "needs 2"),
        (OutcomeKind.TOKEN_REWARDS, (1.0, 2.0), "needs 3"),
        (REWARD, (), "needs 1"),
    ],
)
def test_a_wrong_number_of_values_is_rejected(kind: OutcomeKind, values: tuple[float, ...], wanted: str) -> None:
    answer, problems = judge(Outcome("r", kind, values), known())
    assert answer is Answer.REJECTED
    assert problems[0][0] == f"outcomes[0].{kind}"
    assert wanted in problems[0][1]


@pytest.mark.parametrize(
    ("rollout", "word"),
    [
        (None, "unknown"),
        (known(run="other"), "belongs to run 'other'"),
        (known(state=RolloutState.SAMPLING), "still being sampled"),
        (known(state=RolloutState.FAILED), "failed in sampling"),
        (known(deadline=49.0), "deadline"),
        (known(group_state=GroupState.TRAINED, receipt=ReceiptState.DROPPED_EXPIRED), "trained"),
    ],
)
def test_outcomes_that_come_to_nothing_say_why(rollout: KnownRollout | None, word: str) -> None:
    answer, problems = judge(Outcome("r", REWARD, (1.0,)), rollout)
    assert answer is Answer.REJECTED
    assert word in problems[0][1]


def test_an_outcome_for_a_stale_rollout_is_taken() -> None:
    stale = known(group_state=GroupState.DROPPED, receipt=ReceiptState.DROPPED_STALE)
    assert judge(Outcome("r", REWARD, (1.0,)), stale) == (Answer.ACCEPTED, [])


def test_twice_the_same_is_a_duplicate_and_twice_different_is_rejected() -> None:
    first, other = Outcome("r", REWARD, (1.0,)), Outcome("r", REWARD, (0.5,))
    assert judge(first, known(stored=canonical(first)))[0] is Answer.DUPLICATE
    answer, problems = judge(other, known(stored=canonical(first)))
    assert answer is Answer.REJECTED
    assert "1.0" in problems[0][1]
    judged = judge_all("run", [first, first, other], {"r": known()}, 50.0)
    assert [j.answer for j in judged] == [Answer.ACCEPTED, Answer.DUPLICATE, Answer.REJECTED]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4), st.text())
def test_canonical_texts_tell_outcomes_apart(values: list[float], detail: str) -> None:
    outcome = Outcome("r", OutcomeKind.TURN_REWARDS, tuple(values), detail)
    assert json.loads(canonical(outcome))[1] == values
    assert canonical(outcome) != canonical(Outcome("r", OutcomeKind.TURN_REWARDS, (*values, 1.0), detail))
