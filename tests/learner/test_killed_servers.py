"""A policy server as a supervised process that is killed amid rollouts, loses its engine core, has a full disk; and a
client that is killed amid its stream."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from qerld_learner.api.server import running_server
from qerld_learner.core import Learner
from qerld_learner.records import (
    FinishReason,
    GroupOpened,
    PromptSpec,
    ReceiptState,
    RolloutFinished,
    RolloutRecord,
    SamplingSpec,
    TokenDelta,
    VersionState,
)
from qerld_learner.settings import LearnerSettings
from qerld_service.engine import PolicyEngine
from qerld_service.policy import running_policy
from qerld_service.serve import child, free_ports
from qerld_service.settings import PolicySettings
from qerld_service.supervise import RestartPolicy, Supervisor
from support.policy import policy_values

from .conftest import PROMPT_IDS, imported, new_id, new_run, options_for, reward, reward_all, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Of so many rollouts and tokens some are unfinished whenever a test strikes: a group takes seconds.
SIZE, TOKENS = 16, 200
EOS = 2
ENGINE_BYTES = 200 << 20  # vLLM's core is by far the largest child


@dataclass
class Loop:
    """A learner that serves, one run, and a policy server as a supervised process."""

    learner: Learner
    port: int
    model: Path
    folder: Path
    run: str
    supervisor: Supervisor
    log: list[str]

    @property
    def server(self) -> psutil.Process:
        process = self.supervisor.children["policy"].process
        assert process is not None
        return psutil.Process(process.pid)

    @property
    def cores(self) -> list[psutil.Process]:
        return [p for p in self.server.children(recursive=True) if p.memory_info().rss > ENGINE_BYTES]

    async def attached(self) -> bool:
        live = (await self.learner.get_run(self.run)).live_version
        return any((self.run, live) in info.loaded for info in self.learner.replicas())

    @asynccontextmanager
    async def second_server(self, engine: PolicyEngine) -> AsyncIterator[None]:
        settings = PolicySettings(**policy_values(self.model, self.port, self.folder / "second"))

        async def both() -> bool:
            return sum(bool(info.loaded) for info in self.learner.replicas()) == 2

        async with running_policy(settings, engine):
            await until(both)
            yield


@pytest.fixture(scope="module")
async def loop(tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Loop]:
    folder, model = tmp_path_factory.mktemp("killed"), tiny_model[1]
    learner = await Learner.open(options_for(folder / "state", model, admission_timeout=60.0))
    run = await new_run(learner, groups_per_step=1, max_lag=15, max_tokens=TOKENS)
    async with running_server(learner, LearnerSettings(model=model, port=0, metrics_port=0)) as port:
        values = policy_values(model, port, folder / "cache") | {"port": free_ports(1)[0]}
        spec = child("policy", "qerld_service.policy", values, folder, {"OMP_NUM_THREADS": "1"})
        lines: list[str] = []
        restarts = RestartPolicy(first_delay=0.1, stop_grace=5.0)
        supervisor = Supervisor([spec], restarts, lambda name, line: lines.append(f"{name} | {line}"))
        running = asyncio.create_task(supervisor.run())
        made = Loop(learner, port, model, folder, run, supervisor, lines)
        await until(made.attached, 240)
        yield made
        supervisor.stop()
        await running
    await learner.close()


@dataclass
class Sampling:
    """One group while it is sampled."""

    finished: list[RolloutRecord] = field(default_factory=list)
    tokens: int = 0
    ids: tuple[str, ...] = ()

    async def drive(self, learner: Learner, run: str, seed: int) -> list[RolloutRecord]:
        spec = PromptSpec(PROMPT_IDS, SIZE, SamplingSpec(temperature=1.0, max_tokens=TOKENS, seed=seed))
        async for event in learner.sample(run, new_id(), "hash", spec):
            if isinstance(event, GroupOpened):
                self.ids = event.rollout_ids
            elif isinstance(event, TokenDelta):
                self.tokens += len(event.ids)
            elif isinstance(event, RolloutFinished):
                self.finished.append(event.rollout)
        return sorted(self.finished, key=lambda rollout: rollout.index)


async def sample(loop: Loop, seeds: range) -> list[list[RolloutRecord]]:
    """Groups sampled at the same time, left alone."""
    return await asyncio.gather(*(Sampling().drive(loop.learner, loop.run, seed) for seed in seeds))


class Interrupted:
    """Groups in the middle of whose rollouts something is killed."""

    def __init__(self, loop: Loop, seeds: range) -> None:
        self.groups = [Sampling() for _ in seeds]
        drives = (group.drive(loop.learner, loop.run, seed) for group, seed in zip(self.groups, seeds, strict=True))
        self.result = asyncio.gather(*drives)

    async def begun(self) -> bool:
        return any(group.tokens for group in self.groups)

    @property
    def finished(self) -> int:
        return sum(len(group.finished) for group in self.groups)


def assert_whole(rollouts: list[RolloutRecord]) -> None:
    assert [rollout.index for rollout in rollouts] == list(range(SIZE))
    for rollout in rollouts:
        assert len(rollout.logprobs) == len(rollout.completion_ids) == rollout.spans[-1].end
        if rollout.finish_reason is FinishReason.LENGTH:
            assert len(rollout.completion_ids) == TOKENS
        else:
            assert (rollout.finish_reason, rollout.completion_ids[-1]) == (FinishReason.STOP, EOS)


def assert_as_undisturbed(found: list[list[RolloutRecord]], undisturbed: list[list[RolloutRecord]]) -> None:
    for group, expected in zip(found, undisturbed, strict=True):
        assert_whole(group)
        assert [r.completion_ids for r in group] == [r.completion_ids for r in expected]


async def test_a_killed_server_shortens_no_rollout_and_stops_nothing_else(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor starts it again, it rejoins, and what was lost is sampled again with the same seeds."""
    learner, seeds = loop.learner, range(1, 3)
    undisturbed = await sample(loop, seeds)
    killed, cores = loop.server, loop.cores
    interrupted = Interrupted(loop, seeds)
    await until(interrupted.begun)
    killed.kill()
    assert interrupted.finished < 2 * SIZE

    # While no server is there, what needs none goes on.
    other = await imported(learner, loop.run)
    await reward_all(learner, other, [0.0, 1.0, 0.0, 1.0])

    async def trained() -> bool:
        return (await learner.receipt(other.rollout_ids[0])).state is ReceiptState.TRAINED

    await until(trained)
    assert not interrupted.result.done()
    (status,) = await learner.statuses()
    assert "policy server" in status.waiting_for

    found = await asyncio.wait_for(interrupted.result, 240)
    assert_as_undisturbed(found, undisturbed)
    assert "lost a request" in caplog.text
    assert loop.server.pid != killed.pid
    assert len(cores) == 1
    assert not cores[0].is_running()

    # The loop goes on with the server that came back: what was sampled is trained and promoted.
    for group in found:
        outcomes = [reward(r.rollout_id, float(r.index)) for r in group]
        await learner.submit_outcomes(loop.run, new_id(), "hash", outcomes)

    async def promoted() -> bool:
        return (await learner.get_run(loop.run)).live_version == 3

    await until(promoted)


