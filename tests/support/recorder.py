"""A gRPC server that passes every call on to another one, byte by byte, and notes which method got which messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio


@dataclass
class Recorded:
    """One call: its full method, and the messages that the client sent so far."""

    method: str
    messages: list[bytes] = field(default_factory=list)


class Recorder(grpc.GenericRpcHandler):
    """Handles all methods alike: on the wire a single message is a stream of one."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._changed = asyncio.Condition()
        self.calls: list[Recorded] = []

    async def first(self, messages: int = 1, method: str = "", seconds: float = 60.0) -> Recorded:
        """Wait for the first call (of a method, when one is named) with so many messages."""

        def found() -> Recorded | None:
            calls = (call for call in self.calls if method in ("", call.method))
            return next((call for call in calls if len(call.messages) >= messages), None)

        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(found)
            call = found()
        assert call is not None
        return call

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = str(handler_call_details.method)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            recorded = Recorded(method)
            self.calls.append(recorded)
            call: Any = self._channel.stream_stream(method)(self._note(recorded, requests))
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(forward)  # type: ignore[arg-type]

    async def _note(self, recorded: Recorded, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for request in requests:
            async with self._changed:
                recorded.messages.append(request)
                self._changed.notify_all()
            yield request


@asynccontextmanager
async def recording(target: str) -> AsyncIterator[tuple[Recorder, str]]:
    """Record what is sent to a server; yields the recorder, and the address to use in place of the server's."""
    async with grpc.aio.insecure_channel(target) as channel:
        recorder = Recorder(channel)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((recorder,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield recorder, f"127.0.0.1:{port}"
        finally:
            await server.stop(0)
