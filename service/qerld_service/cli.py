"""The `qerld` command: one table of subcommands, each imported only when it is called.

So `qerld --help` is instant, and a bare client install (no torch, no vLLM) can still say which extra a command needs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

USAGE_ERROR = 2


VLLM_WITHOUT_GPU = " (on a machine without an NVIDIA GPU: python3 scripts/bootstrap.py, from a checkout)"


@dataclass(frozen=True)
class Command:
    """One subcommand: `module` has `main(argv) -> int`; a `process` replaces this one with `python -m module`."""

    module: str
    extra: str
    help: str
    needs: tuple[str, ...] = ()
    process: bool = False


COMMANDS = {
    "serve": Command(
        "qerld_service.serve",
        "learner",
        "start learner and policy server on this machine and keep both alive",
        ("pydantic_settings",),
    ),
    "policy": Command(
        "qerld_service.policy",
        "gpu",
        "start a policy server: vLLM with one adapter slot a version",
        ("vllm", "pydantic_settings"),
        process=True,
    ),
    "learner": Command(
        "qerld_learner",
        "learner",
        "start the learner: the gRPC API, the store and the trainer",
        ("torch", "sqlalchemy", "pydantic_settings"),
        process=True,
    ),
    "quantize": Command(
        "qerld_service.quantize",
        "learner",
        "write a 4-bit copy of a model that vLLM serves and the learner trains on",
        ("torch", "safetensors", "rich"),
    ),
    "quickstart": Command(
        "qerld_service.quickstart.main",
        "quickstart",
        "train a small real model on a small task, the whole loop, in minutes",
        ("torch", "matplotlib", "rich"),
    ),
    "config": Command(
        "qerld_service.config",
        "learner",
        "print the effective settings of a role as TOML, or describe them",
        ("pydantic_settings",),
    ),
    "doctor": Command(
        "qerld_service.doctor",
        "learner",
        "check this machine, its packages and a model folder, and say what to do",
        ("pydantic_settings", "rich"),
    ),
    "eval": Command(
        "qerld_service.evaluate",
        "eval",
        "evaluate a version on a file of problems (GSM8K, MATH-500): pass@1, pass@k, avg@n",
        ("rich", "math_verify"),
    ),
    "watch": Command(
        "qerld_service.watch",
        "learner",
        "live view of a run: reward, entropy, noise, lag, mismatch, tokens a second",
        ("rich",),
    ),
    "schedule": Command(
        "qerld_learner.schedule",
        "learner",
        "print and plot how the noise of a run goes over its steps",
        ("msgspec", "numpy", "rich"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status: 0 well, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = build_parser().parse_args(arguments[:1])
    command = COMMANDS[chosen.command]
    missing = [name for name in command.needs if find_spec(name) is None]
    if missing:
        sys.stderr.write(missing_text(chosen.command, command, missing))
        return USAGE_ERROR
    if command.process:
        os.execv(sys.executable, [sys.executable, "-m", command.module, *arguments[1:]])  # noqa: S606 — no shell is wanted
    try:
        status = importlib.import_module(command.module).main(arguments[1:])
    except KeyboardInterrupt:
        return 130
    return int(status)


def build_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="qerld",
        description="Online reinforcement learning for language models.",
        epilog=f"commands:\n{listing}\n\n`qerld COMMAND --help` describes each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"qerld {version()}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    return parser


def version() -> str:
    from importlib.metadata import version as version_of

    return version_of("qerld")


def missing_text(name: str, command: Command, missing: Sequence[str]) -> str:
    packages = ", ".join(missing)
    way_out = f"pip install 'qerld[{command.extra}]'"
    if "vllm" in missing:
        way_out += VLLM_WITHOUT_GPU
    return f"qerld {name}: this installation lacks {packages}; install with {way_out}\n"


if __name__ == "__main__":
    sys.exit(main())