async def test_a_full_disk_of_a_server_delays_a_version_and_nothing_else(loop: Loop) -> None:
    """The kernel refuses its writes (RLIMIT_FSIZE), as with a full disk or a quota; the download is tried again."""
    learner, pid = loop.learner, loop.server.pid
    before = (await learner.get_run(loop.run)).live_version

    async def said() -> bool:
        return any("free space or set cache_dir to another disk" in line for line in loop.log)

    async def promoted() -> bool:
        return (await learner.get_run(loop.run)).live_version == before + 1

    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
    try:
        await reward_all(learner, await imported(learner, loop.run), [0.0, 1.0, 0.0, 1.0])
        await until(said)
        assert not await promoted()
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    await until(promoted)
    assert loop.server.pid == pid


CLIENT = """
import sys, grpc
from qerld.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc
address, run, seed, size, tokens = sys.argv[1:]
sampling = common_pb2.Sampling(max_tokens=int(tokens), seed=int(seed))
prompt = common_pb2.Prompt(ids=common_pb2.TokenIds(ids=[5, 6, 7, 8]))
request = rollout_pb2.SampleRequest(
    run=run, request_id="killed", prompt=prompt, group_size=int(size), sampling=sampling, stream_deltas=True
)
for event in rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(address)).Sample(request):
    print(event.WhichOneof("event"), *event.opened.rollout_ids, flush=True)
"""


