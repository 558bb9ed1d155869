"""From a run's configuration to the trainer's, and what the trainer would refuse about it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .errors import Violation
from .options import LearnerOptions
from .records import HeldOutConfig, NoiseRecord, RunConfig
from .trainer import algorithm, aqn, learning_rate
from .trainer.algorithm import LEAVE
from .trainer.messages import AlgorithmConfig, AqnConfig, LoraShape, OptimizerConfig, TrainerConfig

# bf16: both sides round their activations. Correct servers differed by 0.02 to 0.04 on average and by up to 0.21 on the
# 20 tokens of two probes (SmolLM2, H200; tokens sampled under noise are improbable without it, and differ most).
DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
# vLLM refuses temperatures above 2, and raises those below 0.01 to that without a word to us.
TEMPERATURES = (0.01, 2.0)
# Beside norm weights of about 1, fp32 swallows a smaller σ; a larger one is nothing but noise.
SIGMAS = (1e-6, 10.0)
# As `qerld_kernels.noise.DTYPES` and `trainer.optimizers.OPTIMIZERS`, which import torch; a test holds them together.
NOISE_DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "adamw_8bit")
MAX_MODULES = 64
MAX_MODULE_NAME = 128


def trainer_config(config: RunConfig, options: LearnerOptions) -> TrainerConfig:
    """Return what the trainer needs to know of a run."""
    return TrainerConfig(
        base=str(options.base_model),
        dtype=options.dtype,
        device=options.device,
        lora=LoraShape(config.lora_rank, config.lora_alpha, config.target_modules, config.seed, config.lora_rslora),
        algorithm=algorithm_config(config),
        optimizer=OptimizerConfig(
            kind=config.optimizer,
            lr=config.learning_rate,
            schedule=config.lr_schedule,
            warmup_steps=config.warmup_steps,
            schedule_steps=config.schedule_steps,
            final_lr=config.final_learning_rate,
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


def algorithm_config(config: RunConfig) -> AlgorithmConfig:
    """Return the objective of a run, whose fields have the same names there."""
    return AlgorithmConfig(**{field: getattr(config, field) for field in AlgorithmConfig.__struct_fields__})


def noise_config(config: RunConfig) -> AqnConfig:
    """Return the noise schedule of a run."""
    return AqnConfig(
        schedule=config.noise_schedule,
        sigma_start=config.sigma_start,
        sigma_end=config.sigma_end,
        stages=config.noise_stages,
        schedule_steps=config.schedule_steps,
    )


def noise_of(config: RunConfig, step: int, version: int) -> NoiseRecord:
    """Return the noise that the version made at a learner step is served with."""
    sigma = aqn.sigma_at(noise_config(config), step)
    return NoiseRecord(sigma, aqn.noise_seed(config.seed, version), config.noise_relative, config.noise_dtype)


def canary_tolerance(config: RunConfig, dtype: str) -> float:
    """Return the largest mean |difference| of log-probabilities, in nats a token, that a canary allows."""
    return DEFAULT_TOLERANCE[dtype] if config.canary_tolerance is None else config.canary_tolerance


def check_run_config(config: RunConfig) -> list[Violation]:
    """Return everything wrong with a configuration; paths are those of `qerld.v1.RunConfig`."""
    return [Violation(f"config.{field}", text) for field, text in _problems(config)]


def _problems(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield from _algorithm(config)
    yield from _modules(config.target_modules)
    yield from _numbers(config)
    if config.max_sampling_rounds and not config.drop_zero_variance:
        text = f"must be 0 with drop_zero_variance = false, got {config.max_sampling_rounds}"
        yield "max_sampling_rounds", f"{text}; nothing is dropped, so that each batch takes one round"
    yield from _names(config)
    yield from _noise(config)
    yield from _schedule(config)
    if config.evaluation is not None:
        yield from _evaluation(config.evaluation)


def _algorithm(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield from ((f"algorithm.{field}", text) for field, text in algorithm.problems(algorithm_config(config)))
    if config.mini_batches > config.groups_per_step:
        text = f"must be at most groups_per_step = {config.groups_per_step}, got {config.mini_batches}"
        yield "algorithm.mini_batches", f"{text}; a group is not split: lower it or raise groups_per_step"
    if config.group_size != 1:
        return
    if config.advantage != "batch_norm":
        text = f"must be at least 2 with {config.advantage}, got 1"
        yield "group_size", f"{text}; a group of one has no baseline: raise it or use ADVANTAGE_ESTIMATOR_BATCH_NORM"
    elif config.drop_zero_variance:
        text = "must be false with group_size 1, got true"
        yield "drop_zero_variance", f"{text}; every group of one would be dropped: set it to false"


def _modules(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    if not 1 <= len(names) <= MAX_MODULES:
        yield "lora.target_modules", f"must name 1 to {MAX_MODULES} linear layers, got {len(names)}; {LEAVE}"
    longest = max(map(len, names), default=0)
    if longest > MAX_MODULE_NAME:
        limit = f"names must have at most {MAX_MODULE_NAME} characters, got {longest}"
        yield "lora.target_modules", f"{limit}; use the last part of a layer's name"


def _numbers(config: RunConfig) -> Iterator[tuple[str, str]]:
    for field, value, low, high in (
        ("lora.rank", config.lora_rank, 1, 512),
        ("lora.alpha", config.lora_alpha, 1e-3, 1e5),
        ("temperature", config.temperature, *TEMPERATURES),
        ("group_size", config.group_size, 1, 1024),
        ("groups_per_step", config.groups_per_step, 1, 4096),
        ("max_tokens", config.max_tokens, 1, 1 << 20),
        ("max_lag", config.max_lag, 0, 64),
        ("schedule_steps", config.schedule_steps, 0, 1 << 31),
        ("max_steps", config.max_steps, 0, 1 << 31),
        ("max_sampling_rounds", config.max_sampling_rounds, 0, 1 << 20),
        ("optimizer.beta1", config.beta1, 0, 1 - 1e-9),
        ("optimizer.beta2", config.beta2, 0, 1 - 1e-9),
        ("optimizer.learning_rate", config.learning_rate, 0, 1),
        ("optimizer.warmup_steps", config.warmup_steps, 0, 1 << 31),
        ("optimizer.final_learning_rate", config.final_learning_rate, 0, config.learning_rate),
        ("optimizer.weight_decay", config.weight_decay, 0, 1e3),
        ("optimizer.max_grad_norm", config.max_grad_norm, 0, 1e6),
        ("canary_tolerance", canary_tolerance(config, "float32"), 0, 1e3),
    ):
        if not low <= value <= high:
            yield field, f"must be in [{low}, {high}], got {value}; {LEAVE}"
    if not (config.reward_deadline > 0 and math.isfinite(config.reward_deadline)):
        yield "reward_deadline", f"must be finite and > 0, got {config.reward_deadline}; {LEAVE}"


def _names(config: RunConfig) -> Iterator[tuple[str, str]]:
    for field, name, known in (
        ("optimizer.kind", config.optimizer, OPTIMIZERS),
        ("optimizer.schedule", config.lr_schedule, learning_rate.SCHEDULES),
        ("noise.schedule", config.noise_schedule, aqn.SCHEDULES),
        ("noise.dtype", config.noise_dtype, NOISE_DTYPES),
    ):
        if name not in known:
            yield field, f"must be one of {', '.join(known)}, got {name!r}; this version has no other"


def _evaluation(held_out: HeldOutConfig) -> Iterator[tuple[str, str]]:
    for field, value, low, high in (
        ("every_steps", held_out.every_steps, 1, 1 << 31),
        ("problems", held_out.problems, 1, 1 << 20),
        ("samples", held_out.samples, 1, 1024),
        ("temperature", held_out.temperature, *TEMPERATURES),
        ("max_tokens", held_out.max_tokens, 1, 1 << 20),
    ):
        if not low <= value <= high:
            yield f"evaluation.{field}", f"must be in [{low}, {high}], got {value}; {LEAVE}"
    if not held_out.file:
        yield "evaluation.file", "must name a file in the learner's evaluation_dir; or leave evaluation unset for none"
    if held_out.greedy and held_out.samples > 1:
        text = f"must be false with samples = {held_out.samples}, got true"
        yield "evaluation.greedy", f"{text}; all of them would be the same: leave it unset"


def _noise(config: RunConfig) -> Iterator[tuple[str, str]]:
    low, high = SIGMAS
    noisy = config.noise_schedule in aqn.DECAYS
    least = low if noisy else 0.0
    for field, value in (("noise.sigma_start", config.sigma_start), ("noise.sigma_end", config.sigma_end)):
        if not least <= value <= high:
            yield field, f"must be in [{least:g}, {high:g}], got {value:g}; NOISE_SCHEDULE_NONE is without noise"
    if noisy and config.sigma_end > config.sigma_start:
        text = f"must be at most sigma_start = {config.sigma_start:g}, got {config.sigma_end:g}"
        yield "noise.sigma_end", f"{text}; noise decays: lower it or raise sigma_start"
    if noisy and config.noise_stages < 2:
        yield (
            "noise.stages",
            f"must be at least 2 (the first has no noise), got {config.noise_stages}; {LEAVE}",
        )


def _schedule(config: RunConfig) -> Iterator[tuple[str, str]]:
    falling = config.lr_schedule in learning_rate.SCHEDULES and config.lr_schedule != "constant"
    for field, name, scheduled in (
        ("noise.schedule", config.noise_schedule, config.noise_schedule in aqn.DECAYS),
        ("optimizer.schedule", config.lr_schedule, falling),
    ):
        if scheduled and config.schedule_steps == 0:
            text = f"must be at least 1 with {field} {name}, got 0"
            yield "schedule_steps", f"{text}; set it, or max_steps, to the planned number of steps"
    if falling and 0 < config.schedule_steps <= config.warmup_steps:
        text = f"must be below schedule_steps = {config.schedule_steps}, got {config.warmup_steps}"
        yield (
            "optimizer.warmup_steps",
            f"{text}; the schedule comes after the warm-up: lower it",
        )
