"""Settings of the policy server. TOML file < environment QERLD_POLICY_… < flags; see flags.py for the merging."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")  # noqa: S104
# A version takes one slot with its noise and one without (canary, evaluation).
SLOTS_PER_VERSION = 2


class PolicySettings(BaseSettings):
    """Settings of `qerld policy`."""

    model_config = SettingsConfigDict(env_prefix="QERLD_POLICY_", extra="forbid")

    model: Path = Field(description="Folder of the base model (Hugging Face layout, NVFP4, MXFP4, NF4 or bf16).")
    learner: str = Field("127.0.0.1:50051", description="host:port of the learner that this server attaches to.")
    host: str = Field("127.0.0.1", description="Address that the gRPC and the metrics port bind to.")
    port: int = Field(50052, ge=0, le=65535, description="Port of PolicyReplicaService; 0 takes a free one.")
    endpoint: str | None = Field(
        None, description="host:port at which the learner reaches PolicyReplicaService; unset: host and port."
    )
    openai_port: int = Field(
        8000, ge=0, le=65535, description="Port of the OpenAI API, on loopback; 0 takes a free one."
    )
    reflection: bool = Field(False, description="Serve gRPC reflection, for grpcurl and the like.")
    metrics_port: int = Field(9465, ge=0, le=65535, description="Port of the Prometheus metrics; 0 takes a free one.")
    cache_dir: Path = Field(
        Path("runs/policy"), description="Folder for downloaded adapters; one policy server a folder."
    )
    ready_file: Path | None = Field(None, description="File that gets the ports, as JSON, once the server serves.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of activations; auto is float32 on the CPU and bfloat16 on a GPU."
    )
    max_loras: int = Field(
        16, ge=SLOTS_PER_VERSION, description="Adapter slots; a version takes two, one with and one without its noise."
    )
    max_cpu_loras: int | None = Field(
        None, description="Adapters that the engine keeps in host memory; unset: max_loras + 2."
    )
    max_lora_rank: int = Field(32, ge=1, le=512, description="Largest LoRA rank.")
    max_model_len: int = Field(
        2048,
        ge=2,
        description="Most tokens of prompt and completion together; cut to what the model's positions allow.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Most completions that are sampled at the same time.")
    gpu_memory_utilization: float = Field(
        0.5, gt=0, lt=1, description="Share of the GPU's memory for the engine; the trainer may need the rest."
    )
    cpu_kv_cache_gib: int = Field(1, ge=1, description="Size of the key-value cache in GiB, on the CPU only.")
    enforce_eager: bool = Field(
        False, description="No compilation and no CUDA graphs: starts sooner, samples slower. Always so on the CPU."
    )
    nvfp4_kernel: Literal["marlin", "qerld"] = Field(
        "marlin", description="Products with NVFP4 weights on a GPU: by vLLM's Marlin, or by qerld's kernels."
    )
    lora_kernel: Literal["vllm", "qerld"] = Field(
        "vllm",
        description="Products with adapters on a GPU: by vLLM's kernels, or by qerld's (bf16, fp16; ranks up to 128).",
    )
    seed: int = Field(0, ge=0, description="Seed of the engine; completions have their own.")
    report_seconds: float = Field(5.0, gt=0, le=10, description="Longest time between two reports to the learner.")
    reconnect_seconds: float = Field(10.0, gt=0, description="Longest wait before attaching to the learner again.")
    download_seconds: float = Field(
        600.0, gt=0, description="Deadline of one download attempt; the next one resumes where it ended."
    )
    drain_seconds: float = Field(15.0, ge=0, description="How long running requests may take to end after SIGTERM.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO", description="Least severe line that is logged."
    )

    @property
    def version_slots(self) -> int:
        """Versions that fit at the same time, whatever their noise."""
        return self.max_loras // SLOTS_PER_VERSION

    @property
    def host_loras(self) -> int:
        """Adapters in host memory."""
        return self.max_loras + 2 if self.max_cpu_loras is None else self.max_cpu_loras

    @field_validator("learner", "endpoint")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None:
            host, _, port = value.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError("must be host:port with a port from 1 to 65535")
        return value

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.host_loras < self.max_loras + 2:
            raise ValueError(
                f"max_cpu_loras: must be at least max_loras + 2 = {self.max_loras + 2}, got {self.max_cpu_loras}; "
                f"raise max_cpu_loras, leave it unset, or lower max_loras to {self.max_cpu_loras} - 2"
            )
        if self.host in WILDCARD_HOSTS and self.endpoint is None:
            raise ValueError(
                f"endpoint: must be set when host is {self.host}, since no learner can call that address; set endpoint "
                "to the host:port by which the learner reaches this machine"
            )
        _check_ports({name: getattr(self, name) for name in ("port", "openai_port", "metrics_port")})
        return self


def _check_ports(ports: dict[str, int]) -> None:
    taken: dict[int, str] = {}
    for name, port in ports.items():
        if port and port in taken:
            raise ValueError(
                f"{name}: must differ from {taken[port]}, both are {port}; change one, or 0 takes a free one"
            )
        taken[port] = name
