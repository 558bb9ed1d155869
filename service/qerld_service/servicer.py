"""PolicyReplicaService: the learner samples and scores here. Wire types end in this module."""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from qerld.v1 import common_pb2, replica_pb2, replica_pb2_grpc

from qerld_service.adapters import AdapterKey, AdapterNotLoadedError
from qerld_service.engine import Delta, EngineDiedError, PolicyEngine, RequestError, Sampling
from qerld_service.engine_types import MAX_STOP_STRING, MAX_STOPS
from qerld_service.metrics import PolicyMetrics
from qerld_service.reconciler import NotServedError, Reconciler

MAX_COUNT = 1024
MAX_ITEMS = 4096

_FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "abort": common_pb2.FINISH_REASON_ABORTED,
}


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NotServedError, grpc.StatusCode.FAILED_PRECONDITION),
    (AdapterNotLoadedError, grpc.StatusCode.FAILED_PRECONDITION),
    (EngineDiedError, grpc.StatusCode.UNAVAILABLE),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
)


class PolicyReplicaServicer(replica_pb2_grpc.PolicyReplicaServiceServicer):
    """Generate and Score on one engine. A caller that goes away takes its requests with it."""

    def __init__(self, engine: PolicyEngine, reconciler: Reconciler, metrics: PolicyMetrics) -> None:
        self._engine, self._reconciler, self._metrics = engine, reconciler, metrics

    async def Generate(
        self, request: replica_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[replica_pb2.GenerateResponse]:
        async with self._answering("Generate", context):
            sampling = sampling_of(request)
            adapter = self._reconciler.served(request.policy.run, request.policy.version)
            key = adapter.key(noise_free=request.noise_free)
            noise = common_pb2.Noise(sigma=0.0)
            if key.noisy:
                made = adapter.noise
                noise = common_pb2.Noise(
                    sigma=made.sigma,
                    seed=made.seed,
                    relative=made.relative,
                    dtype=common_pb2.NoiseDtype.Value(f"NOISE_DTYPE_{made.dtype.upper()}"),
                )
            # Two callers may use one id, and vLLM refuses a second request of a name.
            request_id = f"{request.request_id}-{uuid.uuid4().hex}"
            deltas = self._engine.generate(key, request_id, request.prompt.ids, sampling)
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    self._metrics.generated_tokens.labels("Generate").inc(len(delta.token_ids))
                    yield response_of(delta, noise)

    async def Score(
        self, request: replica_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> replica_pb2.ScoreResponse:
        response = replica_pb2.ScoreResponse()
        async with self._answering("Score", context):
            if len(request.items) > MAX_ITEMS:
                raise RequestError(f"items: at most {MAX_ITEMS} a call, got {len(request.items)}; send several")
            adapter = self._reconciler.served(request.policy.run, request.policy.version)
            for logprobs in await self._scores(adapter.key(noise_free=True), request.items):
                response.items.add(logprobs=logprobs)
                self._metrics.scored_tokens.inc(len(logprobs))
        return response

    async def _scores(self, key: AdapterKey, items: Sequence[replica_pb2.ScoreItem]) -> list[list[float]]:
        """All items at the same time; the first failure, or a cancellation, ends them all."""
        tasks = [asyncio.create_task(self._engine.score(key, item.prompt.ids, item.completion.ids)) for item in items]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.asynccontextmanager
    async def _answering(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        """Count the call, and turn our exceptions into status codes."""
        with self._metrics.call(method) as outcome:
            try:
                yield
                outcome.code = "OK"
            except tuple(kind for kind, _ in _CODES) as error:
                code = next(code for kind, code in _CODES if isinstance(error, kind))
                outcome.code = code.name
                await context.abort(code, str(error))
            except Exception:
                outcome.code = "UNKNOWN"
                raise


def sampling_of(request: replica_pb2.GenerateRequest) -> Sampling:
    """From the wire; raises RequestError naming the field."""
    wire = request.sampling
    if not 1 <= request.count <= MAX_COUNT:
        raise RequestError(f"count: must be from 1 to {MAX_COUNT}, got {request.count}")
    if request.greedy and not request.noise_free:
        raise RequestError("greedy: needs noise_free, since it is never a training rollout")
    if request.greedy and request.count != 1:
        raise RequestError(f"count: must be 1 with greedy, all completions would be the same; got {request.count}")
    if not request.greedy and not (math.isfinite(wire.temperature) and wire.temperature > 0):
        raise RequestError(
            f"sampling.temperature: must be above 0, got {wire.temperature}; greedy takes the most probable token"
        )
    if wire.max_tokens < 1:
        raise RequestError(f"sampling.max_tokens: must be at least 1, got {wire.max_tokens}")
    check_stops(wire)
    return Sampling(
        n=request.count,
        temperature=0.0 if request.greedy else wire.temperature,
        max_tokens=wire.max_tokens,
        seed=wire.seed if wire.HasField("seed") else None,
        stop_token_ids=tuple(wire.stop_ids),
        stop=tuple(wire.stop_strings),
    )


def check_stops(wire: common_pb2.Sampling) -> None:
    """Raise RequestError for too many of them, or strings that are empty or too long."""
    for name, count in (("stop_ids", len(wire.stop_ids)), ("stop_strings", len(wire.stop_strings))):
        if count > MAX_STOPS:
            raise RequestError(f"sampling.{name}: at most {MAX_STOPS} entries, got {count}; send fewer")
    for text in wire.stop_strings:
        if not 1 <= len(text) <= MAX_STOP_STRING:
            raise RequestError(
                f"sampling.stop_strings: must have from 1 to {MAX_STOP_STRING} characters, got {len(text)}; "
                "leave it out or shorten it"
            )


def response_of(delta: Delta, noise: common_pb2.Noise) -> replica_pb2.GenerateResponse:
    """To the wire."""
    return replica_pb2.GenerateResponse(
        index=delta.index,
        tokens=common_pb2.TokenIds(ids=delta.token_ids),
        logprobs=delta.logprobs,
        text=delta.text,
        finish_reason=common_pb2.FINISH_REASON_UNSPECIFIED
        if delta.finish_reason is None
        else _FINISH[delta.finish_reason],
        noise=noise,
    )
