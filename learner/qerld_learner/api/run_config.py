"""The configuration of a run, with defaults as the proto's comments say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from qerld.v1 import common_pb2, run_pb2
from qerld_eval import INSTRUCTION

from qerld_learner.api.checks import MAX_SEED, Checks
from qerld_learner.api.convert import ALGORITHM, ALGORITHM_NUMBERS
from qerld_learner.records import HeldOutConfig, RunConfig
from qerld_learner.trainer.algorithm import LEAVE, MASKS, PRESETS


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
    preset = _preset(checks, message.algorithm)
    base = replace(RunConfig(), preset=preset, **PRESETS[preset])
    rank = message.lora.rank or base.lora_rank
    config = RunConfig(
        lora_rank=rank,
        lora_alpha=message.lora.alpha or 2.0 * (math.sqrt(rank) if message.lora.rslora else rank),
        lora_rslora=message.lora.rslora,
        target_modules=tuple(message.lora.target_modules) or base.target_modules,
        preset=preset,
        **_algorithm(checks, message, base),
        **_optimizer(checks, message.optimizer, base),
        **_noise(checks, message.noise, base),
        group_size=message.group_size or base.group_size,
        groups_per_step=message.groups_per_step or base.groups_per_step,
        temperature=_or(message, "temperature", base.temperature),
        max_tokens=message.max_tokens or base.max_tokens,
        max_lag=_or(message, "max_lag", base.max_lag),
        schedule_steps=message.schedule_steps or message.max_steps,
        max_steps=message.max_steps,
        seed=message.seed,
        reward_deadline=_deadline(checks, message, base),
        drop_zero_variance=_or(message, "drop_zero_variance", base.drop_zero_variance),
        max_sampling_rounds=message.max_sampling_rounds,
        canary_tolerance=_or(message, "canary_tolerance", None),
        evaluation=_evaluation(checks, message, base) if message.HasField("evaluation") else None,
    )
    # The other ranges are the core's: `Learner.check_run_config`.
    checks.between("config.seed", config.seed, 0, MAX_SEED, LEAVE)
    return config


def _preset(checks: Checks, message: run_pb2.Algorithm) -> str:
    wrapper, prefix = ALGORITHM["preset"]
    return _name(checks, wrapper, prefix, message.preset, "none", "config.algorithm.preset")


def _algorithm(checks: Checks, message: run_pb2.RunConfig, base: RunConfig) -> dict[str, Any]:
    """Return the algorithm's fields: those set, else the preset's, else their defaults."""
    algorithm, longest = message.algorithm, message.max_tokens or base.max_tokens
    divisor = base.loss_divisor if "loss_divisor" in PRESETS[base.preset] else float(longest)
    found = {field: _given(algorithm, field, getattr(base, field)) for field in ALGORITHM_NUMBERS}
    found |= {
        field: _name(
            checks, wrapper, prefix, getattr(algorithm, field), getattr(base, field), f"config.algorithm.{field}"
        )
        for field, (wrapper, prefix) in ALGORITHM.items()
        if field != "preset"
    }
    found["loss_divisor"] = _or(algorithm, "loss_divisor", divisor)
    found["overlong_buffer"] = algorithm.overlong_buffer or max(1, longest // 5)
    if not algorithm.kl_estimator and "kl_estimator" not in PRESETS[base.preset]:
        found["kl_estimator"] = "k1" if found["kl_in"] == "reward" else "k3"
    return found | _correction(algorithm, found)


def _correction(algorithm: run_pb2.Algorithm, found: dict[str, Any]) -> dict[str, Any]:
    """Return what of the correction depends on other fields where it is unset."""
    correction = found["correction"]
    if not algorithm.correction and not found["tis_cap"]:
        correction = "none"
    low, high = MASKS.get(correction, (found["mask_low"], found["mask_high"]))
    once = found["epochs"] * found["mini_batches"] == 1
    old_policy = "behaviour" if correction == "none" and once else "trainer"
    return {
        "correction": correction,
        "mask_low": _or(algorithm, "mask_low", low),
        "mask_high": _or(algorithm, "mask_high", high),
        "old_policy": found["old_policy"] if algorithm.old_policy else old_policy,
    }


def _given(message: Any, field: str, default: Any) -> Any:
    """Return a number of a message, or `default` when it is unset; 0 is unset where the field has no presence."""
    if message.DESCRIPTOR.fields_by_name[field].has_presence:
        return _or(message, field, default)
    return getattr(message, field) or default


def _optimizer(checks: Checks, optimizer: run_pb2.Optimizer, base: RunConfig) -> dict[str, Any]:
    return {
        "optimizer": _name(
            checks, run_pb2.OptimizerKind, "OPTIMIZER_KIND", optimizer.kind, base.optimizer, "config.optimizer.kind"
        ),
        "lr_schedule": _name(
            checks,
            run_pb2.LearningRateSchedule,
            "LEARNING_RATE_SCHEDULE",
            optimizer.schedule,
            base.lr_schedule,
            "config.optimizer.schedule",
        ),
        "warmup_steps": optimizer.warmup_steps,
        "final_learning_rate": optimizer.final_learning_rate,
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
        "noise_dtype": _name(
            checks, common_pb2.NoiseDtype, "NOISE_DTYPE", message.dtype, base.noise_dtype, "config.noise.dtype"
        ),
    }


def _evaluation(checks: Checks, message: run_pb2.RunConfig, base: RunConfig) -> HeldOutConfig:
    held_out, samples = message.evaluation, message.evaluation.samples or 1
    greedy = _or(held_out, "greedy", samples == 1)
    defaults = HeldOutConfig(held_out.every_steps, held_out.file)
    return HeldOutConfig(
        every_steps=held_out.every_steps,
        file=held_out.file,
        problems=held_out.problems or defaults.problems,
        samples=samples,
        greedy=greedy,
        temperature=_or(held_out, "temperature", _or(message, "temperature", base.temperature)),
        max_tokens=held_out.max_tokens or message.max_tokens or base.max_tokens,
        instruction=_or(held_out, "instruction", INSTRUCTION),
        system=held_out.system,
        time_limit=checks.duration("config.evaluation.time_limit", held_out.time_limit)
        if held_out.HasField("time_limit")
        else defaults.time_limit,
    )


def _deadline(checks: Checks, message: run_pb2.RunConfig, base: RunConfig) -> float:
    if not message.HasField("reward_deadline"):
        return base.reward_deadline
    return checks.duration("config.reward_deadline", message.reward_deadline)
