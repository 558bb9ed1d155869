"""Durability, isolation, the lock, migrations, and a disk that is full."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from qerld_kernels.exclusive import FolderError
from qerld_learner.errors import ConflictError, RetryLaterError, StoreError
from qerld_learner.store import Store
from qerld_learner.store.database import migrate, open_engine
from qerld_learner.store.requests import once
from qerld_learner.store.runs import count_up
from qerld_learner.store.schema import counters, metadata, requests
from sqlalchemy import Connection, insert, select

WRITER = """
import asyncio, sys
from pathlib import Path
from qerld_learner.store import Store
from qerld_learner.store.requests import once

async def write(store, worker):
    number = 0
    while True:
        name = f"{worker}-{number}"
        await store.write(lambda c: once(c, "run", name, "hash", lambda: name * 50))
        print(name, flush=True)
        number += 1

async def main():
    store = Store(Path(sys.argv[1]))
    await asyncio.gather(*(write(store, worker) for worker in range(8)))

asyncio.run(main())
"""


def request_ids(connection: Connection) -> set[str]:
    return set(connection.execute(select(requests.c.request_id)).scalars())


def put(name: str, size: int = 1) -> Callable[[Connection], object]:
    return lambda connection: once(connection, "run", name, "hash", lambda: "x" * size)


async def fill(store: Store) -> None:
    for number in range(100):
        await store.write(put(f"big-{number}", 20_000))


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    command = (sys.executable, "-c", WRITER, str(tmp_path))
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    lines = [await child.stdout.readline() for _ in range(400)]
    child.kill()
    lines += (await child.stdout.read()).splitlines(keepends=True)
    await child.wait()
    acknowledged = [line.decode().strip() for line in lines if line.endswith(b"\n")]
    assert len(acknowledged) >= 400
    store = Store(tmp_path)
    try:
        assert set(acknowledged) <= await store.read(request_ids)
        assert await store.read(lambda c: c.exec_driver_sql("PRAGMA integrity_check").scalar_one()) == "ok"
    finally:
        store.close()


async def test_concurrent_mutations_share_transactions_and_keep_their_order(tmp_path: Path) -> None:
    commits: list[int] = []
    store = Store(tmp_path, on_commit=lambda mutations, _seconds: commits.append(mutations))
    counts = await asyncio.gather(*(store.write(lambda c: count_up(c, "n")) for _ in range(1000)))
    assert counts == list(range(1, 1001))
    assert sum(commits) == 1000
    assert max(commits) <= 256
    assert len(commits) < 500
    store.close()


async def test_a_mutation_that_raises_leaves_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def broken(connection: Connection) -> None:
        connection.execute(insert(counters).values(name="half", value=1))
        raise ConflictError("no")

    first, failed, last = await asyncio.gather(
        store.write(put("a")),
        store.write(broken),
        store.write(put("b")),
        return_exceptions=True,
    )
    assert isinstance(failed, ConflictError)
    assert not isinstance(first, BaseException)
    assert not isinstance(last, BaseException)
    assert await store.read(request_ids) == {"a", "b"}
    assert await store.read(lambda c: c.execute(select(counters.c.name)).scalars().all()) == []
    store.close()


async def test_the_same_request_gets_the_first_answer_and_another_body_is_a_conflict(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert await store.write(lambda c: once(c, "run", "id", "one", lambda: [1])) == ([1], False)
    assert await store.write(lambda c: once(c, "run", "id", "one", lambda: [2])) == ([1], True)
    assert await store.write(lambda c: once(c, "other", "id", "two", lambda: [3])) == ([3], False)
    with pytest.raises(ConflictError, match="another body"):
        await store.write(lambda c: once(c, "run", "id", "two", lambda: [4]))
    store.close()


async def test_a_full_disk_is_a_clear_error_and_passes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.write(put("before"))
    pages = await store.write(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar_one())
    await store.write(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages + 8}").scalar_one())
    with pytest.raises(RetryLaterError, match="disk is full") as caught:
        await fill(store)
    assert caught.value.retry_after > 0
    stored = await store.read(request_ids)
    assert "before" in stored
    await store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count=100000").scalar_one())
    await store.write(put("after", 20_000))
    assert await store.read(request_ids) == stored | {"after"}
    assert await store.read(lambda c: c.exec_driver_sql("PRAGMA integrity_check").scalar_one()) == "ok"
    store.close()


async def test_a_file_that_may_not_grow_is_a_clear_error_and_passes(tmp_path: Path) -> None:
    """The kernel refuses the write itself (RLIMIT_FSIZE), as with a full disk or a quota."""
    store = Store(tmp_path)
    await store.write(put("before"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = (tmp_path / "learner.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50_000, hard))
    try:
        with pytest.raises(RetryLaterError, match="disk is full"):
            await fill(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await store.write(put("after", 20_000))
    assert {"before", "after"} <= await store.read(request_ids)
    assert await store.read(lambda c: c.exec_driver_sql("PRAGMA integrity_check").scalar_one()) == "ok"
    store.close()


async def test_a_folder_has_one_learner(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(FolderError, match=f"state_dir: .* is in use by qerld learner, process {os.getpid()};"):
        Store(tmp_path)
    store.close()
    Store(tmp_path).close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "store_url: Could not parse"),
        ("nosuch://user:secret@host/name", "store_url: Can't load plugin"),
        ("sqlite:////nowhere/x.db", "store sqlite:////nowhere/x.db: unable to open database file; restore it"),
        (f"sqlite:///{__file__}", "file is not a database"),
    ],
)
async def test_a_store_that_can_never_be_opened(url: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=re.escape(said)) as caught:
        Store(tmp_path, url)
    assert "secret" not in str(caught.value)
    Store(tmp_path).close()  # the folder was given back


async def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    engine = open_engine(f"sqlite:///{tmp_path / 'learner.db'}")
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match=r"its schema is of a newer version of qerld \(.*'9999'\)"):
        Store(tmp_path)


async def test_migrations_make_the_schema_and_sqlite_is_durable(tmp_path: Path) -> None:
    Store(tmp_path).close()
    engine = open_engine(f"sqlite:///{tmp_path / 'learner.db'}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
        revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    assert revision == "0003"


async def test_a_store_of_the_first_schema_is_brought_up_to_date(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'learner.db'}")
    migrate(engine, "0001")
    with engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) != []
        connection.execute(insert(counters).values(name="kept", value=7))
    engine.dispose()
    store = Store(tmp_path)
    try:
        assert await store.read(lambda c: compare_metadata(MigrationContext.configure(c), metadata)) == []
        assert await store.write(lambda c: count_up(c, "kept")) == 8
    finally:
        store.close()
