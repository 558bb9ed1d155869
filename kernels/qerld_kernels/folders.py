"""Folders that appear complete or not at all, and the checksums of what is in them. No torch here."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["appearing_folder", "sha256_of"]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def appearing_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` to fill, renamed to `out` (new or empty) at the end, or removed when the body fails.

    Every file in it is synced to disk before the rename, the parent after it.

    Raises:
        OSError: writing failed, or `out` was filled by someone else meanwhile (ENOTEMPTY, EEXIST).
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        aside.chmod(0o755)  # mkdtemp makes it private; a model is read by other users
        yield aside
        for path in (*(file for file in aside.rglob("*") if file.is_file()), aside):
            _sync(path)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _sync(out.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
