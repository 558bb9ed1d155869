"""The noise schedule: both readings, the edges, and seeds."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from qerld_learner.trainer import aqn
from qerld_learner.trainer.messages import AqnConfig

PAPER = AqnConfig(
    schedule="exponential", sigma_start=1e-2, sigma_end=5e-4, stages=10, reading="paper", schedule_steps=100
)
REACHES = msgspec.structs.replace(PAPER, reading="reaches_end")


def test_first_stage_has_no_noise_and_the_second_starts_at_sigma_start() -> None:
    for config in (PAPER, REACHES):
        assert [aqn.sigma_at(config, step) for step in (0, 1, 10)] == [0.0, 0.0, 0.0]
        assert aqn.sigma_at(config, 11) == pytest.approx(1e-2)


def test_values_by_hand() -> None:
    # step 51 is in stage 5: exponent 4/9 in the paper's formula, 4/8 in its code.
    assert aqn.sigma_at(PAPER, 51) == pytest.approx(1e-2 * 0.05 ** (4 / 9))
    assert aqn.sigma_at(REACHES, 51) == pytest.approx(1e-2 * 0.05**0.5)


def test_only_one_reading_reaches_sigma_end() -> None:
    assert aqn.sigma_at(REACHES, 91) == pytest.approx(5e-4)
    assert aqn.sigma_at(PAPER, 100) == pytest.approx(1e-2 * 0.05 ** (8 / 9))


def test_beyond_schedule_steps_the_last_value_holds() -> None:
    uneven = msgspec.structs.replace(REACHES, schedule_steps=105)
    for config in (REACHES, uneven):
        assert aqn.sigma_at(config, 10**6) == aqn.sigma_at(config, config.schedule_steps) == pytest.approx(5e-4)


@pytest.mark.parametrize("reading", ["paper", "reaches_end"])
def test_two_stages_have_one_noisy_stage_at_sigma_start(reading: str) -> None:
    config = msgspec.structs.replace(PAPER, stages=2, reading=reading, schedule_steps=10)
    assert [aqn.sigma_at(config, step) for step in (5, 6, 10, 99)] == [0.0, 1e-2, 1e-2, 1e-2]


def test_fewer_steps_than_stages_cuts_the_schedule_off() -> None:
    config = msgspec.structs.replace(REACHES, schedule_steps=3)
    values = [aqn.sigma_at(config, step) for step in (1, 2, 3, 4)]
    assert values[0] == 0.0
    assert values[1] == pytest.approx(1e-2)
    assert values[3] == values[2] == pytest.approx(1e-2 * 0.05 ** (1 / 8))


def test_sigma_never_grows_after_its_start() -> None:
    values = [aqn.sigma_at(REACHES, step) for step in range(11, 200)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))


def test_no_schedule_means_no_noise() -> None:
    assert aqn.sigma_at(AqnConfig(), 50) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("stages", 1), ("sigma_start", 0.0), ("sigma_start", float("nan")), ("sigma_end", 0.02), ("schedule_steps", 0)],
)
def test_bad_fields_are_named_with_their_value(field: str, value: float) -> None:
    with pytest.raises(aqn.AqnConfigError, match=rf"aqn\.{field}.*got"):
        aqn.sigma_at(msgspec.structs.replace(REACHES, **{field: value}), 1)


def test_noise_seeds_are_stable_distinct_and_fit_63_bits() -> None:
    seeds = {aqn.noise_seed(run, version) for run in range(20) for version in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert aqn.noise_seed(7, 3) == aqn.noise_seed(7, 3)
