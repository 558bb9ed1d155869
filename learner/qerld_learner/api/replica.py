"""ReplicaService: policy servers attach themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from qerld.v1 import replica_pb2, replica_pb2_grpc

from qerld_learner.api import convert, requests
from qerld_learner.api.service import Context, Service
from qerld_learner.errors import InvalidRequestError, RetryLaterError, Violation
from qerld_learner.replicas import ReplicaSession


class ReplicaServicer(replica_pb2_grpc.ReplicaServiceServicer):
    """Holds one stream a policy server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Attach(
        self, request_iterator: AsyncIterator[replica_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[replica_pb2.AttachResponse]:
        first = await self._next(request_iterator)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidRequestError([Violation("hello", "must be the first message of the stream; send Hello")])
        session = await self._service.learner.attach(requests.replica_hello(first.hello))
        try:
            box = self._service.streams.outbox()
            box.pump(session.desired())
            box.spawn(self._read(session, request_iterator))
            async for desired in box.drain():
                yield replica_pb2.AttachResponse(desired=convert.desired_state(desired))
        finally:
            await session.close()

    async def _read(self, session: ReplicaSession, messages: AsyncIterator[replica_pb2.AttachRequest]) -> None:
        while (message := await self._next(messages)) is not None:
            if message.WhichOneof("message") != "state":
                raise InvalidRequestError([Violation("state", "must be set after Hello; send ReplicaState")])
            await session.report(requests.replica_report(message.state))

    async def _next(self, messages: AsyncIterator[replica_pb2.AttachRequest]) -> replica_pb2.AttachRequest | None:
        """Return the next message, or None at the end; a silent policy server counts as lost."""
        seconds = self._service.replica_timeout
        try:
            async with asyncio.timeout(seconds):
                return await anext(aiter(messages), None)
        except TimeoutError:
            silent = f"no report for {seconds:g} s; report at least every ten seconds, and attach again"
            raise RetryLaterError(silent, retry_after=1.0, unavailable=True) from None