async def test_the_rollouts_of_a_killed_client_are_finished_and_kept(loop: Loop) -> None:
    learner, seed = loop.learner, 7
    undisturbed = await sample(loop, range(seed, seed + 1))
    arguments = [f"127.0.0.1:{loop.port}", loop.run, str(seed), str(SIZE), str(TOKENS)]
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    _, *ids = (await client.stdout.readline()).decode().split()
    assert (await client.stdout.readline()).decode().split() == ["delta"]
    client.kill()
    await client.wait()
    assert not all([(await learner.get_rollout(one)).finish_reason for one in ids])

    async def finished() -> bool:
        return all([(await learner.get_rollout(one)).finish_reason for one in ids])

    await until(finished)
    assert_as_undisturbed([[await learner.get_rollout(one) for one in ids]], undisturbed)


async def test_a_killed_engine_core_costs_only_a_second_try(
    loop: Loop, engine: PolicyEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """With a second server attached: groups there are not touched, the lost ones are sampled there again."""
    await until(loop.attached, 240)
    async with loop.second_server(engine):
        seeds = range(11, 15)
        undisturbed = await sample(loop, seeds)
        (core,) = loop.cores
        interrupted = Interrupted(loop, seeds)

        async def both_sample() -> bool:
            return all(info.in_flight for info in loop.learner.replicas()) and await interrupted.begun()

        await until(both_sample)
        core.kill()
        assert interrupted.finished < 4 * SIZE
        found = await asyncio.wait_for(interrupted.result, 240)
        assert_as_undisturbed(found, undisturbed)
        assert "lost a request" in caplog.text

        async def ended() -> bool:
            return any("policy ended with status 1" in line for line in loop.log)

        await until(ended)


async def test_a_server_that_leaves_during_the_canary_has_not_passed_the_version(
    tiny_model: tuple[Path, Path], engine: PolicyEngine, tmp_path: Path
) -> None:
    learner = await Learner.open(options_for(tmp_path / "state", tiny_model[1]))
    run = await new_run(learner, groups_per_step=1)

    async def in_canary() -> bool:
        versions, _ = await learner.list_versions(run, 0, "")
        return versions[0].version == 1 and versions[0].state is not VersionState.STAGED

    async with running_server(learner, LearnerSettings(model=tiny_model[1], port=0, metrics_port=0)) as port:
        values = policy_values(tiny_model[1], port, tmp_path / "cache") | {"drain_seconds": 0.0}
        async with running_policy(PolicySettings(**values), engine):
            await reward_all(learner, await imported(learner, run), [0.0, 1.0, 0.0, 1.0])
            await until(in_canary)
        async with running_policy(PolicySettings(**values), engine), asyncio.timeout(120):
            report = await anext(learner.watch_reports(run, 0))
    assert (report.version, report.metrics.get("reverted")) == (1, None)
    # Rounding differs: exactly 0 is the gap of a canary that never was.
    assert 0 < report.metrics["logprob_gap"] < 1e-3
    await learner.close()
