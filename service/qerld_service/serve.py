"""`qerld serve`: learner and policy server on one machine, supervised."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from qerld_kernels.exclusive import FolderError, FolderLock, PortError, bind_error, require_free_port

from qerld_service import flags
from qerld_service.supervise import USAGE_ERROR, ChildGaveUpError, ChildSpec, RestartPolicy, Supervisor

LOOPBACK = "127.0.0.1"
# Settings of the roles that follow from those of serve, and which.
DERIVED = {
    "learner": {
        "model": "model",
        "host": "host",
        "port": "port",
        "metrics_port": "learner_metrics_port",
        "ready_file": "ready_file",
    },
    "policy": {
        "model": "model",
        "learner": "host and port",
        "openai_port": "openai_port",
        "metrics_port": "policy_metrics_port",
        "ready_file": "ready_file",
    },
}


class ServeSettings(BaseSettings):
    """Settings of `qerld serve`; those of the two roles pass through `learner` and `policy`."""

    model_config = SettingsConfigDict(env_prefix="QERLD_SERVE_", extra="forbid", env_nested_delimiter="__")

    model: Path = Field(description="Folder of the base model (Hugging Face layout, NVFP4, MXFP4, NF4 or bf16).")
    state_dir: Path = Field(
        Path("runs/serve"), description="Folder of the store, the policy versions and downloaded adapters."
    )
    host: str = Field("127.0.0.1", description="Address that the public gRPC endpoint binds to.")
    port: int = Field(50051, ge=0, le=65535, description="Port of the public gRPC endpoint; 0 takes a free one.")
    openai_port: int = Field(
        8000, ge=0, le=65535, description="Port of the OpenAI endpoint, on loopback; 0 takes a free one."
    )
    learner_metrics_port: int = Field(
        9464, ge=0, le=65535, description="Port of the learner's Prometheus metrics; 0 takes a free one."
    )
    policy_metrics_port: int = Field(
        9465, ge=0, le=65535, description="Port of the policy server's Prometheus metrics; 0 takes a free one."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the roles compute; auto asks nvidia-smi.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of activations; auto is float32 on the CPU and bfloat16 on a GPU."
    )
    ready_file: Path | None = Field(None, description="File that gets the ports, as JSON, once both roles serve.")
    restart_delay: float = Field(
        1.0, gt=0, description="Seconds until a dead child is started again; doubles up to 30."
    )
    quick_deaths: int = Field(5, ge=1, description="Quick deaths in a row of one child after which serve gives up.")
    stop_grace: float = Field(20.0, ge=0, description="Seconds between SIGTERM and SIGKILL when children are stopped.")
    learner: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the learner (`qerld config learner`); repeatable."
    )
    policy: dict[str, Any] = Field(
        default_factory=dict,
        description="Further settings of the policy server (`qerld config policy`); repeatable.",
    )

    @field_validator("learner", "policy")
    @classmethod
    def _not_derived(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        derived = DERIVED[str(info.field_name)]
        named = {name.replace("-", "_"): given for name, given in value.items()}
        for name in sorted(named.keys() & derived.keys()):
            raise ValueError(f"{name}: follows from serve's own {derived[name]}; set that instead")
        return named


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qerld serve",
        description="Start learner and policy server on this machine. A child that dies is started again; after "
        "repeated quick deaths the command ends with status 1 and the end of that child's log, and at once with status "
        "2 when no restart can help. SIGTERM or Ctrl-C stops all.",
        usage="qerld serve --model FOLDER [--SETTING VALUE ...]",
    )
    flags.add_flags(parser, ServeSettings)
    settings = flags.parsed(ServeSettings, parser, argv)
    if not (settings.model / "config.json").is_file():
        parser.error(
            f"model: {settings.model} holds no config.json; give a model folder (`qerld quantize` makes one, "
            "`qerld doctor --model FOLDER` checks one)"
        )
    try:
        # In this order: the folder says who holds it, and that one holds the ports, too.
        with FolderLock(settings.state_dir, "state_dir", "qerld serve"):
            require_free_ports(settings)
            asyncio.run(serve(settings))
    except (FolderError, PortError) as error:
        sys.stderr.write(f"qerld serve: {error}\n")
        return USAGE_ERROR
    except ChildGaveUpError as error:
        sys.stderr.write(f"qerld serve: {error}\n")
        return USAGE_ERROR if error.wrong_usage else 1
    return 0


def require_free_ports(settings: ServeSettings) -> None:
    """Look whether the ports are free and differ, before anything is started; raises PortError."""
    ports = {
        "port": (settings.host, settings.port),
        "openai_port": (LOOPBACK, settings.openai_port),
        "learner_metrics_port": (settings.host, settings.learner_metrics_port),
        "policy_metrics_port": (str(settings.policy.get("host", LOOPBACK)), settings.policy_metrics_port),
    }
    names: dict[int, str] = {}
    for name, (_host, port) in ports.items():
        if port and (other := names.setdefault(port, name)) != name:
            raise PortError(f"{name}: must differ from {other}, both are {port}; give another, or 0 for a free one")
    for name, (host, port) in ports.items():
        require_free_port(name, host, port)


async def serve(settings: ServeSettings) -> None:
    """Run both roles until SIGTERM or SIGINT; raises ChildGaveUpError."""
    policy = RestartPolicy(
        first_delay=settings.restart_delay, quick_deaths=settings.quick_deaths, stop_grace=settings.stop_grace
    )
    if settings.ready_file is not None:
        prepare(settings.ready_file)
    supervisor = Supervisor(child_specs(settings), policy, say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    announcer = asyncio.create_task(announce(settings, supervisor))
    try:
        await supervisor.run()
    finally:
        announcer.cancel()
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)
    say("serve", "stopped")


def prepare(ready_file: Path) -> None:
    """Remove an earlier one; raises FolderError when it could not be written later."""
    try:
        ready_file.unlink(missing_ok=True)
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=ready_file.parent).close()
    except OSError as error:
        raise FolderError(f"ready_file: {error}; give one in a folder that can be written") from error


async def announce(settings: ServeSettings, supervisor: Supervisor) -> None:
    """Say once where both roles serve, and write the ready file."""
    ready = await supervisor.all_ready()
    learner, policy = ready["learner"], ready["policy"]
    device, dtype = device_and_dtype(settings)
    info = {
        "target": f"{reachable(settings.host)}:{learner['port']}",
        "port": learner["port"],
        "learner_metrics_port": learner.get("metrics_port"),
        "openai_port": policy.get("openai_port"),
        "policy_metrics_port": policy.get("metrics_port"),
        "device": device,
        "dtype": dtype,
        "pids": {name: child.process.pid for name, child in supervisor.children.items() if child.process},
    }
    if settings.ready_file is not None:
        write_json(settings.ready_file, info)
    say("serve", f"ready: gRPC {info['target']}, OpenAI http://127.0.0.1:{info['openai_port']}/v1 (Ctrl-C stops)")


def child_specs(settings: ServeSettings) -> list[ChildSpec]:
    """Commands of both roles. Free ports are chosen here, so that a restarted child comes back where it was."""
    state = settings.state_dir.resolve()
    ready = state / "ready"
    ready.mkdir(parents=True, exist_ok=True)
    device, dtype = device_and_dtype(settings)
    given = {settings.port, settings.openai_port, settings.learner_metrics_port, settings.policy_metrics_port}
    spare = iter(free_ports(5, given))
    port = settings.port or next(spare)
    learner = {
        "model": settings.model.resolve(),
        "state_dir": state / "learner",
        "host": settings.host,
        "port": port,
        "metrics_port": settings.learner_metrics_port or next(spare),
        "device": device,
        "dtype": dtype,
        **settings.learner,
    }
    policy = {
        "model": settings.model.resolve(),
        "learner": f"{reachable(settings.host)}:{port}",
        "port": next(spare),
        "openai_port": settings.openai_port or next(spare),
        "metrics_port": settings.policy_metrics_port or next(spare),
        "cache_dir": state / "policy",
        "dtype": dtype,
        **settings.policy,
    }
    env = {} if device == "cuda" else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(half_the_cores()))}
    return [
        child("learner", "qerld_learner", learner, ready, env),
        child("policy", "qerld_service.policy", policy, ready, env),
    ]


def device_and_dtype(settings: ServeSettings) -> tuple[str, str]:
    """What `auto` means on this machine."""
    device = ("cuda" if has_gpu() else "cpu") if settings.device == "auto" else settings.device
    dtype = ("bfloat16" if device == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    return device, dtype


def half_the_cores() -> int:
    """CPU threads of each role. Trainer and engine compute at the same time: with more threads than cores every barrier
    waits for one that has no core (a step on 2 cores took ten times longer)."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def child(name: str, module: str, values: dict[str, Any], ready: Path, env: dict[str, str]) -> ChildSpec:
    ready_file = ready / f"{name}.json"
    command = [sys.executable, "-m", module, "--ready-file", str(ready_file)]
    for key, value in values.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    return ChildSpec(name, tuple(command), ready_file, env)


def has_gpu() -> bool:
    """Whether nvidia-smi lists a GPU; torch is not asked, importing it takes seconds."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """Ports that nobody has, none of them in `besides`.

    They are below those that the kernel gives to outgoing connections: such a one could be taken before its role binds
    it, and again while the role restarts.
    """
    candidates = random.sample(sorted(set(range(20_000, 32_768)) - set(besides)), 1_000)
    return list(islice((port for port in candidates if bind_error(LOOPBACK, port) is None), count))


def reachable(host: str) -> str:
    """The address by which this machine reaches what binds to `host`."""
    return LOOPBACK if host in ("0.0.0.0", "::", "[::]") else host  # noqa: S104


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.replace(path)


def say(name: str, line: str) -> None:
    sys.stdout.write(f"{name:>7} | {line}\n")
    sys.stdout.flush()
