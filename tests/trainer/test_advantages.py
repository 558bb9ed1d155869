"""Advantages recomputed in NumPy, and the groups that used to give NaN."""

from __future__ import annotations

import numpy as np
import pytest
from qerld_learner.trainer.advantages import ADVANTAGES, AdvantageError, advantages_of


def test_group_norm_by_hand() -> None:
    rewards = [0.0, 1.0, 0.5, 3.0]
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    np.testing.assert_allclose(advantages_of("group_norm", rewards), [(r - mean) / (std + 1e-6) for r in rewards])


def test_mean_only_by_hand() -> None:
    np.testing.assert_allclose(advantages_of("mean_only", [1.0, 2.0, 6.0]), [-2.0, -1.0, 3.0])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 8, [1e30] * 3, [0.0, 0.0]])
def test_no_signal_is_exactly_zero(name: str, rewards: list[float]) -> None:
    assert advantages_of(name, rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    with pytest.raises(AdvantageError, match=r"reward 1 .*finite"):
        advantages_of(name, [0.0, bad])


def test_empty_group_and_unknown_estimator_are_refused() -> None:
    with pytest.raises(AdvantageError, match="at least one reward"):
        advantages_of("group_norm", [])
    with pytest.raises(AdvantageError, match=r"\['group_norm', 'mean_only'\], got 'gae'"):
        advantages_of("gae", [1.0])
