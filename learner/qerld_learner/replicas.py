"""Attached policy servers: what each should serve, what it serves, and calls to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from qerld.v1 import common_pb2, replica_pb2, replica_pb2_grpc

from .errors import PreconditionError
from .records import FinishReason, NoiseRecord, SamplingSpec
from .replica_records import DesiredState, DesiredVersion, ReplicaHello, ReplicaReport
from .signals import Signal

MESSAGE_LIMIT = 64 << 20
SCORE_TIMEOUT_SECONDS = 300.0
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.keepalive_time_ms", 60_000),
    # A replica that comes back on the same address must be found again within a second.
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}


# A refused server tries again every few seconds; one that was not heard of for so long is gone.
REFUSAL_SECONDS = 60.0
MOST_REFUSALS = 16


@dataclass(frozen=True)
class ReplicaInfo:
    """A policy server that is attached, or was refused lately (`refused_reason` is "" when attached).

    `loaded` are the (run, version) pairs that it serves.
    """

    hello: ReplicaHello
    loaded: tuple[tuple[str, int], ...] = ()
    reconciled: bool = False
    in_flight: int = 0
    quarantine_reason: str = ""
    refused_reason: str = ""


@dataclass(frozen=True)
class NewTokens:
    """A stretch of new tokens of completion `index` of a Generate call."""

    index: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    noise: NoiseRecord
    finish_reason: FinishReason | None


class ReplicaLostError(Exception):
    """The policy server was detached while a call to it ran, or before it began."""


@contextmanager
def _own_cancellation() -> Iterator[None]:
    """Closing a channel cancels its calls, which looks like a cancellation of the caller: tell the two apart."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ReplicaLostError("the policy server was detached during the call") from None
    except grpc.aio.UsageError as error:
        raise ReplicaLostError(str(error)) from error


