"""Opening the store: SQLite's pragmas, migrations, and which database errors mean what."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, exc

from ..errors import PreconditionError, StoreError

# How long a connection waits for another's lock; only backups and readers from outside compete with the writer.
BUSY_TIMEOUT_MS = 10_000
_NO_ROOM_CODES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC}
_NO_ROOM_CODES |= {sqlite3.SQLITE_IOERR_TRUNCATE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR}
# A wrong path, something else than a database, a broken one, one that may only be read.
_UNUSABLE_CODES = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}
_UNUSABLE_CODES |= {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}


def open_database(url: str) -> Engine:
    """Return an engine on the database at its newest schema.

    Raises `StoreError` when it can never be used, `PreconditionError` when it cannot be used now.
    """
    try:
        engine = open_engine(url)
    except (exc.ArgumentError, ImportError) as error:
        raise StoreError(f"store_url: {error}; leave it unset for SQLite in state_dir") from error
    name = engine.url.render_as_string(hide_password=True)
    try:
        migrate(engine)
        if engine.dialect.name == "sqlite":
            _check_file(engine, name)
    except CommandError as error:
        text = f"store {name}: its schema is of a newer version of qerld ({error}); use that one or another state_dir"
        raise StoreError(text) from error
    except exc.DBAPIError as error:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # without the extended part
        if code in _UNUSABLE_CODES:
            raise StoreError(f"store {name}: {error.orig}; restore it, or give another") from error
        raise PreconditionError(f"store {name} cannot be opened now: {error.orig}") from error
    return engine


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


def _check_file(engine: Engine, name: str) -> None:
    """Find a damaged file, or one that may only be read, before anything relies on it: it is read once, whole."""
    with engine.begin() as connection:
        found = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one())
        if found != "ok":
            raise StoreError(f"store {name}: is damaged ({' '.join(found.split())}); restore it, or give another")
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        connection.exec_driver_sql(f"PRAGMA user_version = {version}")  # changes nothing, and needs the right to write


def migrate(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to a revision, the newest by default, in one transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def means_no_room(error: BaseException) -> bool:
    """Whether a database error says that the disk is full or cannot be written; nothing was committed then."""
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    if isinstance(original, OSError):
        return original.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    code = getattr(original, "sqlite_errorcode", None)
    return code in _NO_ROOM_CODES
