"""RolloutService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from qerld.v1 import rollout_pb2, rollout_pb2_grpc

from qerld_learner.api import convert, requests
from qerld_learner.api.checks import Checks
from qerld_learner.api.service import Context, Service, check_mutation, check_run
from qerld_learner.errors import InvalidRequestError, Violation
from qerld_learner.records import GroupState, TokenDelta


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Samples, imports and lists groups."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Sample(
        self, request: rollout_pb2.SampleRequest, context: Context
    ) -> AsyncIterator[rollout_pb2.SampleResponse]:
        check_mutation(request.run, request.request_id)
        checks = Checks()
        limits = await self._service.limits(request.run)
        spec = await self._service.tokenise(requests.prompt_spec, checks, request, limits)
        checks.done()
        digest = await self._service.body_hash(request)
        events = self._service.learner.sample(request.run, request.request_id, digest, spec)
        async for event in events:
            if request.stream_deltas or not isinstance(event, TokenDelta):
                yield convert.sample_event(event)

    async def SubmitPrompts(
        self, request: rollout_pb2.SubmitPromptsRequest, context: Context
    ) -> rollout_pb2.SubmitPromptsResponse:
        check_mutation(request.run, request.request_id)
        checks = Checks()
        if not 1 <= len(request.prompts) <= requests.MAX_PROMPTS:
            limit = f"must have 1 to {requests.MAX_PROMPTS} entries, got {len(request.prompts)}"
            checks.add("prompts", f"{limit}; split the request")
            checks.done()
        limits = await self._service.limits(request.run)
        specs = [
            await self._service.tokenise(requests.prompt_spec, checks, item, limits, f"prompts[{i}].")
            for i, item in enumerate(request.prompts)
        ]
        rollouts = sum(spec.group_size for spec in specs)
        if rollouts > requests.MAX_ROLLOUTS:
            limit = f"must make at most {requests.MAX_ROLLOUTS} rollouts together, got {rollouts}"
            checks.add("prompts", f"{limit}; split the request")
        checks.done()
        digest = await self._service.body_hash(request)
        group_ids = await self._service.learner.submit_prompts(request.run, request.request_id, digest, specs)
        return rollout_pb2.SubmitPromptsResponse(group_ids=group_ids)

    async def ImportTrajectories(
        self, request_iterator: AsyncIterator[rollout_pb2.ImportTrajectoriesRequest], context: Context
    ) -> rollout_pb2.ImportTrajectoriesResponse:
        """Each message is its own mutation: groups before a wrong one stay, and sending all again is safe."""
        response = rollout_pb2.ImportTrajectoriesResponse()
        position = 0
        async for request in request_iterator:
            try:
                # To its end even when the caller goes away: a stored group belongs in the buffer.
                response.groups.append(await asyncio.shield(self._import(request)))
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    [Violation(f"message[{position}].{v.field}", v.description) for v in error.violations]
                ) from error
            position += 1
        return response

    async def _import(self, request: rollout_pb2.ImportTrajectoriesRequest) -> rollout_pb2.ImportedGroup:
        check_mutation(request.run, request.request_id)
        checks = Checks()
        limits = await self._service.limits(request.run)
        spec, trajectories = await self._service.tokenise(requests.imported_group, checks, request, limits)
        checks.done()
        digest = await self._service.body_hash(request)
        group = await self._service.learner.import_group(request.run, request.request_id, digest, spec, trajectories)
        return rollout_pb2.ImportedGroup(group_id=group.group_id, rollout_ids=group.rollout_ids)

    async def GetRollout(
        self, request: rollout_pb2.GetRolloutRequest, context: Context
    ) -> rollout_pb2.GetRolloutResponse:
        checks = Checks()
        checks.required("rollout_id", request.rollout_id, "name the rollout")
        checks.done()
        record = await self._service.learner.get_rollout(request.rollout_id)
        return rollout_pb2.GetRolloutResponse(rollout=convert.rollout(record))

    async def ListGroups(
        self, request: rollout_pb2.ListGroupsRequest, context: Context
    ) -> rollout_pb2.ListGroupsResponse:
        check_run(request.run)
        checks = Checks()
        page_size = checks.page_size(request.page_size)
        state = _group_state(checks, request.state)
        checks.done()
        groups, token = await self._service.learner.list_groups(request.run, state, page_size, request.page_token)
        return rollout_pb2.ListGroupsResponse(groups=map(convert.group, groups), next_page_token=token)


def _group_state(checks: Checks, number: int) -> GroupState | None:
    if number == rollout_pb2.GROUP_STATE_UNSPECIFIED:
        return None
    if number not in rollout_pb2.GroupState.values():
        checks.add("state", f"number {number} is not a GroupState; leave it unset to list all")
        return None
    name = rollout_pb2.GroupState.Name(rollout_pb2.GroupState.ValueType(number))
    return GroupState(name.removeprefix("GROUP_STATE_").lower())
