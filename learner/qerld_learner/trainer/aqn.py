"""Adaptive quantisation noise: the schedule of σ and the seed of a version's noise (QeRL, arXiv 2510.11696, eq. 8).

M = `schedule_steps`, K = `stages`; step s ≥ 1 is in stage k = ⌊(s−1)/⌊M/K⌋⌋. Stage 0 has no added noise; after it σ
decays from σ_start in stage 1, by a function of `DECAYS`. Beyond M the last stage's value holds. σ depends on the
learner's step alone: passes over a batch, passes over the data and restarts do not move it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from .messages import AqnConfig


class AqnConfigError(ValueError):
    """A field of the schedule is outside its range."""


def exponential(start: float, end: float, stage: int, stages: int) -> float:
    """Return σ_start · (σ_end/σ_start)^((k−1)/(K−2)): the paper's code, which has σ_end in the last stage."""
    return float(start * (end / start) ** progress(stage, stages))


def exponential_paper(start: float, end: float, stage: int, stages: int) -> float:
    """Return σ_start · (σ_end/σ_start)^((k−1)/(K−1)): the paper's formula, which never reaches σ_end."""
    return float(start * (end / start) ** ((stage - 1) / (stages - 1)))


def linear(start: float, end: float, stage: int, stages: int) -> float:
    """Return σ on a straight line over the stages."""
    at = progress(stage, stages)
    return start * (1 - at) + end * at


def cosine(start: float, end: float, stage: int, stages: int) -> float:
    """Return σ on half a cosine: slow at both ends."""
    return end + (start - end) * (1 + math.cos(math.pi * progress(stage, stages))) / 2


def logarithmic(start: float, end: float, stage: int, stages: int) -> float:
    """Return σ_start − (σ_start − σ_end) · ln k / ln(K−1): falls fast, then ever more slowly."""
    at = math.log(stage) / math.log(stages - 1) if stages > 2 else 0.0
    return start * (1 - at) + end * at


def progress(stage: int, stages: int) -> float:
    """Return 0 in stage 1 and 1 in the last one; a single noisy stage is the first."""
    return (stage - 1) / (stages - 2) if stages > 2 else 0.0


# The paper shows linear, cosine and logarithmic decay in a figure only; their formulas are the plain ones.
DECAYS: dict[str, Callable[[float, float, int, int], float]] = {
    "exponential": exponential,
    "exponential_paper": exponential_paper,
    "linear": linear,
    "cosine": cosine,
    "logarithmic": logarithmic,
}
SCHEDULES = ("none", *DECAYS)


def check(config: AqnConfig) -> None:
    """Raise `AqnConfigError` when the schedule cannot be computed; says field, limit, value and way out."""
    if config.schedule not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise AqnConfigError(f"aqn.schedule must be one of {known}, got {config.schedule!r}; this version has no other")
    if config.schedule == "none":
        return
    if not 0 < config.sigma_start < float("inf"):
        raise AqnConfigError(
            f"aqn.sigma_start must be finite and > 0, got {config.sigma_start}; use schedule 'none' for no noise"
        )
    if not 0 < config.sigma_end <= config.sigma_start:
        raise AqnConfigError(
            f"aqn.sigma_end must be in (0, sigma_start = {config.sigma_start}], got {config.sigma_end}; it decays"
        )
    if config.stages < 2:
        raise AqnConfigError(
            f"aqn.stages must be ≥ 2 (the first has no noise), got {config.stages}; use schedule 'none' for no noise"
        )
    if config.schedule_steps < 1:
        raise AqnConfigError(
            f"aqn.schedule_steps must be ≥ 1, got {config.schedule_steps}; set it to the planned number of steps"
        )


def stage_at(config: AqnConfig, step: int) -> int:
    """Return the stage 0 … K−1 of learner step `step`; steps ≤ 1 are in stage 0.

    With fewer steps than stages a stage lasts one step, so the schedule is cut off rather than squeezed.
    """
    last_step = min(step, config.schedule_steps)
    return min(max(0, last_step - 1) // stage_length(config), config.stages - 1)


def stage_length(config: AqnConfig) -> int:
    """Return the steps of a stage, ⌊M/K⌋; the last one has what is left, too."""
    return max(1, config.schedule_steps // config.stages)


def sigma_at(config: AqnConfig, step: int) -> float:
    """Return σ of the version made at learner step `step` (version 0 has step 0: no noise)."""
    if config.schedule == "none":
        return 0.0
    check(config)
    stage = stage_at(config, step)
    if stage == 0:
        return 0.0
    return DECAYS[config.schedule](config.sigma_start, config.sigma_end, stage, config.stages)


def noise_seed(run_seed: int, version: int) -> int:
    """Return the 63-bit seed of a version's noise: the same on every machine, unrelated between versions."""
    digest = hashlib.sha256(f"qerld-noise:{run_seed}:{version}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
