"""What policy servers and the learner tell each other: the learner's own types, as in `records`."""

from __future__ import annotations

from dataclasses import dataclass

from .records import NoiseRecord


@dataclass(frozen=True)
class ReplicaHello:
    replica_id: str
    endpoint: str
    base_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    engine_version: str
    slots: int
    max_lora_rank: int
    max_model_len: int
    dtype: str


@dataclass(frozen=True)
class AdapterStatus:
    run: str
    version: int
    serving: bool
    in_flight: int
    load_seconds: float
    error: str
    noise_ratio: float
    retrying: bool = False


@dataclass(frozen=True)
class ReplicaReport:
    adapters: tuple[AdapterStatus, ...]
    generation: int
    reconciled: bool
    error: str


@dataclass(frozen=True)
class DesiredVersion:
    run: str
    version: int
    adapter_sha256: str
    noise: NoiseRecord
    live: bool


@dataclass(frozen=True)
class DesiredState:
    generation: int
    versions: tuple[DesiredVersion, ...]
