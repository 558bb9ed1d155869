"""Estimators against brute force and against published or exact numbers."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from qerld_eval.statistics import Z95, average, bootstrap, interval, pass_at_k, wilson
from qerld_eval.summary import Completion, summarise


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(200, 3, 100), (1000, 1, 1000), (4096, 7, 64), (10_000, 5_000, 5_001)])
def test_pass_at_k_of_many_samples_is_the_exact_fraction(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over Binomial(n, p) is exactly 1 - (1 - p)^k; the plug-in 1 - (1 - c/n)^k is not."""
    n, p = 10, 0.3
    for k in range(1, n + 1):
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(weights))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, c, k)


def test_average_is_the_share_of_right_samples() -> None:
    assert [average(8, c) for c in (0, 2, 8)] == [0.0, 0.25, 1.0]


@pytest.mark.parametrize(("right", "of"), [(0, 10), (1, 10), (5, 10), (10, 10), (837, 1319), (1, 1), (0, 1)])
def test_wilson_bounds_are_the_shares_that_the_score_test_just_keeps(right: int, of: int) -> None:
    share = right / of
    for bound in wilson(right, of):
        # The bounds solve (share - p)^2 = z^2 p (1 - p) / of; so does the end of the range when all or none are right.
        assert (share - bound) ** 2 == pytest.approx(Z95**2 * bound * (1 - bound) / of, abs=1e-12)
    low, high = wilson(right, of)
    assert 0 <= low <= share <= high <= 1
    assert low < high


def test_wilson_covers() -> None:
    """Coverage, computed exactly, stays near 95% also where ±1.96 standard errors fail."""
    for of, p in ((20, 0.02), (40, 0.5), (100, 0.95)):
        covered = 0.0
        for right in range(of + 1):
            low, high = wilson(right, of)
            if low <= p <= high:
                covered += math.comb(of, right) * p**right * (1 - p) ** (of - right)
        assert 0.92 < covered < 0.995, (of, p, covered)


def test_bootstrap_agrees_with_the_normal_interval_of_many_values() -> None:
    draw = random.Random(5)
    values = [draw.choice([0.0, 0.25, 0.5, 0.75, 1.0]) for _ in range(800)]
    mean = sum(values) / len(values)
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    low, high = bootstrap(values)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.2 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.2 * error)
    assert bootstrap(values) == (low, high)


def test_the_interval_is_wilsons_for_zeros_and_ones_and_else_the_bootstrap() -> None:
    assert interval([1.0, 0.0, 1.0]).method == "wilson"
    assert interval([1.0, 1.0]).low < 1.0
    assert interval([0.5, 0.0, 1.0]).method == "bootstrap"


def judged(*rights: list[bool | None]) -> list[Completion]:
    return [
        Completion(problem, right, tokens=10 * problem, truncated=right is None)
        for problem, row in enumerate(rights)
        for right in row
    ]


def test_a_summary_of_single_samples_is_pass_at_1() -> None:
    summary = summarise(judged([True], [False], [None]), samples=1)
    assert summary.estimates.keys() == {"pass@1"}
    assert summary.average.value == pytest.approx(1 / 3)
    assert (summary.unjudged, summary.truncated_share, summary.mean_tokens) == (1, pytest.approx(1 / 3), 10.0)


def test_a_summary_of_several_samples_by_hand() -> None:
    rows: list[list[bool | None]] = [[True, False, False, False], [True, True, False, None], [False] * 4]
    summary = summarise(judged(*rows), samples=4, ks=[4, 1, 2])
    assert list(summary.estimates) == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert summary.average.value == pytest.approx((0.25 + 0.5 + 0) / 3)
    assert summary.passes[1].value == summary.average.value
    assert summary.passes[2].value == pytest.approx((0.5 + 5 / 6 + 0) / 3)
    assert summary.passes[4].value == pytest.approx(2 / 3)
    assert summary.passes[4].method == "wilson"


def test_a_problem_with_a_missing_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="want 2 completions"):
        summarise(judged([True, True], [True]), samples=2)
    with pytest.raises(ValueError, match="none at all"):
        summarise([], samples=1)
