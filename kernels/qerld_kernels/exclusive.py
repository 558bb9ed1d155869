"""What one process holds alone: a folder, a port. Both roles use it; no torch here."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Self

__all__ = ["FolderError", "FolderLock", "PortError", "bind_error", "port_error", "require_free_port", "require_unheld"]


class FolderError(RuntimeError):
    """A folder cannot be held: another process has it, or it cannot be made or written."""


class PortError(RuntimeError):
    """An address cannot be bound: another process listens there, or it is none of this machine."""


class FolderLock:
    """Exclusive hold of a folder, which is made if need be; the kernel gives it back when the process ends.

    Args:
        folder: The folder; the lock is the file `name` in it.
        setting: The setting that names the folder, for the error.
        holder: What this process is, for the error that others get.

    Raises:
        FolderError: Names setting, folder, reason (who holds it) and way out.
    """

    def __init__(self, folder: Path, setting: str, holder: str, name: str = ".lock") -> None:
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise FolderError(f"{setting}: {folder}: {error.strerror}; give another folder") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            other = path.read_text().strip() or "another process"
            raise FolderError(f"{setting}: {folder} is in use by {other}; stop it or give another folder") from error
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{holder}, process {os.getpid()}\n".encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the folder back."""
        os.close(self._descriptor)


def require_unheld(folder: Path, setting: str, name: str = ".lock") -> None:
    """Look whether a folder can be held, ahead of a long start; makes nothing. Holding it later may fail all the same.

    Raises:
        FolderError: as `FolderLock`.
    """
    if (folder / name).exists():
        FolderLock(folder, setting, "a process that starts", name).release()


def require_free_port(setting: str, host: str, port: int) -> None:
    """Look whether a port can be bound, ahead of a long start; binding it later may fail all the same.

    Raises:
        PortError: Names setting, address, reason and way out.
    """
    if (error := bind_error(host, port)) is not None:
        raise port_error(setting, host, port, error) from error


def bind_error(host: str, port: int) -> OSError | None:
    """Why a port cannot be bound now, None when it can."""
    address = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def port_error(setting: str, host: str, port: int, error: OSError | RuntimeError) -> PortError:
    """What to raise when binding a port fails."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return PortError(f"{setting}: cannot listen on {host}:{port} ({reason}); give another, 0 takes a free one")
