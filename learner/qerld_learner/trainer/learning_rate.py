"""The learning rate of a learner's step: warm-up, then a schedule over M = `schedule_steps`. No torch here.

Step s ≥ 1 of W warm-up steps has lr · s/W. After it p = (s − W − 1)/(M − W) goes from 0 towards 1, which it reaches one
step after the last: no step is taken at a rate of zero. Beyond M the last value holds. As with noise, the step alone
counts: passes over a batch and restarts do not move it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .messages import OptimizerConfig


def constant(progress: float) -> float:
    """Return 1."""
    return 1.0


def linear(progress: float) -> float:
    """Return a straight line from 1 to 0."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Return half a cosine from 1 to 0."""
    return (1 + math.cos(math.pi * progress)) / 2


# Share of the way from `final_lr` to `lr`, by progress.
SCHEDULES: dict[str, Callable[[float], float]] = {"constant": constant, "linear": linear, "cosine": cosine}


def lr_at(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of step `step`, counted from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay = config.schedule_steps - config.warmup_steps
    progress = (min(step, config.schedule_steps) - config.warmup_steps - 1) / decay
    share = SCHEDULES[config.schedule](progress)
    return config.final_lr * (1 - share) + config.lr * share
