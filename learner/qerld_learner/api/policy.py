"""PolicyService: versions and adapters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from qerld.v1 import policy_pb2, policy_pb2_grpc

from qerld_learner.api import convert, evaluation
from qerld_learner.api.checks import Checks
from qerld_learner.api.errors import NotServedError
from qerld_learner.api.service import Context, Service, check_run
from qerld_learner.errors import NotFoundError
from qerld_learner.versions import ADAPTER_FILES, WEIGHTS_FILE

CHUNK_BYTES = 1 << 20


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """Knows versions and hands out adapters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def GetPolicy(self, request: policy_pb2.GetPolicyRequest, context: Context) -> policy_pb2.GetPolicyResponse:
        check_run(request.run)
        version = request.version if request.HasField("version") else None
        record = await self._service.learner.get_version(request.run, version)
        return policy_pb2.GetPolicyResponse(version=convert.policy_version(record))

    async def ListVersions(
        self, request: policy_pb2.ListVersionsRequest, context: Context
    ) -> policy_pb2.ListVersionsResponse:
        check_run(request.run)
        checks = Checks()
        page_size = checks.page_size(request.page_size)
        checks.done()
        versions, token = await self._service.learner.list_versions(request.run, page_size, request.page_token)
        return policy_pb2.ListVersionsResponse(versions=map(convert.policy_version, versions), next_page_token=token)

    async def WatchPolicy(
        self, request: policy_pb2.WatchPolicyRequest, context: Context
    ) -> AsyncIterator[policy_pb2.WatchPolicyResponse]:
        check_run(request.run)
        await self._service.learner.get_run(request.run)
        box = self._service.streams.outbox()
        box.pump(self._service.learner.watch_live(request.run))
        async for record in box.drain():
            yield policy_pb2.WatchPolicyResponse(version=convert.policy_version(record))

    async def DownloadAdapter(
        self, request: policy_pb2.DownloadAdapterRequest, context: Context
    ) -> AsyncIterator[policy_pb2.DownloadAdapterResponse]:
        check_run(request.policy.run)
        checks = Checks()
        name = request.file or WEIGHTS_FILE
        if name not in ADAPTER_FILES:
            checks.add("file", f"must be one of {', '.join(ADAPTER_FILES)}, got {name[:40]!r}; ask for one of them")
        checks.done()
        path, sha256 = await self._service.learner.adapter_file(request.policy.run, request.policy.version, name)
        # From here on the version may be collected: an open file stays readable.
        with await asyncio.to_thread(_open, path) as file:
            total = os.fstat(file.fileno()).st_size
            if request.offset > total:
                problem = f"must be at most the file's {total} bytes, got {request.offset}; begin at 0 again"
                checks.add("offset", problem)
            checks.done()
            async for chunk in _chunks(file, request.offset):
                if chunk.offset == request.offset:
                    chunk.total_bytes, chunk.sha256 = total, sha256
                yield chunk

    async def RollbackPolicy(
        self, request: policy_pb2.RollbackPolicyRequest, context: Context
    ) -> policy_pb2.RollbackPolicyResponse:
        raise NotServedError("RollbackPolicy", "a failed canary rolls back by itself; PauseRun stops training")

    async def PinPolicy(self, request: policy_pb2.PinPolicyRequest, context: Context) -> policy_pb2.PinPolicyResponse:
        raise NotServedError("PinPolicy", "DownloadAdapter copies a version that is to be kept")

    async def Evaluate(
        self, request: policy_pb2.EvaluateRequest, context: Context
    ) -> AsyncIterator[policy_pb2.EvaluateResponse]:
        check_run(request.policy.run)
        checks = Checks()
        limits = await self._service.limits(request.policy.run)
        spec = await self._service.tokenise(evaluation.evaluation_spec, checks, request, limits)
        checks.done()
        box = self._service.streams.outbox()
        box.spawn(self._service.learner.evaluate(spec, box.put))
        async for completed in box.drain():
            yield evaluation.response(completed)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFoundError("the version was collected just now; its files are gone") from None


async def _chunks(file: BinaryIO, offset: int) -> AsyncIterator[policy_pb2.DownloadAdapterResponse]:
    """Yield the file from `offset` in chunks, read off the event loop; at its end one empty chunk."""
    file.seek(offset)
    data = await asyncio.to_thread(file.read, CHUNK_BYTES)
    while True:
        yield policy_pb2.DownloadAdapterResponse(offset=offset, data=data)
        offset += len(data)
        data = await asyncio.to_thread(file.read, CHUNK_BYTES)
        if not data:
            return
