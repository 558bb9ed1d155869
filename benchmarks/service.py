"""How fast rewards become durable: outcomes a second and latency, over one stream and by unary calls.

    python benchmarks/service.py                       # starts its own learner with a tiny model
    python benchmarks/service.py --learner HOST:PORT   # a running one, for example while it trains

Rollouts are imported, so no policy server is needed and nothing is sampled. Four things are measured in one run, one
after the other on the same machine, so that their ratios mean something:

- echo: unary calls of a bare grpc.aio server, one in flight: what a call costs before any work;
- unary: SubmitRewards with one outcome a call, `--concurrency` in flight, after the answer (durable);
- stream: StreamRewards with `--batch` outcomes a message, `--window` messages in flight;
- stream while training: the same, while other runs of the same learner take training steps (`--no-training` skips it).

An outcome counts when its answer has come, and answers come after COMMIT (SQLite, WAL, synchronous=FULL).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from qerld.v1 import common_pb2, reward_pb2, reward_pb2_grpc, rollout_pb2, run_pb2
from qerld_client import AsyncClient

PROMPT_IDS = list(range(5, 21))
COMPLETION_IDS = list(range(30, 42))
GROUP_SIZE = 8
IMPORT_AT_ONCE = 64


@dataclass(frozen=True)
class Figures:
    """One measurement; latencies in milliseconds, from sending to the answer."""

    outcomes: int
    seconds: float
    latencies: Sequence[float]

    def as_dict(self) -> dict[str, float]:
        cuts = statistics.quantiles(self.latencies, n=100)
        return {
            "outcomes": self.outcomes,
            "seconds": round(self.seconds, 3),
            "outcomes_per_second": round(self.outcomes / self.seconds, 1),
            "p50_ms": round(cuts[49], 2),
            "p99_ms": round(cuts[98], 2),
        }


# Rollouts


def trajectory() -> rollout_pb2.Trajectory:
    segment = rollout_pb2.Segment(
        tokens=common_pb2.TokenIds(ids=COMPLETION_IDS), logprobs=[-1.0] * len(COMPLETION_IDS), trainable=True
    )
    return rollout_pb2.Trajectory(segments=[segment], finish_reason=common_pb2.FINISH_REASON_STOP)


async def new_run(client: AsyncClient, groups_per_step: int) -> str:
    """Create a run; with many groups a step it only buffers, and the store's work is all that is measured."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    lora = run_pb2.LoraConfig(rank=8)
    config = run_pb2.RunConfig(lora=lora, group_size=GROUP_SIZE, groups_per_step=groups_per_step, max_tokens=16)
    await client.create_run(name, config)
    return name


async def imported(client: AsyncClient, run: str, rollouts: int) -> list[str]:
    """Store at least `rollouts` rollouts that await rewards; returns exactly that many ids."""
    ids: list[str] = []
    while len(ids) < rollouts:
        missing = -(-(rollouts - len(ids)) // GROUP_SIZE)
        groups = [(PROMPT_IDS, [trajectory()] * GROUP_SIZE)] * min(missing, IMPORT_AT_ONCE)
        ids += [rid for group in await client.import_trajectories(run, groups) for rid in group.rollout_ids]
    return ids[:rollouts]


def outcome(rollout_id: str, position: int) -> reward_pb2.Outcome:
    return reward_pb2.Outcome(rollout_id=rollout_id, reward=float(position % 2))


# Measurements


async def concurrently(work: Sequence[Callable[[], Awaitable[Any]]], concurrency: int) -> Figures:
    """Call all of `work`, `concurrency` at a time."""
    source = iter(work)
    latencies: list[float] = []

    async def one_after_the_other() -> None:
        for call in source:
            begun = time.perf_counter()
            await call()
            latencies.append(1e3 * (time.perf_counter() - begun))

    begun = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return Figures(len(work), time.perf_counter() - begun, latencies)


async def measure_echo(calls: int) -> dict[str, Figures]:
    """Unary calls of a server in a process of its own that returns the bytes it gets."""
    program = "import asyncio, sys; sys.path.insert(0, sys.argv[1]); import service; asyncio.run(service.serve_echo())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(Path(__file__).parent), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/echo/Echo")
            work = [lambda: call(b"x" * 64)] * calls
            await concurrently(work[:200], 1)
            return {"one_in_flight": await concurrently(work, 1), "16_in_flight": await concurrently(work, 16)}
    finally:
        process.terminate()
        await process.wait()


async def serve_echo() -> None:
    """Serve /echo/Echo and print the port; runs in the child process."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler("echo", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


async def measure_unary(target: str, run: str, ids: Sequence[str], concurrency: int) -> Figures:
    """SubmitRewards, one outcome a call."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
        requests = [
            reward_pb2.SubmitRewardsRequest(run=run, request_id=uuid.uuid4().hex, outcomes=[outcome(rid, i)])
            for i, rid in enumerate(ids)
        ]
        return await concurrently([lambda r=r: stub.SubmitRewards(r) for r in requests], concurrency)  # type: ignore[misc]


