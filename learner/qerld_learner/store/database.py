"""Opening the store: one lock, SQLite's pragmas, migrations, and which database errors mean "no room"."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, exc

from ..errors import PreconditionError

# How long a connection waits for another's lock; only backups and readers from outside compete with the writer.
BUSY_TIMEOUT_MS = 10_000
_NO_ROOM_CODES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC}
_NO_ROOM_CODES |= {sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR}


class FolderLock:
    """Exclusive lock of a state folder; the kernel gives it back when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "learner.lock"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise PreconditionError(
                f"state folder {folder} is in use by the learner with process id {self._path.read_text().strip()};"
                " stop that one or choose another folder"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Give the folder back."""
        os.close(self._descriptor)


def open_engine(url: str) -> Engine:
    """Return an engine whose transactions begin explicitly; SQLite in WAL mode with synchronous=FULL."""
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _configure_sqlite)
        event.listen(engine, "begin", _begin)
    return engine


def _configure_sqlite(connection: Any, _record: Any) -> None:
    # The driver must not begin or commit by itself, otherwise savepoints and DDL are not transactional.
    connection.isolation_level = None
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "foreign_keys=ON",
        "temp_store=MEMORY",
        "cache_size=-16384",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def migrate(engine: Engine) -> None:
    """Bring the schema to the newest revision, in one transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def means_no_room(error: BaseException) -> bool:
    """Whether a database error says that the disk is full or cannot be written; nothing was committed then."""
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(original, OSError):
        return original.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    code = getattr(original, "sqlite_errorcode", None)
    return code in _NO_ROOM_CODES
