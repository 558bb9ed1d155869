"""The configuration of a run: defaults as the proto's comments say, and the range of every field."""

from __future__ import annotations

from typing import Any

from qerld.v1 import run_pb2

from qerld_learner.api.checks import MAX_GROUP_SIZE, MAX_SEED, Checks
from qerld_learner.records import RunConfig

LEAVE = "leave it unset for the default"


def _name(checks: Checks, wrapper: Any, prefix: str, number: int, default: str, field: str) -> str:
    """Return the lower-case name of an enum value; 0 means `default`."""
    if number == 0:
        return default
    if number not in wrapper.values():
        checks.add(field, f"number {number} is not one of {', '.join(wrapper.keys()[1:])}; {LEAVE}")
        return default
    return str(wrapper.Name(number)).removeprefix(f"{prefix}_").lower()


def _or(message: Any, field: str, default: Any) -> Any:
    """Return an `optional` field of a message, or `default` when it is unset."""
    return getattr(message, field) if message.HasField(field) else default


def run_config(checks: Checks, message: run_pb2.RunConfig) -> RunConfig:
    """Return the configuration with defaults; what is out of range is added to `checks` under `config.…`."""
    base = RunConfig()
    rank = message.lora.rank or base.lora_rank
    config = RunConfig(
        lora_rank=rank,
        lora_alpha=message.lora.alpha or 2.0 * rank,
        target_modules=tuple(message.lora.target_modules) or base.target_modules,
        **_objective(checks, message, base),
        **_noise(checks, message.noise, base),
        group_size=message.group_size or base.group_size,
        groups_per_step=message.groups_per_step or base.groups_per_step,
        temperature=_or(message, "temperature", base.temperature),
        max_tokens=message.max_tokens or base.max_tokens,
        max_lag=_or(message, "max_lag", base.max_lag),
        schedule_steps=message.schedule_steps or message.max_steps or base.schedule_steps,
        max_steps=message.max_steps,
        seed=message.seed,
        reward_deadline=_deadline(checks, message, base),
        drop_zero_variance=_or(message, "drop_zero_variance", base.drop_zero_variance),
        canary_tolerance=_or(message, "canary_tolerance", None),
    )
    _check_ranges(checks, config)
    return config


def _objective(checks: Checks, message: run_pb2.RunConfig, base: RunConfig) -> dict[str, Any]:
    algorithm, optimizer = message.algorithm, message.optimizer
    return {
        "advantage": _name(
            checks,
            run_pb2.AdvantageEstimator,
            "ADVANTAGE_ESTIMATOR",
            algorithm.advantage,
            base.advantage,
            "config.algorithm.advantage",
        ),
        "aggregation": _name(
            checks,
            run_pb2.LossAggregation,
            "LOSS_AGGREGATION",
            algorithm.aggregation,
            base.aggregation,
            "config.algorithm.aggregation",
        ),
        "clip_low": _or(algorithm, "clip_low", base.clip_low),
        "clip_high": _or(algorithm, "clip_high", base.clip_high),
        "kl_coef": algorithm.kl_coef,
        "tis_cap": _or(algorithm, "tis_cap", base.tis_cap),
        "learning_rate": optimizer.learning_rate or base.learning_rate,
        "beta1": _or(optimizer, "beta1", base.beta1),
        "beta2": _or(optimizer, "beta2", base.beta2),
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": _or(optimizer, "max_grad_norm", base.max_grad_norm),
    }


def _noise(checks: Checks, message: run_pb2.AdaptiveNoise, base: RunConfig) -> dict[str, Any]:
    return {
        "noise_schedule": _name(
            checks,
            run_pb2.NoiseSchedule,
            "NOISE_SCHEDULE",
            message.schedule,
            base.noise_schedule,
            "config.noise.schedule",
        ),
        "sigma_start": message.sigma_start,
        "sigma_end": message.sigma_end,
        "noise_stages": message.stages or base.noise_stages,
        "noise_relative": message.relative,
    }


def _deadline(checks: Checks, message: run_pb2.RunConfig, base: RunConfig) -> float:
    if not message.HasField("reward_deadline"):
        return base.reward_deadline
    return checks.duration("config.reward_deadline", message.reward_deadline)


def _check_ranges(checks: Checks, config: RunConfig) -> None:
    for field, value, low, high in (
        ("lora.rank", config.lora_rank, 1, 512),
        ("algorithm.clip_low", config.clip_low, 0, 1),
        ("algorithm.clip_high", config.clip_high, 0, 1e6),
        ("algorithm.kl_coef", config.kl_coef, 0, 1e3),
        ("algorithm.tis_cap", config.tis_cap, 0, 1e6),
        ("optimizer.weight_decay", config.weight_decay, 0, 1e3),
        ("optimizer.max_grad_norm", config.max_grad_norm, 0, 1e9),
        ("optimizer.beta1", config.beta1, 0, 1 - 1e-9),
        ("optimizer.beta2", config.beta2, 0, 1 - 1e-9),
        ("noise.sigma_start", config.sigma_start, 0, 1e3),
        ("noise.sigma_end", config.sigma_end, 0, 1e3),
        ("group_size", config.group_size, 2, MAX_GROUP_SIZE),
        ("groups_per_step", config.groups_per_step, 1, 4096),
        ("max_tokens", config.max_tokens, 1, 1 << 20),
        ("max_lag", config.max_lag, 0, 64),
        ("max_steps", config.max_steps, 0, 1e9),
        ("schedule_steps", config.schedule_steps, 1, 1e9),
        ("seed", config.seed, 0, MAX_SEED),
    ):
        checks.between(f"config.{field}", value, low, high, LEAVE)
    checks.above("config.lora.alpha", config.lora_alpha, 0, 1e6, LEAVE)
    checks.above("config.optimizer.learning_rate", config.learning_rate, 0, 10, LEAVE)
    checks.above("config.temperature", config.temperature, 0, 100, LEAVE)
    if config.canary_tolerance is not None:
        checks.above("config.canary_tolerance", config.canary_tolerance, 0, 100, LEAVE)
    _check_noise(checks, config)


def _check_noise(checks: Checks, config: RunConfig) -> None:
    """Fields that only make sense together; stages 1 would be the stage without noise alone."""
    if config.noise_schedule == "none":
        return
    checks.between("config.noise.stages", config.noise_stages, 2, 10_000, "schedule none is the one without noise")
    if not 0 < config.sigma_end <= config.sigma_start:
        order = f"must be above 0 and at most sigma_start {config.sigma_start:g}, got {config.sigma_end:g}"
        checks.add("config.noise.sigma_end", f"{order}; the noise falls during training, or use schedule none")
