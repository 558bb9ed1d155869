"""From a run's configuration to the trainer's, and what the trainer would refuse about it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .errors import Violation
from .options import LearnerOptions
from .records import NoiseRecord, RunConfig
from .trainer import aqn
from .trainer.advantages import ADVANTAGES
from .trainer.messages import AlgorithmConfig, AqnConfig, LoraShape, OptimizerConfig, TrainerConfig

# Names of `objectives.AGGREGATIONS`, which this process cannot import: that module needs torch.
AGGREGATIONS = ("sequence_mean", "token_mean")
_SCHEDULES = {"none": "reaches_end", "exponential": "reaches_end", "exponential_paper": "paper"}
# bf16: both sides round their activations. Correct servers differed by 0.02 to 0.04 on average and by up to 0.21 on the
# 20 tokens of two probes (SmolLM2, H200; tokens sampled under noise are improbable without it, and differ most).
DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


def trainer_config(config: RunConfig, options: LearnerOptions) -> TrainerConfig:
    """Return what the trainer needs to know of a run."""
    return TrainerConfig(
        base=str(options.base_model),
        dtype=options.dtype,
        device=options.device,
        lora=LoraShape(config.lora_rank, config.lora_alpha, config.target_modules, config.seed),
        algorithm=AlgorithmConfig(
            advantage=config.advantage,
            aggregation=config.aggregation,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef,
            tis_cap=config.tis_cap or None,
        ),
        optimizer=OptimizerConfig(
            lr=config.learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        ),
        aqn=noise_config(config),
        temperature=config.temperature,
        token_budget=options.token_budget,
        seed=config.seed,
        cache_dequantized=options.cache_dequantized,
        activation_checkpointing=options.activation_checkpointing,
    )


def noise_config(config: RunConfig) -> AqnConfig:
    """Return the noise schedule of a run."""
    return AqnConfig(
        schedule="none" if config.noise_schedule == "none" else "exponential",
        sigma_start=config.sigma_start,
        sigma_end=config.sigma_end,
        stages=config.noise_stages,
        reading="paper" if _SCHEDULES[config.noise_schedule] == "paper" else "reaches_end",
        relative=config.noise_relative,
        schedule_steps=config.schedule_steps,
    )


def noise_of(config: RunConfig, step: int, version: int) -> NoiseRecord:
    """Return the noise that the version made at a learner step is served with."""
    sigma = aqn.sigma_at(noise_config(config), step)
    return NoiseRecord(sigma, aqn.noise_seed(config.seed, version), config.noise_relative)


def canary_tolerance(config: RunConfig, dtype: str) -> float:
    """Return the largest mean |difference| of log-probabilities, in nats a token, that a canary allows."""
    return DEFAULT_TOLERANCE[dtype] if config.canary_tolerance is None else config.canary_tolerance


def check_run_config(config: RunConfig) -> list[Violation]:
    """Return everything wrong with a configuration; paths are those of `qerld.v1.RunConfig`."""
    return [Violation(f"config.{field}", text) for field, text in _problems(config)]


def _problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield from _unknown_names(config)
    yield from _numbers(config)
    if config.noise_schedule in _SCHEDULES:
        try:
            aqn.check(noise_config(config))
        except aqn.AqnConfigError as error:
            yield "noise", str(error)


def _unknown_names(config: RunConfig) -> Iterator[tuple[str, str]]:
    for field, value, known in (
        ("algorithm.advantage", config.advantage, sorted(ADVANTAGES)),
        ("algorithm.aggregation", config.aggregation, sorted(AGGREGATIONS)),
        ("noise.schedule", config.noise_schedule, sorted(_SCHEDULES)),
    ):
        if value not in known:
            yield field, f"must be one of {', '.join(known)}, got {value!r}: this version does not have it"
    if not config.target_modules:
        yield "lora.target_modules", "must name at least one linear layer, got none; leave it out for the default"


def _numbers(config: RunConfig) -> Iterator[tuple[str, str]]:
    for field, value, low, high in (
        ("lora.rank", config.lora_rank, 1, 512),
        ("group_size", config.group_size, 2, 1024),
        ("groups_per_step", config.groups_per_step, 1, 4096),
        ("max_tokens", config.max_tokens, 1, 1 << 20),
        ("max_lag", config.max_lag, 0, 64),
        ("schedule_steps", config.schedule_steps, 1, 1 << 31),
        ("max_steps", config.max_steps, 0, 1 << 31),
        ("algorithm.clip_low", config.clip_low, 0, 1),
        ("algorithm.clip_high", config.clip_high, 0, 100),
        ("algorithm.kl_coef", config.kl_coef, 0, 100),
        ("algorithm.tis_cap", config.tis_cap, 0, 1e6),
        ("optimizer.beta1", config.beta1, 0, 1 - 1e-9),
        ("optimizer.beta2", config.beta2, 0, 1 - 1e-9),
        ("optimizer.learning_rate", config.learning_rate, 0, 1),
        ("optimizer.weight_decay", config.weight_decay, 0, 1e3),
        ("optimizer.max_grad_norm", config.max_grad_norm, 0, 1e6),
        ("canary_tolerance", canary_tolerance(config, "float32"), 0, 1e3),
    ):
        if not low <= value <= high:
            yield field, f"must be in [{low}, {high}], got {value}"
    for field, value in (
        ("temperature", config.temperature),
        ("lora.alpha", config.lora_alpha),
        ("reward_deadline", config.reward_deadline),
    ):
        if not (value > 0 and math.isfinite(value)):
            yield field, f"must be finite and > 0, got {value}"
