"""What the policy engine takes, gives and raises; no vLLM here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qerld_service.adapters import AdapterKey

MAX_STOPS = 64  # each is looked for after every token; the learner's API has the same limits
MAX_STOP_STRING = 256
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank may be


class EngineDiedError(RuntimeError):
    """vLLM's engine process has died; the engine must be started again."""


class EngineSettingsError(ValueError):
    """vLLM refuses the model or a setting: starting again cannot help."""


class RequestError(ValueError):
    """A prompt or sampling field that cannot be served."""


@dataclass(frozen=True)
class EngineConfig:
    """How to start the engine. `model`: a local folder, in 4 bits or plain (docs/formats.md)."""

    model: Path
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on the CPU (bf16 products are ten times slower on AVX2)."""
    max_loras: int = 4
    max_cpu_loras: int | None = None
    """Adapters in host memory; None: max_loras + 2, the fewest with which vLLM never evicts one in use."""
    max_lora_rank: int = 32
    """Rounded up to a rank that vLLM's kernels know."""
    max_model_len: int | None = None
    """Tokens of prompt and completion; None: all that the model's positions allow."""
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.85
    """Share of the GPU's memory for weights and key–value cache."""
    cpu_kv_cache_gib: int = 1
    """GiB of key–value cache on the CPU."""
    enforce_eager: bool | None = None
    """No compilation, no CUDA graphs; None: only on the CPU."""
    nvfp4_kernel: Literal["marlin", "qerld"] = "marlin"
    """What multiplies by NVFP4 weights on a GPU."""
    lora_kernel: Literal["vllm", "qerld"] = "vllm"
    """What adds LoRA on a GPU."""
    tensor_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_loras < 1:
            raise ValueError(f"max_loras: must be at least 1, got {self.max_loras}")
        if not 1 <= self.max_lora_rank <= LORA_RANKS[-1]:
            raise ValueError(f"max_lora_rank: must be from 1 to {LORA_RANKS[-1]}, got {self.max_lora_rank}")


@dataclass(frozen=True)
class Sampling:
    """The sampling that keeps behaviour log-probabilities exact: no truncation, no penalties."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    """0 takes the most probable token: for evaluation, never for training."""
    seed: int | None = None
    """Completion i is drawn with seed + i."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delta:
    """New tokens of completion `index`: logprobs[j] is the log-probability of token_ids[j] after temperature.

    `finish_reason` ("stop", "length" or "abort") comes with the last delta of a completion. `text` is without the stop
    string and without special tokens.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    text: str


@dataclass(frozen=True)
class EngineStats:
    """`in_flight`: running requests by adapter; `noise_realised`: realised σ / intended σ by loaded adapter."""

    capacity: int
    in_flight: Mapping[AdapterKey, int]
    noise_realised: Mapping[AdapterKey, float]
