"""Estimates from c right ones of n samples a problem, each with a 95% confidence interval over problems.

The interval is Wilson's score interval when every problem's value is 0 or 1 (one sample each, or pass@n of n), and else
the percentile bootstrap over problems: samples of one problem are not independent, problems are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Z95 = 1.959963984540054
RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95% confidence interval [low, high], and how that was made."""

    value: float
    low: float
    high: float
    method: Literal["wilson", "bootstrap"]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples is right) from c right ones of n.

    1 − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1), as a product, which does not overflow.

    Raises:
        ValueError: Not 0 ≤ c ≤ n or not 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"want 0 <= c <= n and 1 <= k <= n, got n = {n}, c = {c}, k = {k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def average(n: int, c: int) -> float:
    """Return avg@n, the share of right samples: pass@1 from n samples."""
    return pass_at_k(n, c, 1)


def interval(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a problem, each from 0 to 1, with its interval."""
    mean = fmean(values)
    if set(values) <= {0.0, 1.0}:
        return Estimate(mean, *wilson(round(sum(values)), len(values)), "wilson")
    return Estimate(mean, *bootstrap(values), "bootstrap")


def wilson(right: int, of: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a proportion.

    Wilson 1927; Brown, Cai and DasGupta 2001 (Statistical Science 16(2)) recommend it. Unlike ±1.96 standard errors it
    keeps within [0, 1] and has a width when all or none are right.
    """
    share, z2 = right / of, Z95**2
    centre = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z95 / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of**2))
    # With all or none right the bound is 1 or 0, but for rounding.
    return 0.0 if right == 0 else centre - half, 1.0 if right == of else centre + half


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES, seed: int = SEED) -> tuple[float, float]:
    """Return the 2.5% and 97.5% percentiles of the mean over resamples of the values (Efron 1979); repeatable."""
    draw = random.Random(seed)  # noqa: S311 — statistics, not secrets
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(resamples))
    return means[int(0.025 * (resamples - 1))], means[math.ceil(0.975 * (resamples - 1))]
