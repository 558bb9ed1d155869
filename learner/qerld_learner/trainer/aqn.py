"""Adaptive quantisation noise: the schedule of σ and the seed of a version's noise (QeRL, arXiv 2510.11696, eq. 8).

M = `schedule_steps`, K = `stages`; step s ≥ 1 is in stage k = ⌊(s−1)/⌊M/K⌋⌋. Stage 0 has no added noise. After it
σ(k) = σ_start · (σ_end/σ_start)^((k−1)/D) with D = K−1 in the paper, which never reaches σ_end, and D = K−2 in its
code, which does in stage K−1. Beyond M the last stage's value holds.
"""

from __future__ import annotations

import hashlib

from .messages import AqnConfig


class AqnConfigError(ValueError):
    """A field of the schedule is outside its range."""


def check(config: AqnConfig) -> None:
    """Raise `AqnConfigError` when the schedule cannot be computed; says field, limit, value and way out."""
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
    length = max(1, config.schedule_steps // config.stages)
    last_step = min(step, config.schedule_steps)
    return min(max(0, last_step - 1) // length, config.stages - 1)


def sigma_at(config: AqnConfig, step: int) -> float:
    """Return σ of the version made at learner step `step` (version 0 has step 0: no noise).

    With K = 2 the one noisy stage has σ_start under both readings.
    """
    if config.schedule == "none":
        return 0.0
    check(config)
    stage = stage_at(config, step)
    if stage == 0:
        return 0.0
    last = config.stages - 1 if config.reading == "paper" else config.stages - 2
    exponent = (stage - 1) / last if last else 0.0
    return float(config.sigma_start * (config.sigma_end / config.sigma_start) ** exponent)


def noise_seed(run_seed: int, version: int) -> int:
    """Return the 63-bit seed of a version's noise: the same on every machine, unrelated between versions."""
    digest = hashlib.sha256(f"qerld-noise:{run_seed}:{version}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
