"""Advantages recomputed in NumPy, rewards by step, and the groups that used to give NaN."""

from __future__ import annotations

import numpy as np
import pytest
from qerld_learner.trainer.advantages import (
    OF_BATCHES,
    OF_GROUPS,
    AdvantageError,
    Scored,
    advantages_of,
    token_advantages,
)
from qerld_learner.trainer.algorithm import NAMES
from qerld_learner.trainer.messages import AlgorithmConfig, Rollout
from qerld_learner.trainer.shaping import scored, soft_overlong


def outcome(reward: float, tokens: int = 3) -> Scored:
    return Scored(np.array([reward]), np.array([tokens]), tokens)


def test_the_api_knows_every_estimator() -> None:
    assert set(NAMES["advantage"]) == set(OF_GROUPS) | set(OF_BATCHES)


def test_group_norm_by_hand() -> None:
    rewards = [0.0, 1.0, 0.5, 3.0]
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    np.testing.assert_allclose(advantages_of("group_norm", rewards), [(r - mean) / (std + 1e-6) for r in rewards])


def test_mean_only_by_hand() -> None:
    np.testing.assert_allclose(advantages_of("mean_only", [1.0, 2.0, 6.0]), [-2.0, -1.0, 3.0])


def test_leave_one_out_by_hand() -> None:
    np.testing.assert_allclose(advantages_of("leave_one_out", [1.0, 2.0, 6.0]), [-3.0, -1.5, 4.5])


def test_batch_norm_counts_every_token_of_every_group() -> None:
    rewards, lengths = [0.0, 1.0, 1.0, 4.0], [1, 4, 2, 3]
    groups = [[outcome(r, n)] for r, n in zip(rewards, lengths, strict=True)]
    tokens = np.repeat(rewards, lengths)
    found = np.concatenate(token_advantages("batch_norm", groups))
    np.testing.assert_allclose(found, (tokens - tokens.mean()) / (tokens.std() + 1e-6))


@pytest.mark.parametrize("name", sorted(OF_GROUPS))
def test_one_reward_a_rollout_is_the_same_advantage_at_each_of_its_tokens(name: str) -> None:
    rewards, lengths = [0.0, 1.0, 0.5], [1, 4, 2]
    groups = [[outcome(r, n) for r, n in zip(rewards, lengths, strict=True)]]
    found = token_advantages(name, groups)
    for tokens, value, length in zip(found, advantages_of(name, rewards), lengths, strict=True):
        assert tokens.tolist() == [value] * length


def test_steps_credit_the_tokens_before_their_ends() -> None:
    """GRPO's process supervision (arXiv 2402.03300, section 4.1.3), by hand."""
    first = Scored(np.array([1.0, 0.0]), np.array([2, 3]), 3)
    second = Scored(np.array([4.0]), np.array([2]), 2)
    r = np.array([1.0, 0.0, 4.0])
    a, b, c = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
    found = token_advantages("group_norm", [[first, second]])
    np.testing.assert_allclose(found[0], [a + b, a + b, b])
    np.testing.assert_allclose(found[1], [c, c])


def test_leave_one_out_with_steps_takes_the_others_mean_step() -> None:
    first = Scored(np.array([1.0, 0.0]), np.array([1, 2]), 2)
    second = Scored(np.array([4.0, 2.0, 0.0]), np.array([1, 2, 3]), 3)
    found = token_advantages("leave_one_out", [[first, second]])
    np.testing.assert_allclose(found[0], [(1 - 2) + (0 - 2), 0 - 2])
    np.testing.assert_allclose(found[1], [3.5 + 1.5 - 0.5, 1.5 - 0.5, -0.5])


def test_batch_norm_normalises_the_returns_of_steps() -> None:
    found = token_advantages("batch_norm", [[Scored(np.array([1.0, 2.0]), np.array([1, 3]), 3)]])
    returns = np.array([3.0, 2.0, 2.0])
    np.testing.assert_allclose(found[0], (returns - returns.mean()) / (returns.std() + 1e-6))


@pytest.mark.parametrize("name", sorted(OF_GROUPS))
@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 8, [1e30] * 3, [0.0, 0.0]])
def test_no_signal_is_exactly_zero(name: str, rewards: list[float]) -> None:
    assert advantages_of(name, rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(NAMES["advantage"]))
def test_no_signal_in_steps_is_exactly_zero(name: str) -> None:
    alone = Scored(np.array([1.0, 0.0]), np.array([1, 2]), 2)
    if name in OF_GROUPS:
        assert token_advantages(name, [[alone]])[0].tolist() == [0.0, 0.0]
    equal = [[outcome(0.1), outcome(0.1)], [outcome(0.1, 1)]]
    assert all(not tokens.any() for tokens in token_advantages(name, equal))


@pytest.mark.parametrize("name", sorted(NAMES["advantage"]))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(AdvantageError, match=r"reward 1 .*finite"):
        token_advantages(name, [[outcome(0.0), outcome(bad)]])


def test_empty_group_and_unknown_estimator_are_refused() -> None:
    with pytest.raises(AdvantageError, match="at least one reward"):
        advantages_of("group_norm", [])
    with pytest.raises(AdvantageError, match=r"\['group_norm', 'leave_one_out', 'mean_only'\], got 'gae'"):
        advantages_of("gae", [1.0])


# From what is said of a rollout to its steps


def rollout(length: int, steps: list[tuple[int, float]] | None, trainable: list[bool] | None = None) -> Rollout:
    return Rollout("r", [1] * length, [-1.0] * length, 2.0, 0, trainable, steps)


def test_one_reward_is_one_step_at_the_end() -> None:
    found = scored(rollout(4, None, [True, False, True, False]), [0, 2], AlgorithmConfig())
    assert (found.values.tolist(), found.ends.tolist(), found.tokens) == ([2.0], [2], 2)


def test_rewards_by_turn_end_with_their_turns() -> None:
    """Policy, environment, policy: two turns of two and of one token."""
    trainable = [True, True, False, True]
    found = scored(rollout(4, [(2, 0.5), (4, 1.0)], trainable), [0, 1, 3], AlgorithmConfig())
    assert (found.values.tolist(), found.ends.tolist()) == ([0.5, 1.0], [2, 3])
    assert found.returns.tolist() == [1.5, 1.5, 1.0]


def test_what_the_environments_tokens_are_rewarded_with_is_the_policys_before_them() -> None:
    trainable = [False, True, False, False, True]
    steps = [(position + 1, 10.0**position) for position in range(5)]
    found = scored(rollout(5, steps, trainable), [1, 4], AlgorithmConfig())
    assert (found.values.tolist(), found.ends.tolist()) == ([10.0 + 100.0 + 1000.0, 10000.0], [1, 2])


def test_soft_overlong_punishment_by_hand() -> None:
    """DAPO, arXiv 2503.14476, eq. 13, with its longest completion 20 and buffer 4."""
    expected = {1: 0.0, 16: 0.0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1.0, 25: -1.0}
    assert {length: soft_overlong(length, 20, 4) for length in expected} == expected


def test_the_overlong_penalty_counts_the_policys_tokens_and_comes_last() -> None:
    config = AlgorithmConfig(overlong="penalty", overlong_buffer=4, overlong_penalty=2.0, max_tokens=8)
    found = scored(rollout(9, [(1, 0.5), (9, 1.0)], [True] * 6 + [False] * 3), range(6), config)
    assert (found.values.tolist(), found.ends.tolist()) == ([0.5, 1.0 - 2.0 * 0.5], [1, 6])
