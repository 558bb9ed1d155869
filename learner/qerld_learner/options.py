"""Options of the learner process, and what it knows of its base model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class LearnerOptions:
    """Options of the process; times in seconds.

    Attributes:
        state_dir: Folder of the store, the versions and the lock.
        base_model: Folder of the checkpoint, NVFP4, MXFP4 or bf16, that policy servers serve, too.
        store_url: SQLAlchemy URL; None means SQLite in `state_dir`.
        dtype: Number format of the trainer; policy servers must use the same.
        device: Device of the trainer, "cpu" or "cuda".
        token_budget: Tokens in one micro-batch of the trainer.
        cache_dequantized: Keep the base's weights dequantised in the trainer.
        activation_checkpointing: Recompute layers in the trainer's backward.
        trainer_threads: OMP threads of the trainer; None leaves the environment's.
        admission_timeout: How long Sample waits for room in a run's buffer.
        admission_retry: RetryInfo of a Sample or SubmitPrompts that found no room.
        queue_limit: Groups of a run that SubmitPrompts may have queued.
        lease: How long a reward worker may keep a rollout, unless it says otherwise.
        keep_versions: Newest versions whose folders are kept, beside pinned and referenced ones.
        canary_probes: Rollouts of the trained batch that the canary scores, and the trainer for `behaviour_gap`.
        trainer_attempts: Trainer deaths in one step after which the run is paused.
    """

    state_dir: Path
    base_model: Path
    store_url: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    token_budget: int = 4096
    cache_dequantized: bool = False
    activation_checkpointing: bool = False
    trainer_threads: int | None = None
    admission_timeout: float = 30.0
    admission_retry: float = 2.0
    queue_limit: int = 8192
    lease: float = 60.0
    keep_versions: int = 6
    canary_probes: int = 4
    trainer_attempts: int = 3


@dataclass(frozen=True)
class ModelInfo:
    """The base model as policy servers must have it; `max_model_len` is the attached servers' smallest, if any."""

    folder: Path
    base_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    max_model_len: int | None
