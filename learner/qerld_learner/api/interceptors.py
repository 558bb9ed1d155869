"""The two interceptors of the server: metrics outside, errors inside.

gRPC has four shapes of handlers; here the request side does not matter, only whether one response is returned or many
are yielded. Both interceptors therefore wrap through `_rewrap`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from qerld_learner.api.errors import DETAILS_KEY, to_status
from qerld_learner.errors import LearnerError
from qerld_learner.metrics import LearnerMetrics

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
UnaryBehaviour = Callable[[Any, Context], Awaitable[Any]]
StreamBehaviour = Callable[[Any, Context], AsyncIterator[Any]]


def _rewrap(
    handler: Any,
    unary: Callable[[UnaryBehaviour], UnaryBehaviour],
    stream: Callable[[StreamBehaviour], StreamBehaviour],
) -> Any:
    """Return `handler` with its behaviour wrapped by `unary` or `stream`, by the shape of its response."""
    serializers = (handler.request_deserializer, handler.response_serializer)
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream(handler.stream_stream), *serializers)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream(handler.unary_stream), *serializers)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary(handler.stream_unary), *serializers)
    return grpc.unary_unary_rpc_method_handler(unary(handler.unary_unary), *serializers)


async def _responses(behaviour: StreamBehaviour, request: Any, context: Context) -> AsyncIterator[Any]:
    """Yield what a behaviour yields. One that writes to the context itself (Watch of gRPC's health) is a coroutine."""
    answer: Any = behaviour(request, context)
    if inspect.isawaitable(answer):
        await answer
        return
    async for response in answer:
        yield response


async def _fail(context: Context, method: str, error: Exception) -> None:
    """End the call: a domain error with its status, anything else as INTERNAL with a reference into the log."""
    if isinstance(error, LearnerError):
        code, status = to_status(error)
        await context.abort(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    reference = uuid.uuid4().hex[:12]
    log.error("%s failed, reference %s", method, reference, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error; the learner's log has it under {reference}")


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions into statuses; servicers only raise."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)

        def unary(behaviour: UnaryBehaviour) -> UnaryBehaviour:
            async def wrapped(request: Any, context: Context) -> Any:
                try:
                    return await behaviour(request, context)
                except (grpc.aio.AbortError, grpc.RpcError):
                    raise
                except Exception as error:
                    return await _fail(context, method, error)

            return wrapped

        def stream(behaviour: StreamBehaviour) -> StreamBehaviour:
            async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
                try:
                    async for response in _responses(behaviour, request, context):
                        yield response
                except (grpc.aio.AbortError, grpc.RpcError):
                    raise
                except Exception as error:
                    await _fail(context, method, error)

            return wrapped

        return None if handler is None else _rewrap(handler, unary, stream)


class MetricsInterceptor(grpc.aio.ServerInterceptor):
    """Counts calls by method and code and times them, under the conventional names."""

    def __init__(self, metrics: LearnerMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        service, _, method = str(handler_call_details.method).removeprefix("/").partition("/")

        def unary(behaviour: UnaryBehaviour) -> UnaryBehaviour:
            async def wrapped(request: Any, context: Context) -> Any:
                with _Timed(self._metrics, service, method, context):
                    return await behaviour(request, context)

            return wrapped

        def stream(behaviour: StreamBehaviour) -> StreamBehaviour:
            async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
                with _Timed(self._metrics, service, method, context):
                    async for response in _responses(behaviour, request, context):
                        yield response

            return wrapped

        # Unknown methods never reach a handler: gRPC answers them, and their names cannot grow a label.
        return None if handler is None else _rewrap(handler, unary, stream)


class _Timed:
    """Context manager around one call; reads its code at the end."""

    def __init__(self, metrics: LearnerMetrics, service: str, method: str, context: Context) -> None:
        self._metrics, self._service, self._method, self._context = metrics, service, method, context

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = time.perf_counter() - self._started
        self._metrics.observe_rpc(self._service, self._method, self._code(kind), seconds)

    def _code(self, kind: type[BaseException] | None) -> str:
        if kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            return grpc.StatusCode.CANCELLED.name
        code: Any = self._context.code()  # an int 0 or None before anything was set, a StatusCode afterwards
        if isinstance(code, grpc.StatusCode):
            return code.name
        return "UNKNOWN" if kind is not None else "OK"
