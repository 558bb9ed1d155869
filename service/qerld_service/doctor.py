"""`qerld doctor`: what of this machine, its packages and a model folder stands in the way, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qerld_kernels.exclusive import bind_error
from rich.console import Console
from rich.table import Column, Table

from qerld_service.checks import Check
from qerld_service.cli import VLLM_WITHOUT_GPU
from qerld_service.learner_checks import check_learner
from qerld_service.model_checks import check_model

GIB = 1 << 30
OLDEST_PYTHON = (3, 11)
# Distribution: (lowest, first too new or none, extra that brings it). As in pyproject.toml.
PACKAGES: dict[str, tuple[str, str | None, str]] = {
    "grpcio": ("1.78", None, "learner"),
    "protobuf": ("6.33.5", None, "learner"),
    "torch": ("2.11", None, "learner"),
    "transformers": ("5.16", None, "learner"),
    "peft": ("0.21", None, "learner"),
    "vllm": ("0.25.1", "0.34", "gpu"),
}
DISK_NEEDED = 2 * GIB
SHM_NEEDED = 64 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 — looked at, not written to
MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}


@dataclass(frozen=True)
class Limits:
    """What the checks look at; `target` is a learner that runs, if any."""

    model: Path | None
    state_dir: Path
    ports: Sequence[int]
    target: str | None = None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qerld doctor",
        description="Check this machine, the installed packages, a model folder and a running learner's policy "
        "servers; say what to do about each finding. "
        "Ends with status 1 when something would keep qerld from working.",
    )
    parser.add_argument("--model", type=Path, help="model folder to check")
    parser.add_argument("--state-dir", type=Path, default=Path("runs"), help="folder that `qerld serve` will write to")
    parser.add_argument(
        "--port",
        type=int,
        action="append",
        help="port that must be free; repeatable (default: those of `qerld serve`, none with --target)",
    )
    parser.add_argument("--target", help="host:port of a running learner whose policy servers to check")
    arguments = parser.parse_args(argv)
    # The ports of what runs are taken.
    ports = arguments.port or ([] if arguments.target else default_ports())
    checks = list(run_checks(Limits(arguments.model, arguments.state_dir, ports, arguments.target)))
    Console().print(table_of(checks))
    return 1 if any(check.status == "fail" for check in checks) else 0


def default_ports() -> list[int]:
    from qerld_service.serve import ServeSettings

    names = ("port", "openai_port", "learner_metrics_port", "policy_metrics_port")
    return [ServeSettings.model_fields[name].default for name in names]


def run_checks(limits: Limits) -> Iterator[Check]:
    yield check_python()
    yield from map(check_package, PACKAGES)
    yield check_gpu()
    yield from check_model(limits.model) if limits.model is not None else ()
    yield from map(check_port, limits.ports)
    yield from check_learner(limits.target) if limits.target is not None else ()
    yield check_disk(limits.state_dir)
    yield check_memory(limits.model)
    yield check_shm()


def table_of(checks: Sequence[Check]) -> Table:
    # Folded, since rich cuts a word that is longer than its column: the path or the tensor that matters.
    found, advice = Column("found", overflow="fold"), Column("what to do", overflow="fold")
    table = Table("check", "", found, advice, title="qerld doctor", title_justify="left")
    for check in checks:
        table.add_row(check.name, MARKS[check.status], check.found, check.advice)
    return table


def check_python() -> Check:
    found = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        return Check("Python", "fail", found, "use Python 3.11 or newer")
    return Check("Python", "ok", found)


def check_package(name: str) -> Check:
    lowest, too_new, extra = PACKAGES[name]
    try:
        found = version(name)
    except PackageNotFoundError:
        advice = f"pip install 'qerld[{extra}]'"
        if name == "vllm":
            return Check(name, "warn", "not installed", f"{advice}{VLLM_WITHOUT_GPU}; only a policy server needs it")
        return Check(name, "fail", "not installed", advice)
    if numbers(found) < numbers(lowest) or (too_new is not None and numbers(found) >= numbers(too_new)):
        upper = f", < {too_new}" if too_new is not None else ""
        return Check(name, "fail", found, f"pip install '{name}>={lowest}{upper.replace(' ', '')}'")
    return Check(name, "ok", found)


def numbers(text: str) -> tuple[int, ...]:
    """The release part of a version, for comparing."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("GPU", "warn", "none found", "fine for the quickstart; larger models need an NVIDIA GPU")
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    finished = subprocess.run(query, capture_output=True, text=True, check=False)
    if finished.returncode:
        return Check("GPU", "fail", finished.stdout.strip() or finished.stderr.strip(), "mend the NVIDIA driver")
    return Check("GPU", "ok", finished.stdout.strip().replace("\n", "; "))


def check_port(port: int) -> Check:
    if not 0 <= port < 1 << 16:
        return Check(f"port {port}", "fail", "not a port", "give one from 0 to 65535 (0 takes a free one)")
    if (error := bind_error("127.0.0.1", port)) is not None:
        advice = "stop what listens there, or give `qerld serve` another port (0 takes a free one)"
        return Check(f"port {port}", "fail", error.strerror or str(error), advice)
    return Check(f"port {port}", "ok", "free")


def check_disk(folder: Path) -> Check:
    existing = next(path for path in [folder.resolve(), *folder.resolve().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if not os.access(existing, os.W_OK):
        return Check("disk", "fail", f"{existing} is not writable", "give another --state-dir")
    if free < DISK_NEEDED:
        return Check("disk", "fail", found, f"free {DISK_NEEDED / GIB:.0f} GiB, or give another --state-dir")
    return Check("disk", "ok", found)


def check_memory(model: Path | None) -> Check:
    available = available_memory()
    # fp32 copies in server and trainer, at most 8 times the packed bytes each, beside 2 GiB for the programs.
    needed = 2 * GIB + (2 * 8 * weight_bytes(model) if model is not None and check_gpu().status != "ok" else 0)
    found = f"{available / GIB:.1f} GiB available"
    if available < needed:
        return Check("memory", "warn", found, f"about {needed / GIB:.0f} GiB may be needed; end other programs")
    return Check("memory", "ok", found)


def available_memory() -> int:
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def weight_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def check_shm() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check(str(SHARED_MEMORY), "fail", "missing", "mount a tmpfs there for vLLM's processes")
    free = shutil.disk_usage(SHARED_MEMORY).free
    found = f"{free / GIB:.2f} GiB free"
    if free < SHM_NEEDED:
        return Check(str(SHARED_MEMORY), "fail", found, "enlarge it, for example `docker run --shm-size 1g`")
    return Check(str(SHARED_MEMORY), "ok", found)
