"""The process `python -m qerld_service.policy`: its ready file, SIGTERM amid a request, the death of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from qerld.v1 import replica_pb2_grpc
from support.peer_learner import PeerLearner
from support.policy import begin, reconciled, request
from support.tiny import make_adapter

pytestmark = pytest.mark.engine

READY_SECONDS = 150


@contextlib.asynccontextmanager
async def process(
    model: Path, learner_port: int, folder: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any], Path]]:
    """A policy server in its own process group; yields it, its ports and its log."""
    ready, log = folder / "ready.json", folder / "log.txt"
    flags = f"""--model {model} --learner 127.0.0.1:{learner_port} --port 0 --openai-port 0 --metrics-port 0
        --cache-dir {folder / "cache"} --dtype float32 --max-loras 4 --max-lora-rank 8 --max-model-len 256
        --ready-file {ready}""".split()
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "qerld_service.policy",
            *flags,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not ready.exists():
            assert child.returncode is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.1)
        yield child, json.loads(ready.read_text()), log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def test_sigterm_lets_a_running_request_end(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    peer = PeerLearner()
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05)
    async with peer.serving() as port, process(tiny_model[1], port, tmp_path) as (child, ports, log):
        await peer.report(reconciled)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['port']}") as channel:
            stub = replica_pb2_grpc.PolicyReplicaServiceStub(channel)
            call = await begin(stub, request(1, count=8, max_tokens=200))
            assert not call.done()
            child.send_signal(signal.SIGTERM)
            completions = await call
        assert all(ids for ids, _ in completions)
        assert await asyncio.wait_for(child.wait(), 120) == 0, log.read_text()
        assert "Exception ignored" not in log.read_text()


async def test_the_death_of_the_engine_ends_the_process(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    peer = PeerLearner()
    await peer.desire("p", 1, make_adapter(tmp_path / "a", 1, 0.5), sigma=0.05)
    async with peer.serving() as port, process(tiny_model[1], port, tmp_path) as (child, ports, log):
        await peer.report(reconciled)
        cores = [p for p in psutil.Process(child.pid).children(recursive=True) if p.memory_info().rss > 200 << 20]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['port']}") as channel:
            stub = replica_pb2_grpc.PolicyReplicaServiceStub(channel)
            call = await begin(stub, request(1, count=8, max_tokens=240))
            for core in cores:
                core.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(child.wait(), 120) == 1
        assert "ending: vLLM's engine process has died" in log.read_text()
