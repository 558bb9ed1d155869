"""Check and fingerprints of the base model, in a child process: reading checkpoints needs torch, which the learner's
own process never imports. Run as `python -m qerld_learner.fingerprints FOLDER` it prints them as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import ModelFolderError, PreconditionError

BAD_FOLDER = 2


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256, hexadecimal, of what a learner and its policy servers must agree on."""

    base: str
    tokenizer: str
    chat_template: str


async def fingerprints_of(folder: Path) -> Fingerprints:
    """Return the fingerprints of a model folder.

    Raises `ModelFolderError` when it cannot be trained, `PreconditionError` when the child ended for another reason.
    """
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
        if child.returncode == BAD_FOLDER:
            raise ModelFolderError(f"model: {last[0]}")
        raise PreconditionError(f"base model {folder} cannot be read: {last[0]}")
    return Fingerprints(**json.loads(out))


def main(argv: Sequence[str]) -> int:
    """Check the folder in the first argument and print its fingerprints; returns `BAD_FOLDER` after one line on it."""
    from qerld_kernels.errors import CheckpointError
    from qerld_kernels.fingerprint import base_fingerprint, chat_template_fingerprint, tokenizer_fingerprint
    from qerld_kernels.model_folder import open_model

    folder = Path(argv[0])
    try:
        open_model(folder)
        found = Fingerprints(base_fingerprint(folder), tokenizer_fingerprint(folder), chat_template_fingerprint(folder))
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_FOLDER
    sys.stdout.write(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
