"""A learner process whose disk is full: the kernel refuses its writes (RLIMIT_FSIZE), as it does beyond a quota."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
from qerld.v1 import common_pb2, reward_pb2, rollout_pb2, run_pb2
from support.api import Api, failure, import_request, new_id, retry_seconds, reward

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True)
class Served:
    api: Api
    process: psutil.Process
    state: Path

    @property
    def trainer(self) -> psutil.Process:
        (found,) = [p for p in self.process.children() if "qerld_learner.trainer" in p.cmdline()]
        return found


@pytest.fixture(scope="module")
async def served(tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("full")
    ready, state = folder / "ready.json", folder / "state"
    flags = f"--model {tiny_model[1]} --state-dir {state} --port 0 --metrics-port 0 --ready-file {ready} --device cpu"
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "qerld_learner", *flags.split(), "--trainer-threads", "1"]
        command += ["--stop-grace", "0.2"]
        child = await asyncio.create_subprocess_exec(*command, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        end = time.monotonic() + 180
        while not ready.exists():
            assert child.returncode is None, (folder / "log.txt").read_text()
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{json.loads(ready.read_text())['port']}") as channel:
            yield Served(Api(channel), psutil.Process(child.pid), state)
    finally:
        child.terminate()
        await child.wait()


@contextlib.contextmanager
def no_file_beyond(process: psutil.Process, size: int) -> Iterator[None]:
    soft, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (soft, hard))


async def import_until_refused(
    api: Api, run: str
) -> tuple[rollout_pb2.ImportTrajectoriesRequest, grpc.aio.AioRpcError]:
    """The first request that the store had no room for, and what was said."""
    for _ in range(1000):
        wanted = import_request(run, size=64)
        try:
            await api.rollouts.ImportTrajectories(iter([wanted]), timeout=60)
        except grpc.aio.AioRpcError as error:
            return wanted, error
    raise AssertionError("the disk was never full")


async def groups_of(api: Api, run: str) -> int:
    count, token = 0, ""
    while True:
        request = rollout_pb2.ListGroupsRequest(run=run, page_size=1000, page_token=token)
        page = await api.rollouts.ListGroups(request, timeout=60)
        count, token = count + len(page.groups), page.next_page_token
        if not token:
            return count


async def test_a_full_disk_under_the_store_refuses_and_loses_nothing(served: Served) -> None:
    api = served.api
    run = await api.new_run(groups_per_step=64)
    first, second = await api.rollout_ids(run, 2)
    await api.submit(run, [reward(first, 1.0)])
    with no_file_beyond(served.process, (served.state / "learner.db-wal").stat().st_size + 50_000):
        refused, error = await import_until_refused(api, run)
        assert error.code() is EXHAUSTED
        assert "disk is full" in str(error.details())
        assert "nothing of this request was stored" in str(error.details())
        assert retry_seconds(error)
        # What is stored can be read, and the process lives.
        receipt = (await api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id=first), timeout=60)).receipt
        assert receipt.state == reward_pb2.RECEIPT_STATE_BUFFERED
        before = await groups_of(api, run)
    # The same request, tried again as the error says, is stored once.
    for _ in range(2):
        await api.rollouts.ImportTrajectories(iter([refused]), timeout=60)
    assert await groups_of(api, run) == before + 1
    (answer,) = await api.submit(run, [reward(second, 0.0)])
    assert answer.answer == common_pb2.ANSWER_ACCEPTED


async def test_a_full_disk_under_the_trainer_pauses_and_loses_nothing(served: Served) -> None:
    api, trainer = served.api, served.trainer
    run = await api.new_run()
    rollout_ids = await api.rollout_ids(run, 4)
    request = run_pb2.CreateRunRequest(run="no-room", request_id=new_id(), config=run_pb2.RunConfig(group_size=2))

    async def wait_for_state(state: run_pb2.RunState.ValueType) -> run_pb2.Run:
        async with asyncio.timeout(120):
            while True:
                found = (await api.runs.GetRun(run_pb2.GetRunRequest(run=run))).run
                if found.state == state:
                    return found
                await asyncio.sleep(0.05)

    with no_file_beyond(trainer, 4096):
        error = await failure(api.runs.CreateRun(request, timeout=120))
        assert error.code() is EXHAUSTED
        assert "free space" in str(error.details())
        assert retry_seconds(error)
        await api.submit(run, [reward(rollout_id, index % 2) for index, rollout_id in enumerate(rollout_ids)])
        paused = await wait_for_state(run_pb2.RUN_STATE_PAUSED)
        assert paused.reason.startswith("step 1 failed: OSError: ")
        assert "free space" in paused.reason
    await api.runs.CreateRun(request, timeout=120)
    await api.runs.ResumeRun(run_pb2.ResumeRunRequest(run=run, request_id=new_id()))
    wanted = reward_pb2.WatchReceiptsRequest(run=run, rollout_ids=rollout_ids)
    receipts = [response.receipt async for response in api.rewards.WatchReceipts(wanted, timeout=120)]
    assert {receipt.rollout_id for receipt in receipts} == set(rollout_ids)
    assert {(receipt.state, receipt.step) for receipt in receipts} == {(reward_pb2.RECEIPT_STATE_TRAINED, 1)}
    assert trainer.is_running()