class ReplicaClient:
    """Calls PolicyReplicaService of one policy server; raises `grpc.aio.AioRpcError` and `ReplicaLostError`."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, options=_CHANNEL_OPTIONS)
        self._stub = replica_pb2_grpc.PolicyReplicaServiceStub(self._channel)

    async def generate(
        self,
        run: str,
        version: int,
        request_id: str,
        prompt_ids: Sequence[int],
        count: int,
        sampling: SamplingSpec,
        *,
        noise_free: bool = False,
        greedy: bool = False,
    ) -> AsyncGenerator[NewTokens, None]:
        """Sample `count` completions; completion i has seed + i. `greedy` needs `noise_free` and a count of 1."""
        request = replica_pb2.GenerateRequest(
            policy=common_pb2.Policy(run=run, version=version),
            request_id=request_id,
            prompt=common_pb2.TokenIds(ids=prompt_ids),
            count=count,
            sampling=_sampling(sampling),
            noise_free=noise_free,
            greedy=greedy,
        )
        with _own_cancellation():
            call = self._stub.Generate(request)
        try:
            while True:
                with _own_cancellation():
                    message = await call.read()
                if not isinstance(message, replica_pb2.GenerateResponse):  # grpc.aio.EOF
                    return
                yield _new_tokens(message)
        finally:
            call.cancel()

    async def score(
        self, run: str, version: int, sequences: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> list[list[float]]:
        """Return the log-probabilities of (prompt, completion) pairs at temperature 1 and without noise."""
        items = [
            replica_pb2.ScoreItem(prompt=common_pb2.TokenIds(ids=p), completion=common_pb2.TokenIds(ids=c))
            for p, c in sequences
        ]
        request = replica_pb2.ScoreRequest(policy=common_pb2.Policy(run=run, version=version), items=items)
        with _own_cancellation():
            response = await self._stub.Score(request, timeout=SCORE_TIMEOUT_SECONDS)
        return [list(item.logprobs) for item in response.items]

    async def close(self) -> None:
        """Close the channel; calls in flight end with CANCELLED."""
        await self._channel.close()


def _sampling(sampling: SamplingSpec) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop_ids=sampling.stop_ids,
        stop_strings=sampling.stop_strings,
    )


def _noise(message: common_pb2.Noise) -> NoiseRecord:
    number = message.dtype or common_pb2.NOISE_DTYPE_FLOAT32
    dtype = common_pb2.NoiseDtype.Name(number).removeprefix("NOISE_DTYPE_").lower()
    return NoiseRecord(message.sigma, message.seed, message.relative, dtype)


def _new_tokens(message: replica_pb2.GenerateResponse) -> NewTokens:
    return NewTokens(
        index=message.index,
        ids=tuple(message.tokens.ids),
        logprobs=tuple(message.logprobs),
        text=message.text,
        noise=_noise(message.noise),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
    )


class Replica:
    """One attached policy server as the learner sees it."""

    def __init__(self, hello: ReplicaHello) -> None:
        self.hello = hello
        self.client = ReplicaClient(hello.endpoint)
        self.attached = True
        self.in_flight = 0
        self.quarantine = ""
        self.avoid_until = 0.0
        self.reported = ReplicaReport((), 0, False, "")

    def serves(self, run: str, version: int) -> bool:
        """Whether requests for a version can be sent to it now."""
        if not self.attached or self.quarantine or self.reported.error:
            return False
        return any(a.run == run and a.version == version and a.serving for a in self.reported.adapters)

    def avoid(self, seconds: float) -> None:
        """Prefer other servers for a while: a call to this one has just failed."""
        self.avoid_until = time.monotonic() + seconds

    def refusal(self, run: str, version: int) -> str:
        """Return why it cannot load a version, "" when it can or still tries: a broken download says nothing of it."""
        states = (a for a in self.reported.adapters if a.run == run and a.version == version and not a.serving)
        return next((a.error for a in states if a.error and not a.retrying), "")

    def load_seconds(self, run: str, version: int) -> float:
        """Return how long it took to load a version, 0 when it has not."""
        seconds = (a.load_seconds for a in self.reported.adapters if a.run == run and a.version == version)
        return next(seconds, 0.0)

    def info(self) -> ReplicaInfo:
        """Return what clients may see of it."""
        loaded = tuple((a.run, a.version) for a in self.reported.adapters if a.serving)
        why = self.quarantine or self.reported.error
        return ReplicaInfo(self.hello, loaded, self.reported.reconciled, self.in_flight, why)


class ReplicaPool:
    """The attached policy servers and the state that all of them should reach."""

    def __init__(self) -> None:
        self.changed = Signal()
        self._replicas: dict[str, Replica] = {}
        # By endpoint, newest last: who was refused, why, and when (monotonic).
        self._refusals: dict[str, tuple[ReplicaInfo, float]] = {}
        self._desired_changed = Signal()
        # Grows over restarts of the learner, too: servers keep running and compare generations.
        self._generation = time.time_ns() // 1_000_000
        self._versions: tuple[DesiredVersion, ...] = ()

    def all(self) -> list[Replica]:
        """Return the attached servers."""
        return list(self._replicas.values())

    def want(self, versions: Sequence[DesiredVersion]) -> None:
        """Set what all servers should serve, most important first."""
        if tuple(versions) == self._versions:
            return
        self._versions = tuple(versions)
        self._generation = max(self._generation + 1, time.time_ns() // 1_000_000)
        self._desired_changed.notify()

    def best_for(self, run: str, version: int) -> Replica | None:
        """Return the least busy server that serves a version now."""
        serving = [replica for replica in self._replicas.values() if replica.serves(run, version)]
        now = time.monotonic()
        return min(serving, key=lambda replica: (replica.avoid_until > now, replica.in_flight), default=None)

    def has_room(self, run: str, version: int) -> bool:
        """Whether a wanted version has a place on a server that may serve, or none is attached yet."""
        usable = [replica for replica in self._replicas.values() if not replica.quarantine]
        # Each takes the first of the wanted versions, as many as it has slots for.
        slots = max((replica.hello.slots for replica in usable), default=len(self._versions))
        return any((v.run, v.version) == (run, version) for v in self._versions[:slots])

    def refusal(self, run: str, version: int) -> str:
        """Return why no server can load a version, "" when one may."""
        usable = [replica for replica in self._replicas.values() if not replica.quarantine]
        refusals = [f"{replica.hello.replica_id}: {replica.refusal(run, version)}" for replica in usable]
        return "; ".join(refusals) if usable and all(r.refusal(run, version) for r in usable) else ""

    def max_model_len(self) -> int | None:
        """Return the smallest context of the attached servers."""
        return min((replica.hello.max_model_len for replica in self._replicas.values()), default=None)

    def least_slots(self) -> int | None:
        """Return the smallest number of adapter slots of the attached servers."""
        return min((replica.hello.slots for replica in self._replicas.values()), default=None)

    def least_rank(self) -> int | None:
        """Return the smallest max_lora_rank of the attached servers."""
        return min((replica.hello.max_lora_rank for replica in self._replicas.values()), default=None)

    def refuse(self, hello: ReplicaHello, reason: str) -> None:
        """Remember for a while that a server may not attach, and why."""
        self._refusals.pop(hello.endpoint, None)
        self._refusals[hello.endpoint] = (ReplicaInfo(hello, refused_reason=reason), time.monotonic())
        while len(self._refusals) > MOST_REFUSALS:
            del self._refusals[next(iter(self._refusals))]

    def refused(self) -> list[ReplicaInfo]:
        """Return the servers that were refused lately, the last one first."""
        since = time.monotonic() - REFUSAL_SECONDS
        return [info for info, at in reversed(self._refusals.values()) if at >= since]

    def obstacle(self) -> str:
        """Return why no server can sample, "" when one can or may soon: then it is worth waiting."""
        if any(not replica.quarantine for replica in self.all()):
            return ""
        found = [f"policy server {replica.hello.replica_id}: {replica.quarantine}" for replica in self.all()]
        if refused := self.refused():
            found.append(f"the last policy server that tried to attach was refused: {refused[0].refused_reason}")
        return "; ".join(found)

    async def attach(self, hello: ReplicaHello) -> ReplicaSession:
        """Take a server in; one with the same id or endpoint takes the place of the older one."""
        self._refusals.pop(hello.endpoint, None)
        for older in self.all():
            if hello.replica_id == older.hello.replica_id or hello.endpoint == older.hello.endpoint:
                await self.detach(older)
        replica = Replica(hello)
        self._replicas[hello.replica_id] = replica
        self.changed.notify()
        return ReplicaSession(self, replica)

    async def detach(self, replica: Replica) -> None:
        """Forget a server; calls to it end."""
        replica.attached = False
        if self._replicas.get(replica.hello.replica_id) is replica:
            del self._replicas[replica.hello.replica_id]
        self.changed.notify()
        self._desired_changed.notify()
        await replica.client.close()

    async def close(self) -> None:
        """Forget all servers."""
        for replica in self.all():
            await self.detach(replica)

    async def desired_for(self, replica: Replica) -> AsyncIterator[DesiredState]:
        """Yield what a server should serve, within its slots, now and at each change."""
        while replica.attached:
            seen = self._desired_changed.count
            # A slot holds a version, with its noise and without.
            yield DesiredState(self._generation, self._versions[: replica.hello.slots])
            await self._desired_changed.wait(seen)


class ReplicaSession:
    """One attachment, from Hello to close."""

    def __init__(self, pool: ReplicaPool, replica: Replica) -> None:
        self._pool = pool
        self._replica = replica

    def desired(self) -> AsyncIterator[DesiredState]:
        """Yield the desired state now and at each change, until the session is closed."""
        return self._pool.desired_for(self._replica)

    async def report(self, report: ReplicaReport) -> None:
        """Take what the server has now."""
        if self._replica.attached:
            self._replica.reported = report
            self._pool.changed.notify()

    async def close(self) -> None:
        """Forget the server; its rollouts go to others."""
        if self._replica.attached:
            await self._pool.detach(self._replica)


def check_hello(hello: ReplicaHello, expected: Sequence[tuple[str, str, str]], least_slots: int, rank: int) -> None:
    """Raise `PreconditionError` naming everything that differs; `expected` are (field, the server's, the learner's)."""
    problems = [
        f"{field} is {theirs!r}, the learner has {ours!r}" for field, theirs, ours in expected if theirs != ours
    ]
    if hello.slots < least_slots:
        problems.append(f"slots is {hello.slots}, the runs need {least_slots} (two versions each); raise max_loras")
    if hello.max_lora_rank < rank:
        problems.append(f"max_lora_rank is {hello.max_lora_rank}, a run has rank {rank}; raise max_lora_rank")
    if problems:
        raise PreconditionError("policy server does not fit: " + "; ".join(problems))
