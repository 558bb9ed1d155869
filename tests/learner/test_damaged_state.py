"""A state folder that was damaged while the learner was down: it says so, and deletes and serves nothing wrong."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from qerld_learner.core import Learner
from qerld_learner.errors import NotFoundError, PreconditionError, StoreError
from qerld_learner.records import RunState, VersionState

from .conftest import imported, new_id, options_for, prompt, reward_all, small_config, until

Opened = Callable[[], AbstractAsyncContextManager[Learner]]
RUN = "kept"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
async def sound(tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a learner that was stopped: versions 0 (live) and 1 (staged, there is no policy server)."""
    folder = tmp_path_factory.mktemp("sound")
    learner = await Learner.open(options_for(folder, tiny_model[1]))
    await learner.create_run(RUN, new_id(), "h", small_config(groups_per_step=1))
    await reward_all(learner, await imported(learner, RUN), [0.0, 1.0, 0.0, 1.0])

    async def trained() -> bool:
        return (await learner.list_versions(RUN, 0, ""))[0][0].state is VersionState.STAGED

    await until(trained)
    await learner.close()
    return folder


@pytest.fixture
def state(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "state"))


@pytest.fixture
def opened(state: Path, tiny_model: tuple[Path, Path]) -> Opened:
    @asynccontextmanager
    async def learner() -> AsyncIterator[Learner]:
        running = await Learner.open(options_for(state, tiny_model[1]))
        try:
            yield running
        finally:
            await running.close()

    return learner


def folders(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "versions" / RUN).iterdir())


async def test_without_its_database_nothing_is_deleted(state: Path, tiny_model: tuple[Path, Path]) -> None:
    for name in ("learner.db", "learner.db-wal", "learner.db-shm"):
        (state / name).unlink(missing_ok=True)
    with pytest.raises(StoreError, match=r"00000001 is newer than anything in the store, which was lost or set back"):
        await Learner.open(options_for(state, tiny_model[1]))
    assert folders(state) == ["00000000", "00000001"]


async def test_what_a_crash_leaves_is_swept(state: Path, opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(state / "versions" / RUN / "00000001", state / "versions" / RUN / "00000002")
    with caplog.at_level(logging.WARNING):
        async with opened() as learner:
            assert [v.version for v in (await learner.list_versions(RUN, 0, ""))[0]] == [1, 0]
    assert folders(state) == ["00000000", "00000001"]
    assert "00000002: the store has no such version" in caplog.text


async def test_a_damaged_page_is_found_at_the_start(state: Path, tiny_model: tuple[Path, Path]) -> None:
    with (state / "learner.db").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(range(256)) * 160)
    with pytest.raises(StoreError, match=r"learner.db: .*(damaged|malformed).*; restore it, or give another"):
        await Learner.open(options_for(state, tiny_model[1]))


async def test_a_database_that_may_only_be_read_is_refused(state: Path, tiny_model: tuple[Path, Path]) -> None:
    url = f"sqlite:///file:{state / 'learner.db'}?mode=ro&uri=true"
    with pytest.raises(StoreError, match="readonly database; restore it"):
        await Learner.open(options_for(state, tiny_model[1], store_url=url))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def another_alpha(path: Path) -> None:
    path.write_text(path.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        (WEIGHTS, flip_a_bit, "is not what was committed"),
        (CONFIG, another_alpha, "is not what was committed"),
        (WEIGHTS, Path.unlink, "cannot be read (No such file or directory)"),
        (CONFIG, Path.unlink, "cannot be read (No such file or directory)"),
        ("../state.json", lambda path: path.write_text("{"), "cannot be read (state.json beside it is damaged)"),
    ],
)
async def test_a_damaged_live_version_pauses_its_run(
    state: Path, opened: Opened, name: str, damage: Callable[[Path], object], what: str
) -> None:
    adapter = state / "versions" / RUN / "00000000" / "adapter"
    whole = shutil.copytree(adapter.parent, state / "backup")
    damage(adapter / name)
    async with opened() as learner:
        run = await learner.get_run(RUN)
        assert run.state is RunState.PAUSED
        assert run.reason.startswith("live version 0: ")
        assert what in run.reason
        assert run.reason.endswith("or create a run from the adapter of another version (initial_adapter)")
        with pytest.raises(PreconditionError, match="live version 0"):
            await learner.resume_run(RUN, new_id(), "h")
        with pytest.raises(PreconditionError, match="is paused"):
            await anext(learner.sample(RUN, new_id(), "h", prompt()))
        shutil.rmtree(adapter.parent)
        shutil.copytree(whole, adapter.parent)
        assert (await learner.resume_run(RUN, new_id(), "h")).state is RunState.RUNNING


async def test_the_checksum_announced_is_the_committed_one(state: Path, opened: Opened) -> None:
    """So a policy server refuses what was altered while the learner runs."""
    adapter = state / "versions" / RUN / "00000000" / "adapter"
    async with opened() as learner:
        for name in (WEIGHTS, CONFIG):
            path, announced = await learner.adapter_file(RUN, 0, name)
            assert announced == hashlib.sha256(path.read_bytes()).hexdigest()
        another_alpha(adapter / CONFIG)
        path, announced = await learner.adapter_file(RUN, 0, CONFIG)
        assert announced != hashlib.sha256(path.read_bytes()).hexdigest()
        (adapter.parent / "state.json").unlink()
        with pytest.raises(NotFoundError, match=r"the files of version 0 .* are damaged or missing; restore them"):
            await learner.adapter_file(RUN, 0, CONFIG)
