"""What an algorithm may be made of: names of the tables, ranges of the numbers, presets. No torch: the API imports it.

A preset is a row of values for fields of `records.RunConfig`, those that its paper speaks of; everything else keeps its
default. What a user sets beside a preset wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .messages import AlgorithmConfig

# Keys of the tables of `advantages`, `objectives` and `corrections`; a test holds them together.
NAMES: dict[str, tuple[str, ...]] = {
    "advantage": ("group_norm", "mean_only", "leave_one_out", "batch_norm"),
    "ratio": ("token", "sequence"),
    "old_policy": ("behaviour", "trainer", "trainer_noisy"),
    "clip": ("ppo", "dual", "cispo", "none"),
    "aggregation": ("token_mean", "sequence_mean", "constant"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "overlong": ("keep", "filter", "penalty"),
    "correction": (
        "none",
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "geometric_mask",
    ),
}

_PPO = {"ratio": "token", "clip": "ppo", "clip_low": 0.2, "clip_high": 0.2}
PRESETS: dict[str, Mapping[str, Any]] = {
    "none": {},
    # arXiv 2402.03300, eq. 3 and 4; β of section 4.2. It gives no ε: PPO's.
    "grpo": {
        **_PPO,
        "advantage": "group_norm",
        "aggregation": "sequence_mean",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
        "kl_in": "loss",
    },
    # arXiv 2503.14476, eq. 8 to 13, ε of section 4.1; the buffer is a fifth of the longest completion there, too.
    "dapo": {
        **_PPO,
        "advantage": "group_norm",
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
        "overlong": "penalty",
        "overlong_penalty": 1.0,
    },
    # arXiv 2503.20783, section 3.2; the divisor is the longest completion.
    "dr_grpo": {**_PPO, "advantage": "mean_only", "aggregation": "constant", "kl_coef": 0.0},
    # arXiv 2507.18071, eq. 5 to 7, ε of section 5.1.
    "gspo": {
        "advantage": "group_norm",
        "ratio": "sequence",
        "clip": "ppo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean",
        "kl_coef": 0.0,
    },
    # arXiv 2506.13585, eq. 4 and 5, without a lower bound. It gives no upper one; 5 is what arXiv 2510.13786 uses.
    "cispo": {
        "advantage": "group_norm",
        "ratio": "token",
        "clip": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "token_mean",
        "kl_coef": 0.0,
    },
    # arXiv 2402.14740: REINFORCE on whole completions, so the loss is a sum over tokens. Its β differs by task.
    "rloo": {
        "advantage": "leave_one_out",
        "ratio": "token",
        "clip": "none",
        "aggregation": "constant",
        "loss_divisor": 1.0,
        "kl_coef": 0.03,
        "kl_estimator": "k1",
        "kl_in": "reward",
    },
    # arXiv 2501.03262, eq. 8 to 10; its β differs by task. A group of equal rewards has a signal beside the others.
    "reinforce_pp": {
        **_PPO,
        "advantage": "batch_norm",
        "aggregation": "token_mean",
        "kl_coef": 0.01,
        "kl_estimator": "k1",
        "kl_in": "reward",
        "drop_zero_variance": False,
    },
    # arXiv 1707.06347, eq. 7 and algorithm 1, the group's mean in the place of the critic. K is open there; 4 is usual.
    "ppo_clip": {**_PPO, "advantage": "mean_only", "aggregation": "token_mean", "kl_coef": 0.0, "epochs": 4},
}

# Bounds of the corrections that mask, when nobody sets them. Tokens: IcePop's (arXiv 2510.18855); sequences: TRL's.
# Geometric means: noise of the first stages alone moves them by 0.02 to 0.2 (`mismatch_kl`).
MASKS = {"token_mask": (0.5, 5.0), "sequence_mask": (0.0, 3.0), "geometric_mask": (0.9, 1.1)}

LEAVE = "leave it unset for the default"


def problems(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Yield (field, text) of everything wrong; the text says limit, value and way out."""
    for field, known in NAMES.items():
        if (name := getattr(config, field)) not in known:
            yield field, f"must be one of {', '.join(known)}, got {name!r}; this version has no other"
    for field, low, high in _RANGES:
        if not low <= (value := getattr(config, field)) <= high:
            yield field, f"must be in [{low:g}, {high:g}], got {value:g}; {LEAVE}"
    yield from _clips(config)
    yield from _corrections(config)
    if config.overlong == "penalty" and not 1 <= config.overlong_buffer <= config.max_tokens:
        text = f"must be in [1, max_tokens = {config.max_tokens}], got {config.overlong_buffer}"
        yield "overlong_buffer", f"{text}; it is the last part of max_tokens, where the penalty grows"


_RANGES = (
    ("clip_low", 0, 1),  # a ratio is never below 0
    ("clip_high", 0, 1e9),
    ("kl_coef", 0, 100),
    ("entropy_coef", 0, 100),
    ("overlong_penalty", 0, 1e6),
    ("loss_divisor", 1e-3, 1e9),
    ("epochs", 1, 64),
    ("mini_batches", 1, 4096),
)


def _clips(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if config.clip in ("ppo", "dual") and config.clip_low > config.clip_high:
        text = f"must be at most clip_high = {config.clip_high:g}, got {config.clip_low:g}"
        yield "clip_low", f"{text}; raise clip_high: it is rising probabilities that need the room"
    least = 1 + config.clip_high
    if config.clip == "dual" and not least < config.dual_clip <= 1e9:
        text = f"must be above 1 + clip_high = {least:g} and at most 1e9, got {config.dual_clip:g}"
        yield "dual_clip", f"{text}; below, it would undo the upper clip: raise it or use LOSS_CLIP_PPO"


def _corrections(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if config.correction != "none" and config.old_policy == "behaviour":
        text = f"must be trainer with a correction, got behaviour with {config.correction}"
        yield "old_policy", f"{text}; the ratio to the behaviour corrects already: use MISMATCH_CORRECTION_NONE"
    if config.correction in ("token_truncate", "sequence_truncate") and not 0 < config.tis_cap <= 1e6:
        yield "tis_cap", f"must be in (0, 1e6], got {config.tis_cap:g}; MISMATCH_CORRECTION_NONE is without a cap"
    if config.correction not in MASKS:
        return
    if not 0 <= config.mask_low <= 1:
        yield "mask_low", f"must be in [0, 1], got {config.mask_low:g}; 1 is a token that both sides agree on"
    if not (config.mask_high >= 1 and math.isfinite(config.mask_high)):
        yield "mask_high", f"must be finite and at least 1, got {config.mask_high:g}; 1 is what both sides agree on"
