"""Settings of the learner: TOML file < environment QERLD_LEARNER_… < flags.

`LearnerSettings.parse` gives one flag a field, with its help from the field's description: a setting is written once.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from qerld_learner.core import LearnerOptions

ENV_PREFIX = "QERLD_LEARNER_"


class SettingsError(ValueError):
    """Settings that do not hold together; one line a problem, with the field."""


class LearnerSettings(BaseSettings):
    """Settings of `qerld learner`; times in seconds."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid")

    model: Path = Field(description="Folder of the base model, the very one that policy servers serve.")
    state_dir: Path = Field(
        Path("runs/learner"), description="Folder of the store and the policy versions; one learner a folder."
    )
    store_url: str | None = Field(
        None, description="SQLAlchemy URL of the store; unset: SQLite in state_dir. Only SQLite is tested."
    )
    host: str = Field("127.0.0.1", description="Address that the gRPC and the metrics port bind to.")
    port: int = Field(50051, ge=0, le=65535, description="Port of the gRPC API; 0 takes a free one.")
    metrics_port: int = Field(9464, ge=0, le=65535, description="Port of the Prometheus metrics; 0 takes a free one.")
    ready_file: Path | None = Field(None, description="File that gets the ports, as JSON, once the learner serves.")
    reflection: bool = Field(False, description="Serve gRPC reflection, for grpcurl and the like.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is logged.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the trainer computes; auto takes an NVIDIA GPU when there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of activations; policy servers must use the same. Auto: float32 on the CPU."
    )
    token_budget: int = Field(4096, ge=16, description="Prefix-tree tokens in one micro-batch of the trainer.")
    cache_dequantized: bool = Field(
        False,
        description="Keep the base's weights dequantised in the trainer: faster, 8 times their memory in float32.",
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute layers in the trainer's backward: slower, less memory."
    )
    trainer_threads: int | None = Field(None, ge=1, description="CPU threads of the trainer; unset: all.")
    admission_timeout: float = Field(30.0, gt=0, description="How long Sample waits for room in a run's buffer.")
    queue_limit: int = Field(8192, ge=1, description="Groups of a run that SubmitPrompts may have queued.")
    lease: float = Field(
        60.0, gt=0, description="How long a reward worker may keep a rollout, unless it says otherwise."
    )
    keep_versions: int = Field(6, ge=2, description="Newest versions whose folders are kept, beside those in use.")
    canary_probes: int = Field(
        4, ge=1, description="Rollouts of the trained batch that a canary scores, and the trainer for `behaviour_gap`."
    )
    evaluation_dir: Path | None = Field(
        None, description="Folder of the problem files that runs may name for held-out evaluation; unset: none."
    )
    evaluation_parallel: int = Field(64, ge=1, description="Completions that one evaluation has in flight.")
    replica_timeout: float = Field(
        30.0,
        gt=10,
        description="Silence after which a policy server counts as lost; they report at least every ten seconds.",
    )
    stop_grace: float = Field(
        10.0, ge=0, description="How long RPCs may finish after SIGTERM; keep it below the pod's grace period."
    )

    def options(self) -> LearnerOptions:
        """Return the core's options, with `auto` resolved."""
        device = self.device if self.device != "auto" else "cuda" if Path("/dev/nvidia0").exists() else "cpu"
        dtype = self.dtype if self.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
        same = ("state_dir", "store_url", "token_budget", "cache_dequantized", "activation_checkpointing")
        more = ("trainer_threads", "admission_timeout", "queue_limit", "lease", "keep_versions", "canary_probes")
        evaluation = ("evaluation_dir", "evaluation_parallel")
        return LearnerOptions(
            base_model=self.model,
            device=device,
            dtype=dtype,
            **{name: getattr(self, name) for name in same + more + evaluation},
        )

    @classmethod
    def layered(cls, file: Mapping[str, Any], given: Mapping[str, Any]) -> LearnerSettings:
        """Merge a parsed TOML file, the environment and given values, in rising order.

        Raises:
            SettingsError: One line a problem, with field, limit, value and way out.
        """

        class Layered(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: Any
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                return (
                    named["init_settings"],
                    named["env_settings"],
                    InitSettingsSource(settings_cls, dict(file)),
                )

        _refuse_unknown_variables(cls.model_fields)
        try:
            return Layered(**given)
        except ValidationError as error:
            raise SettingsError("\n".join(_problem(dict(entry)) for entry in error.errors())) from error

    @classmethod
    def parse(cls, argv: Sequence[str]) -> tuple[LearnerSettings, argparse.Namespace]:
        """Return the settings and the parsed flags; wrong ones print the usage and end the process with status 2."""
        parser = _parser(cls.model_fields)
        arguments = parser.parse_args(argv)
        given = {name: value for name, value in vars(arguments).items() if name in cls.model_fields}
        try:
            return cls.layered(_read_toml(arguments.config), given), arguments
        except SettingsError as error:
            parser.error(str(error))


def _parser(fields: Mapping[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qerld learner",
        usage="qerld learner --model FOLDER [--SETTING VALUE ...]",
        description="Run the learner: the gRPC API, the store, the control loop of each run and the trainer process. "
        "It serves until SIGTERM or Ctrl-C; what was acknowledged is durable and the next start goes on with it.",
        epilog=f"Every flag can also come from the environment ({ENV_PREFIX}…) or the TOML file; flags win.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with these settings")
    parser.add_argument("--print-config", action="store_true", help="print the effective settings as JSON and exit")
    for name, info in fields.items():
        default = "required" if info.is_required() else f"default: {'unset' if info.default is None else info.default}"
        text = f"{info.description} [{ENV_PREFIX}{name.upper()}; {default}]".replace("%", "%%")
        boolean: dict[str, Any] = {"nargs": "?", "const": "true"} if info.annotation is bool else {}
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, metavar="VALUE", help=text, **boolean
        )
    return parser


def _refuse_unknown_variables(fields: Mapping[str, Any]) -> None:
    known = {f"{ENV_PREFIX}{name.upper()}" for name in fields}
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known)
    if unknown:
        raise SettingsError(f"unknown environment variables {', '.join(unknown)}; see `qerld learner --help`")


def _problem(entry: Mapping[str, Any]) -> str:
    field = ".".join(map(str, entry["loc"])) or "settings"
    if entry["type"] == "missing":
        return f"{field}: missing; give --{field.replace('_', '-')} or {ENV_PREFIX}{field.upper()}"
    return f"{field}: {entry['msg']} (got {entry['input']!r})"


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from error
