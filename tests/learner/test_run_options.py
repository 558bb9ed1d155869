"""Settings of a run that cannot work are refused when it is created: field, limit, value and way out."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from qerld_kernels.noise import DTYPES
from qerld_learner.records import RunConfig
from qerld_learner.run_options import NOISE_DTYPES, algorithm_config, check_run_config
from qerld_learner.trainer.messages import AlgorithmConfig

NOISE = {"noise_schedule": "cosine", "sigma_start": 0.1, "sigma_end": 0.01, "schedule_steps": 100}
COSINE = {"lr_schedule": "cosine", "schedule_steps": 9}
BAD = [
    ({"clip_low": 0.3, "clip_high": 0.2}, "algorithm.clip_low", "at most clip_high = 0.2, got 0.3; raise clip_high"),
    ({"clip_low": -0.1}, "algorithm.clip_low", "[0, 1], got -0.1"),
    ({"clip_high": math.inf}, "algorithm.clip_high", "[0, 1e+09], got inf"),
    ({"clip": "dual", "dual_clip": 1.2}, "algorithm.dual_clip", "above 1 + clip_high = 1.28 and at most 1e9, got 1.2"),
    ({"clip": "soft"}, "algorithm.clip", "one of ppo, dual, cispo, none, got 'soft'"),
    ({"ratio": "turn"}, "algorithm.ratio", "one of token, sequence, got 'turn'"),
    ({"aggregation": "constant", "loss_divisor": 0.0}, "algorithm.loss_divisor", "[0.001, 1e+09], got 0"),
    ({"kl_coef": -1.0}, "algorithm.kl_coef", "[0, 100], got -1"),
    ({"kl_coef": math.nan}, "algorithm.kl_coef", "got nan"),
    ({"kl_estimator": "k4"}, "algorithm.kl_estimator", "k1, k2, k3, got 'k4'"),
    ({"entropy_coef": -0.1}, "algorithm.entropy_coef", "[0, 100], got -0.1"),
    ({"overlong": "penalty", "overlong_buffer": 300}, "algorithm.overlong_buffer", "[1, max_tokens = 256], got 300"),
    ({"tis_cap": 0.0}, "algorithm.tis_cap", "(0, 1e6], got 0; MISMATCH_CORRECTION_NONE is without a cap"),
    ({"correction": "token_mask", "mask_low": 1.5}, "algorithm.mask_low", "[0, 1], got 1.5"),
    ({"correction": "token_mask", "mask_high": 0.9}, "algorithm.mask_high", "at least 1, got 0.9"),
    ({"correction": "token_mask", "mask_high": math.inf}, "algorithm.mask_high", "finite"),
    ({"old_policy": "behaviour"}, "algorithm.old_policy", "got behaviour with token_truncate; the ratio"),
    ({"epochs": 0}, "algorithm.epochs", "[1, 64], got 0"),
    ({"mini_batches": 5}, "algorithm.mini_batches", "at most groups_per_step = 4, got 5; a group is not split"),
    ({"group_size": 1, "drop_zero_variance": False}, "group_size", "at least 2 with group_norm, got 1; a group of one"),
    ({"group_size": 1, "advantage": "batch_norm"}, "drop_zero_variance", "must be false with group_size 1, got true"),
    ({"max_lag": -1}, "max_lag", "[0, 64], got -1"),
    (
        {**NOISE, "noise_schedule": "square"},
        "noise.schedule",
        "linear, cosine, logarithmic, got 'square'",
    ),
    ({"noise_dtype": "float16"}, "noise.dtype", "one of float32, bfloat16, got 'float16'"),
    ({**NOISE, "sigma_end": 0.2}, "noise.sigma_end", "at most sigma_start = 0.1, got 0.2; noise decays: lower it"),
    ({**NOISE, "sigma_start": math.nan}, "noise.sigma_start", "[1e-06, 10], got nan"),
    ({**NOISE, "sigma_end": 0.0}, "noise.sigma_end", "[1e-06, 10], got 0; NOISE_SCHEDULE_NONE is without noise"),
    ({**NOISE, "noise_stages": 1}, "noise.stages", "at least 2 (the first has no noise), got 1"),
    ({"max_sampling_rounds": -1}, "max_sampling_rounds", "[0, 1048576], got -1"),
    ({"max_sampling_rounds": 3, "drop_zero_variance": False}, "max_sampling_rounds", "must be 0 with drop_zero_varian"),
    ({"optimizer": "sgd"}, "optimizer.kind", "one of adamw, adamw_8bit, got 'sgd'"),
    ({"lr_schedule": "step"}, "optimizer.schedule", "one of constant, linear, cosine, got 'step'"),
    ({"lr_schedule": "linear"}, "schedule_steps", "at least 1 with optimizer.schedule linear, got 0; set it, or max"),
    (
        {**COSINE, "warmup_steps": 9},
        "optimizer.warmup_steps",
        "below schedule_steps = 9, got 9; the schedule comes",
    ),
    ({"warmup_steps": -1}, "optimizer.warmup_steps", "[0, 2147483648], got -1"),
    ({**COSINE, "final_learning_rate": 1e-4}, "optimizer.final_learning_rate", "must be in [0, 1e-05], got 0.0001"),
    ({**NOISE, "schedule_steps": 0}, "schedule_steps", "at least 1 with noise.schedule cosine, got 0; set it, or max"),
]


def test_the_defaults_are_accepted() -> None:
    assert check_run_config(RunConfig()) == []
    for changes in (NOISE, {**COSINE, "warmup_steps": 8}, {"warmup_steps": 10**6}):
        assert check_run_config(RunConfig(**changes)) == []  # type: ignore[arg-type]
    assert check_run_config(RunConfig(group_size=1, advantage="batch_norm", drop_zero_variance=False)) == []


@pytest.mark.parametrize(("changes", "field", "text"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_setting_is_refused(changes: dict[str, object], field: str, text: str) -> None:
    (violation,) = check_run_config(RunConfig(**changes))  # type: ignore[arg-type]
    assert violation.field == f"config.{field}"
    assert text in violation.description
    assert ";" in violation.description


def test_a_runs_algorithm_reaches_the_trainer_by_name() -> None:
    assert set(AlgorithmConfig.__struct_fields__) <= {field.name for field in fields(RunConfig)}
    config = RunConfig(advantage="leave_one_out", clip="cispo", clip_low=1.0, kl_in="reward", epochs=3, max_tokens=77)
    found = algorithm_config(config)
    assert all(getattr(found, name) == getattr(config, name) for name in AlgorithmConfig.__struct_fields__)


def test_noise_dtypes_are_those_of_the_noise() -> None:
    assert NOISE_DTYPES == DTYPES
