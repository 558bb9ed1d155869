"""The noise schedule: every decay recomputed from its formula, the edges, and seeds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from qerld_learner.trainer import aqn
from qerld_learner.trainer.messages import AqnConfig

from .papers import Array

BASE = AqnConfig(schedule="exponential", sigma_start=1e-2, sigma_end=5e-4, stages=10, schedule_steps=100)

# k = 1 … K−1, as arrays; the first two from the paper (eq. 8) and its code, the others as `aqn` says.
FORMULAS: dict[str, Callable[[float, float, Array, int], Array]] = {
    "exponential_paper": lambda s, e, k, stages: s * (e / s) ** ((k - 1) / (stages - 1)),
    "exponential": lambda s, e, k, stages: s * (e / s) ** ((k - 1) / (stages - 2)),
    "linear": lambda s, e, k, stages: np.interp(k, [1, stages - 1], [s, e]),
    "cosine": lambda s, e, k, stages: e + (s - e) * np.cos(np.pi / 2 * (k - 1) / (stages - 2)) ** 2,
    "logarithmic": lambda s, e, k, stages: s - (s - e) * np.log(k) / np.log(stages - 1),
}


def by_hand(config: AqnConfig) -> Array:
    """σ of steps 1 … M."""
    steps = np.arange(1, config.schedule_steps + 1)
    stage = np.minimum((steps - 1) // (config.schedule_steps // config.stages), config.stages - 1)
    noisy = FORMULAS[config.schedule](config.sigma_start, config.sigma_end, np.maximum(stage, 1), config.stages)
    return np.where(stage == 0, 0.0, noisy)


def computed(config: AqnConfig, steps: range) -> list[float]:
    return [aqn.sigma_at(config, step) for step in steps]


@pytest.mark.parametrize(
    ("start", "end", "stages", "steps"),
    [(1e-2, 5e-4, 10, 100), (5e-2, 5e-4, 10, 600), (1e-2, 1e-4, 7, 50), (0.3, 0.3, 4, 9), (1.0, 1e-6, 3, 1000)],
)
@pytest.mark.parametrize("name", FORMULAS)
def test_sigma_of_every_step_from_the_formula(name: str, start: float, end: float, stages: int, steps: int) -> None:
    config = AqnConfig(name, start, end, stages, steps)
    np.testing.assert_allclose(computed(config, range(1, steps + 1)), by_hand(config), rtol=1e-9)


def test_every_decay_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(aqn.DECAYS)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_decay_begins_at_sigma_start_falls_and_ends_at_sigma_end_except_the_papers(name: str) -> None:
    config = msgspec.structs.replace(BASE, schedule=name)
    assert computed(config, range(11)) == [0.0] * 11
    values = computed(config, range(11, 102, 10))
    assert values[0] == pytest.approx(1e-2)
    assert all(later < earlier for earlier, later in pairwise(values[:-1]))
    assert values[-1] == values[-2]
    last = 1e-2 * 0.05 ** (8 / 9) if name == "exponential_paper" else 5e-4
    assert values[-1] == pytest.approx(last)


@pytest.mark.parametrize("name", FORMULAS)
def test_beyond_schedule_steps_the_last_value_holds(name: str) -> None:
    for steps in (100, 105):
        config = msgspec.structs.replace(BASE, schedule=name, schedule_steps=steps)
        assert aqn.sigma_at(config, 10**6) == aqn.sigma_at(config, steps) > 0


@pytest.mark.parametrize("name", FORMULAS)
def test_two_stages_have_one_noisy_stage_at_sigma_start(name: str) -> None:
    config = msgspec.structs.replace(BASE, schedule=name, stages=2, schedule_steps=10)
    assert [aqn.sigma_at(config, step) for step in (5, 6, 10, 99)] == [0.0, 1e-2, 1e-2, 1e-2]


def test_fewer_steps_than_stages_cuts_the_schedule_off() -> None:
    config = msgspec.structs.replace(BASE, schedule_steps=3)
    values = [aqn.sigma_at(config, step) for step in (1, 2, 3, 4)]
    assert values[0] == 0.0
    assert values[1] == pytest.approx(1e-2)
    assert values[3] == values[2] == pytest.approx(1e-2 * 0.05 ** (1 / 8))


def test_no_schedule_means_no_noise() -> None:
    assert aqn.sigma_at(AqnConfig(), 50) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schedule", "quadratic"),
        ("stages", 1),
        ("sigma_start", 0.0),
        ("sigma_start", float("nan")),
        ("sigma_end", 0.02),
        ("schedule_steps", 0),
    ],
)
def test_bad_fields_are_named_with_their_value(field: str, value: object) -> None:
    with pytest.raises(aqn.AqnConfigError, match=rf"aqn\.{field} must .*got .*;"):
        aqn.sigma_at(msgspec.structs.replace(BASE, **{field: value}), 1)


def test_noise_seeds_are_stable_distinct_and_fit_63_bits() -> None:
    seeds = {aqn.noise_seed(run, version) for run in range(20) for version in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert aqn.noise_seed(7, 3) == aqn.noise_seed(7, 3)