async def measure_stream(target: str, run: str, ids: Sequence[str], batch: int, window: int) -> Figures:
    """StreamRewards: `batch` outcomes a message, `window` messages without an answer at most."""
    sent: dict[str, float] = {}
    latencies: list[float] = []
    room = asyncio.Semaphore(window)

    async def messages() -> AsyncIterator[reward_pb2.StreamRewardsRequest]:
        yield reward_pb2.StreamRewardsRequest(open=reward_pb2.OpenStream(run=run, worker="benchmark"))
        for begin in range(0, len(ids), batch):
            outcomes = [outcome(rid, begin + i) for i, rid in enumerate(ids[begin : begin + batch])]
            message = reward_pb2.OutcomeBatch(request_id=uuid.uuid4().hex, outcomes=outcomes)
            await room.acquire()
            sent[message.request_id] = time.perf_counter()
            yield reward_pb2.StreamRewardsRequest(outcomes=message)

    accepted = 0
    begun = time.perf_counter()
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = reward_pb2_grpc.RewardServiceStub(channel)
        async for response in stub.StreamRewards(messages()):
            latencies.append(1e3 * (time.perf_counter() - sent.pop(response.answer.request_id)))
            room.release()
            accepted += sum(item.answer == common_pb2.ANSWER_ACCEPTED for item in response.answer.answers)
    seconds = time.perf_counter() - begun
    if accepted != len(ids):
        raise RuntimeError(f"{accepted} of {len(ids)} outcomes were accepted; the figures would not be of stored ones")
    return Figures(accepted, seconds, latencies)


@asynccontextmanager
async def training(client: AsyncClient) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Train another run all the time; yields a function that returns its steps so far.

    Without a policy server a version waits STAGED, so each run trains one step and the next run follows.
    """
    steps = 0

    async def train() -> None:
        nonlocal steps
        while True:
            run = await new_run(client, groups_per_step=4)
            ids = await imported(client, run, 4 * GROUP_SIZE)
            await client.submit_rewards(run, [outcome(rid, i) for i, rid in enumerate(ids)])
            async for _ in client.watch_receipts(run, ids):
                pass
            steps += 1

    async def count() -> int:
        return steps

    task = asyncio.create_task(train())
    try:
        while steps == 0:  # the first step compiles and loads
            await asyncio.sleep(0.1)
            if task.done():
                task.result()
        yield count
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# The run


@asynccontextmanager
async def learner(address: str | None) -> AsyncIterator[str]:
    """Yield the address of the given learner, or of one in a process of its own with a tiny model."""
    if address is not None:
        yield address
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.tiny import make_tiny_model  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory(prefix="qerld-bench-") as name:
        folder = Path(name)
        _, model = make_tiny_model(folder)
        ready = folder / "ready.json"
        command = ["-m", "qerld_learner", "--model", str(model), "--state-dir", str(folder / "state"), "--port", "0"]
        command += ["--metrics-port", "0", "--ready-file", str(ready), "--device", "cpu", "--trainer-threads", "1"]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, "--log-level", "WARNING")
        try:
            while not ready.exists():
                if process.returncode is not None:
                    raise RuntimeError(f"the learner ended with status {process.returncode}")
                await asyncio.sleep(0.1)
            yield f"127.0.0.1:{json.loads(ready.read_text())['port']}"
        finally:
            process.terminate()
            await process.wait()


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, figures in (await measure_echo(2000)).items():
        results[f"echo_{name}"] = figures.as_dict()
    async with learner(arguments.learner) as target, AsyncClient(target) as client:
        run = await new_run(client, groups_per_step=4096)
        count = arguments.outcomes
        warm = await imported(client, run, 400)
        await measure_stream(target, run, warm, arguments.batch, arguments.window)
        ids = await imported(client, run, count)
        results["unary"] = (await measure_unary(target, run, ids, arguments.concurrency)).as_dict()
        ids = await imported(client, run, count)
        results["stream"] = (await measure_stream(target, run, ids, arguments.batch, arguments.window)).as_dict()
        if arguments.training:
            ids = await imported(client, run, count)
            async with training(client) as steps:
                before = await steps()
                figures = await measure_stream(target, run, ids, arguments.batch, arguments.window)
                results["stream_while_training"] = {**figures.as_dict(), "steps": await steps() - before}
    return results


def machine() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learner", metavar="HOST:PORT", help="a running learner; unset: one is started")
    parser.add_argument("--outcomes", type=int, default=8000, help="outcomes of each measurement")
    parser.add_argument("--batch", type=int, default=8, help="outcomes a message of the stream")
    parser.add_argument("--window", type=int, default=4, help="messages of the stream without an answer")
    parser.add_argument("--concurrency", type=int, default=16, help="unary calls in flight")
    parser.add_argument(
        "--training", action=argparse.BooleanOptionalAction, default=True, help="measure while training"
    )
    default_out = Path(__file__).parent / "results" / "service-cpu.json"
    parser.add_argument("--out", type=Path, default=default_out, help="where the JSON goes")
    arguments = parser.parse_args()
    before = machine()
    report = {
        "command": shlex.join(["python", "benchmarks/service.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": before,
        "settings": {name: getattr(arguments, name) for name in ("outcomes", "batch", "window", "concurrency")},
        "results": asyncio.run(measure(arguments)),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["results"], indent=2))


if __name__ == "__main__":
    main()
