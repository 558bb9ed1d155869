"""Completions of a version without noise: for Evaluate, and for held-out evaluation inside a run. Nothing is stored.

A version that policy servers do not have any more is wanted again for as long as its evaluation lasts. A server that
dies costs the prompts that it was at, which others do again: a prompt's samples depend on its seed only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import grpc

from .errors import InvalidRequestError, NotFoundError, PreconditionError, RetryLaterError, Violation
from .records import FinishReason, SamplingSpec
from .replicas import NewTokens, Replica, ReplicaLostError
from .sampler import FATAL_CODES, FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, LOST_ERRORS, not_idle
from .shared import Shared
from .store import runs
from .versions import publish_desired

_log = logging.getLogger(__name__)

SLOT_RETRY_SECONDS = 30.0


@dataclass(frozen=True)
class EvaluationSpec:
    """What to complete: sample s of prompt p is drawn with seed + p * samples + s. Greedy: one sample, no seed."""

    run: str
    version: int
    prompts: tuple[tuple[int, ...], ...]
    samples: int
    greedy: bool
    sampling: SamplingSpec


@dataclass
class Completed:
    """One completion: `logprobs` has one entry a token."""

    prompt_index: int
    sample_index: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def take(self, new: NewTokens) -> None:
        """Add tokens. Raises `ReplicaLostError` when the server gave the completion up."""
        if new.finish_reason is FinishReason.ABORTED:
            raise ReplicaLostError("the server aborted the completion")
        self.ids += new.ids
        self.logprobs += new.logprobs
        self.text += new.text
        self.finish_reason = new.finish_reason or self.finish_reason


Take = Callable[[Completed], Awaitable[None]]


async def evaluate(shared: Shared, spec: EvaluationSpec, take: Take) -> None:
    """Complete every prompt and hand each completion to `take` once, in the order in which prompts are finished.

    Raises:
        NotFoundError: Run or version is unknown, or the version's files were collected.
        PreconditionError: No policy server can serve the version, and why.
        RetryLaterError: None has an adapter slot for it.
        InvalidRequestError: A policy server refuses a prompt.
    """
    await _require_files(shared, spec)
    with shared.evaluating(spec.run, spec.version):
        await publish_desired(shared)
        waiting = iter(range(len(spec.prompts)))
        count = min(len(spec.prompts), max(1, shared.options.evaluation_parallel // spec.samples))
        workers = [asyncio.create_task(_work(shared, spec, waiting, take)) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _require_files(shared: Shared, spec: EvaluationSpec) -> None:
    _record, folder = await shared.store.read(lambda c: runs.find_version(c, spec.run, spec.version))
    if not folder:
        raise NotFoundError(
            f"version {spec.version} of run {spec.run!r} was collected, its files are gone; evaluate a newer one "
            f"(ListVersions), or let the learner keep more than keep_versions = {shared.options.keep_versions}"
        )


async def _work(shared: Shared, spec: EvaluationSpec, waiting: Iterator[int], take: Take) -> None:
    for position in waiting:
        for completed in await _complete(shared, spec, position):
            await take(completed)


async def _complete(shared: Shared, spec: EvaluationSpec, position: int) -> list[Completed]:
    """Return all samples of a prompt, tried again on another server when one is lost."""
    backoff = FIRST_BACKOFF_SECONDS
    while True:
        replica = await _route(shared, spec)
        try:
            return await _attempt(replica, spec, position)
        except LOST_ERRORS as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in FATAL_CODES:
                text = f"policy server {replica.hello.replica_id} refuses it: {error.details()}; leave it out"
                raise InvalidRequestError([Violation(f"prompts[{position}]", text)]) from error
            _log.warning("policy server %s lost an evaluated prompt: %s", replica.hello.replica_id, error)
            replica.avoid(LAST_BACKOFF_SECONDS)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)


async def _route(shared: Shared, spec: EvaluationSpec) -> Replica:
    """Wait for a server that serves the version."""
    pool, run, version = shared.pool, spec.run, spec.version
    while True:
        seen = pool.changed.count
        if (replica := pool.best_for(run, version)) is not None:
            return replica
        await shared.store.read(lambda c: runs.find_run(c, run))
        if why := pool.obstacle() or pool.refusal(run, version):
            raise PreconditionError(
                f"version {version} of run {run!r} cannot be evaluated: {why}; ListReplicas lists the policy servers"
            )
        await publish_desired(shared)
        if not pool.has_room(run, version):
            raise RetryLaterError(
                f"no policy server has a slot for version {version} of run {run!r} beside those that the runs need; "
                "evaluate the live version, or start policy servers with a higher max_loras (two a version)",
                retry_after=SLOT_RETRY_SECONDS,
            )
        await pool.changed.wait(seen, at_most=1.0)


async def _attempt(replica: Replica, spec: EvaluationSpec, position: int) -> list[Completed]:
    completions = [Completed(position, sample) for sample in range(spec.samples)]
    sampling = replace(spec.sampling, seed=(spec.sampling.seed + position * spec.samples) % (1 << 64))
    stream = replica.client.generate(
        spec.run,
        spec.version,
        f"evaluation-{position}",
        spec.prompts[position],
        spec.samples,
        sampling,
        noise_free=True,
        greedy=spec.greedy,
    )
    replica.in_flight += spec.samples
    try:
        async for new in not_idle(stream):
            completions[new.index].take(new)
    finally:
        replica.in_flight -= spec.samples
    if any(completed.finish_reason is None for completed in completions):
        raise ReplicaLostError("the stream ended before every completion was finished")
    return completions
