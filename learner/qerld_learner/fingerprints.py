"""Fingerprints of the base model, taken in a child process: reading checkpoints needs torch, which the learner's own
process never imports. Run as `python -m qerld_learner.fingerprints FOLDER` it prints them as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import PreconditionError


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256, hexadecimal, of what a learner and its policy servers must agree on."""

    base: str
    tokenizer: str
    chat_template: str


async def fingerprints_of(folder: Path) -> Fingerprints:
    """Return the fingerprints of a model folder. Raises `PreconditionError` when it cannot be read."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        str(folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, problem = await child.communicate()
    if child.returncode != 0:
        last = problem.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise PreconditionError(f"base model {folder} cannot be read: {last[0]}")
    return Fingerprints(**json.loads(out))


def main() -> None:
    """Print the fingerprints of the folder in the first argument."""
    from qerld_kernels.fingerprint import base_fingerprint, chat_template_fingerprint, tokenizer_fingerprint

    folder = Path(sys.argv[1])
    found = Fingerprints(base_fingerprint(folder), tokenizer_fingerprint(folder), chat_template_fingerprint(folder))
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
