"""What every servicer needs, and a few conversions that need more than the message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from qerld_learner.api.checks import Checks, body_hash
from qerld_learner.api.requests import PromptLimits
from qerld_learner.api.streams import Streams
from qerld_learner.core import Learner
from qerld_learner.metrics import LearnerMetrics
from qerld_learner.tokens import PromptTokenizer

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
LARGE_BYTES = 1 << 18
"""A message above it is converted and hashed in a thread; for a smaller one the way there and back costs more."""


async def off_loop(message: Message, work: Callable[..., T], *arguments: Any) -> T:
    """Return what `work` on a message returns, off the event loop when it is large: 64 MiB of rewards take 3 s."""
    if message.ByteSize() <= LARGE_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


@dataclass(frozen=True)
class Service:
    """The learner and what surrounds it.

    Attributes:
        replica_timeout: Seconds without a report after which a policy server counts as lost.
    """

    learner: Learner
    tokenizer: PromptTokenizer
    metrics: LearnerMetrics
    streams: Streams
    replica_timeout: float = 30.0
    # One thread: the tokenizer is not made for several.
    tokenising: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenise"))

    async def tokenise(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return what `work` returns, off the event loop: 4 MB of text take 3 s, and other calls go on."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenising, work, *arguments)

    async def body_hash(self, request: Message) -> str:
        """Return the hash of a mutation's body."""
        return await off_loop(request, body_hash, request)

    @property
    def context(self) -> int:
        """Largest prompt and completion together, in tokens: the model's, or less where policy servers have less."""
        served = self.learner.model.max_model_len
        return self.tokenizer.context if served is None else min(served, self.tokenizer.context)

    async def limits(self, run: str) -> PromptLimits:
        """Return what prompts of a run are checked against; raises `NotFoundError` for an unknown run."""
        record = await self.learner.get_run(run)
        return PromptLimits(config=record.config, tokenizer=self.tokenizer, context=self.context)


def check_run(run: str) -> None:
    """Raise `InvalidRequestError` when no run is named."""
    checks = Checks()
    checks.run(run)
    checks.done()


def check_mutation(run: str, request_id: str) -> None:
    """Raise `InvalidRequestError` unless a run is named and the request id is usable."""
    checks = Checks()
    checks.run(run)
    checks.request_id(request_id)
    checks.done()
