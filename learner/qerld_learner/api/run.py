"""RunService: create, steer and report runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from qerld.v1 import run_pb2, run_pb2_grpc

from qerld_learner.api import convert
from qerld_learner.api.checks import Checks, body_hash
from qerld_learner.api.errors import NotServedError
from qerld_learner.api.run_config import run_config
from qerld_learner.api.service import Context, Service, check_mutation, check_run

MAX_REASON = 1000


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """Creates, steers and reports runs."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def CreateRun(self, request: run_pb2.CreateRunRequest, context: Context) -> run_pb2.CreateRunResponse:
        checks = Checks()
        checks.run_name(request.run)
        checks.request_id(request.request_id)
        config = run_config(checks, request.config)
        checks.violations.extend(self._service.learner.check_run_config(config))
        checks.done()
        # An adapter has up to 64 MiB: even asking for the size of such a message takes a tenth of a second.
        digest = await asyncio.to_thread(body_hash, request)
        # To its end even when the caller goes away: a run that is stored needs its loops.
        record = await asyncio.shield(
            self._service.learner.create_run(request.run, request.request_id, digest, config, request.initial_adapter)
        )
        return run_pb2.CreateRunResponse(run=convert.run(record))

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Context) -> run_pb2.GetRunResponse:
        check_run(request.run)
        return run_pb2.GetRunResponse(run=convert.run(await self._service.learner.get_run(request.run)))

    async def ListRuns(self, request: run_pb2.ListRunsRequest, context: Context) -> run_pb2.ListRunsResponse:
        return run_pb2.ListRunsResponse(runs=map(convert.run, await self._service.learner.list_runs()))

    async def PauseRun(self, request: run_pb2.PauseRunRequest, context: Context) -> run_pb2.PauseRunResponse:
        check_mutation(request.run, request.request_id)
        checks = Checks()
        if len(request.reason) > MAX_REASON:
            checks.add("reason", f"must have at most {MAX_REASON} characters, got {len(request.reason)}; shorten it")
        checks.done()
        record = await self._service.learner.pause_run(
            request.run, request.request_id, body_hash(request), request.reason
        )
        return run_pb2.PauseRunResponse(run=convert.run(record))

    async def ResumeRun(self, request: run_pb2.ResumeRunRequest, context: Context) -> run_pb2.ResumeRunResponse:
        check_mutation(request.run, request.request_id)
        record = await self._service.learner.resume_run(request.run, request.request_id, body_hash(request))
        return run_pb2.ResumeRunResponse(run=convert.run(record))

    async def WatchRun(
        self, request: run_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[run_pb2.WatchRunResponse]:
        check_run(request.run)
        checks = Checks()
        checks.number("after_step", request.after_step, "give the step of the last report that you have")
        checks.done()
        await self._service.learner.get_run(request.run)
        after = request.after_step if request.HasField("after_step") else None
        box = self._service.streams.outbox()
        box.pump(self._service.learner.watch_reports(request.run, after))
        async for record in box.drain():
            yield run_pb2.WatchRunResponse(report=convert.report(record))

    async def ListReplicas(
        self, request: run_pb2.ListReplicasRequest, context: Context
    ) -> run_pb2.ListReplicasResponse:
        return run_pb2.ListReplicasResponse(replicas=map(convert.replica, self._service.learner.replicas()))

    async def UpdateRun(self, request: run_pb2.UpdateRunRequest, context: Context) -> run_pb2.UpdateRunResponse:
        raise NotServedError("UpdateRun", "create a run with the new configuration")

    async def CheckpointRun(
        self, request: run_pb2.CheckpointRunRequest, context: Context
    ) -> run_pb2.CheckpointRunResponse:
        raise NotServedError("CheckpointRun", "every version is a checkpoint; DownloadAdapter copies one")

    async def DeleteRun(self, request: run_pb2.DeleteRunRequest, context: Context) -> run_pb2.DeleteRunResponse:
        check_mutation(request.run, request.request_id)
        # To its end even when the caller goes away: what is in memory of the run must go with it.
        await asyncio.shield(self._service.learner.delete_run(request.run, request.request_id, body_hash(request)))
        return run_pb2.DeleteRunResponse()
