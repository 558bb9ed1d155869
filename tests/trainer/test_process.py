"""The child process: frames, failures, death, restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from qerld_learner.observer import Observer
from qerld_learner.trainer.client import TrainerDiedError, TrainerFailure, TrainerProcess
from qerld_learner.trainer.messages import (
    FrameError,
    InitVersion,
    Progress,
    Score,
    Scores,
    Sequence,
    StepResult,
    TrainerConfig,
    TrainStep,
    VersionMade,
    body_length,
    decode_request,
    encode_frame,
)
from qerld_learner.trainer_host import TrainerHost

from .conftest import make_groups


@pytest.fixture(scope="module")
async def trainer() -> AsyncIterator[TrainerProcess]:
    process = TrainerProcess()
    await process.start()
    yield process
    await process.stop()


def step_request(config: TrainerConfig, folder: Path, *, groups: int = 3) -> TrainStep:
    return TrainStep("run", config, 1, str(folder / "v0"), str(folder / "v1"), 1, make_groups(groups=groups))


async def test_requests_are_answered_and_progress_is_reported(
    trainer: TrainerProcess, config: TrainerConfig, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    assert isinstance(await trainer.call(InitVersion("run", config, str(tmp_path / "v0"))), VersionMade)
    result = await trainer.call(step_request(config, tmp_path), seen.append)
    assert isinstance(result, StepResult)
    assert [p.phase for p in seen] == ["train", "train", "commit"]
    assert result.metrics["peak_rss_bytes"] < 2.5e9
    scores = await trainer.call(Score("run", config, str(tmp_path / "v1"), [Sequence([1, 2], [3, 4, 5])]))
    assert isinstance(scores, Scores)
    assert [len(one) for one in scores.logprobs] == [3]


async def test_a_failed_request_leaves_the_child_usable(
    trainer: TrainerProcess, config: TrainerConfig, tmp_path: Path
) -> None:
    pid = trainer.pid
    with pytest.raises(TrainerFailure, match="not a finished version") as failure:
        await trainer.call(step_request(config, tmp_path))
    assert failure.value.kind == "VersionFolderError"
    missing = msgspec.structs.replace(config, base=str(tmp_path / "nowhere"))
    with pytest.raises(TrainerFailure, match="nowhere"):
        await trainer.call(InitVersion("run", missing, str(tmp_path / "v0")))
    cuda = msgspec.structs.replace(config, temperature=0.0)
    with pytest.raises(TrainerFailure, match=r"temperature must be finite and > 0, got 0\.0"):
        await trainer.call(InitVersion("run", cuda, str(tmp_path / "v0")))
    assert isinstance(await trainer.call(InitVersion("run", config, str(tmp_path / "v0"))), VersionMade)
    assert trainer.pid == pid


async def test_death_mid_step_raises_and_a_restart_continues_from_the_last_commit(
    config: TrainerConfig, tmp_path: Path
) -> None:
    process = TrainerProcess()
    await process.start()
    await process.call(InitVersion("run", config, str(tmp_path / "v0")))
    slow = msgspec.structs.replace(config, token_budget=1)

    def kill(progress: Progress) -> None:
        if progress.phase == "train" and progress.done == 2 and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(TrainerDiedError, match="signal 9"):
        await process.call(step_request(slow, tmp_path), kill)
    assert not process.running
    assert os.listdir(tmp_path) == ["v0"]
    with pytest.raises(TrainerDiedError, match="not running"):
        await process.call(step_request(config, tmp_path))
    await process.start()
    assert isinstance(await process.call(step_request(config, tmp_path)), StepResult)
    await process.stop()


async def test_sigterm_ends_the_child_cleanly(config: TrainerConfig, tmp_path: Path) -> None:
    process = TrainerProcess()
    await process.start()
    pid = process.pid
    await process.stop()
    assert not process.running
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process._process is not None
    assert process._process.returncode == 0


async def test_a_cancelled_call_does_not_answer_the_next_one(config: TrainerConfig, tmp_path: Path) -> None:
    process = TrainerProcess()
    await process.start()
    started = asyncio.Event()
    request = InitVersion("run", config, str(tmp_path / "v0"))
    call = asyncio.create_task(process.call(request, lambda _progress: started.set()))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not process.running
    await process.start()
    reply = await process.call(InitVersion("run", config, str(tmp_path / "again")))
    assert isinstance(reply, VersionMade)
    await process.stop()


def test_frames_round_trip_and_foreign_bytes_are_refused(config: TrainerConfig, tmp_path: Path) -> None:
    request = step_request(config, tmp_path)
    frame = encode_frame(request)
    assert body_length(frame[:4]) == len(frame) - 4
    assert decode_request(frame[4:]) == request
    with pytest.raises(FrameError, match="the pipe carries something else"):
        body_length(b"Trac")
    with pytest.raises(FrameError, match="not a trainer request"):
        decode_request(b"\xc1")


def test_the_client_side_imports_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, qerld_learner.trainer.client, qerld_learner.trainer.aqn; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_trainer_that_is_still_starting_can_be_stopped() -> None:
    host = TrainerHost(TrainerProcess(), Observer())
    starting = asyncio.create_task(host.start())
    async with asyncio.timeout(60):
        while host.pid is None:  # noqa: ASYNC110 - the start says nothing in between
            await asyncio.sleep(0.01)
        os.kill(host.pid, signal.SIGSTOP)  # as one that imports its libraries for a very long time
        await host.stop()
    assert host.pid is None
    with pytest.raises(TrainerDiedError):
        await starting
