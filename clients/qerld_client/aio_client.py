"""The asyncio client: one method an RPC; see `sync_client` for the sync one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from qerld.v1 import (
    common_pb2,
    policy_pb2,
    policy_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

from qerld_client import requests
from qerld_client.adapters import FILES, PartialFile
from qerld_client.aio_calls import call, stream
from qerld_client.aio_loop import train
from qerld_client.aio_worker import AsyncRewardFunction, AsyncWorker
from qerld_client.channel import CREATE_SECONDS, OPTIONS, SAMPLE_SECONDS, STREAM_SECONDS, UNARY_SECONDS
from qerld_client.errors import AlreadyExistsError, OutcomesRejectedError
from qerld_client.requests import PromptLike, Rewards, SampledGroup, Task
from qerld_client.resume import (
    EvaluateResume,
    PolicyResume,
    ReceiptsResume,
    ReportsResume,
    SampleResume,
)
from qerld_client.retry import RetryPolicy
from qerld_client.worker import WorkerState

Response = TypeVar("Response")


class AsyncClient:
    """Client of a learner, for one event loop. Calls raise `QerldError`.

    UNAVAILABLE and RESOURCE_EXHAUSTED are retried until the deadline.

    Args:
        target: host:port of the learner.
        credentials: Channel credentials for TLS; None speaks plain text.
        timeout: Deadline of unary calls in seconds, retries included.
        retry: When to call again.
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        timeout: float = UNARY_SECONDS,
        retry: RetryPolicy | None = None,
    ) -> None:
        self._channel = (
            grpc.aio.insecure_channel(target, OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, OPTIONS)
        )
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._rollouts = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._rewards = reward_pb2_grpc.RewardServiceStub(self._channel)
        self._policies = policy_pb2_grpc.PolicyServiceStub(self._channel)
        self._runs = run_pb2_grpc.RunServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; open calls end as cancelled."""
        await self._channel.close()

    async def _call(
        self, method: Callable[..., Awaitable[Response]], request: Any, timeout: float | None = None
    ) -> Response:
        async def attempt(seconds: float) -> Response:
            return await method(request, timeout=seconds)

        return await call(attempt, self._retry, self._timeout if timeout is None else timeout)

    def _stream(
        self, method: Callable[..., Any], resume: Any, timeout: float | None, connection: float = STREAM_SECONDS
    ) -> AsyncIterator[Any]:
        return stream(method, resume, self._retry, timeout, connection)

    # Runs

    async def create_run(
        self,
        run: str,
        config: run_pb2.RunConfig | None = None,
        *,
        initial_adapter: bytes = b"",
        exist_ok: bool = False,
    ) -> run_pb2.Run:
        """Create a run; its version 0 is live at once. With `exist_ok` a run of that name is returned as it is."""
        request = run_pb2.CreateRunRequest(
            run=run, request_id=requests.new_request_id(), config=config, initial_adapter=initial_adapter
        )
        try:
            return (await self._call(self._runs.CreateRun, request, max(CREATE_SECONDS, self._timeout))).run
        except AlreadyExistsError:
            if not exist_ok:
                raise
            return await self.get_run(run)

    async def get_run(self, run: str) -> run_pb2.Run:
        return (await self._call(self._runs.GetRun, run_pb2.GetRunRequest(run=run))).run

    async def list_runs(self) -> list[run_pb2.Run]:
        """Return all runs, oldest first."""
        return list((await self._call(self._runs.ListRuns, run_pb2.ListRunsRequest())).runs)

    async def update_run(self, run: str, etag: str, **changes: Any) -> run_pb2.Run:
        """Change live fields (`learning_rate`, `max_steps`, `groups_per_step`, `max_lag`) of the run seen as `etag`."""
        request = run_pb2.UpdateRunRequest(run=run, request_id=requests.new_request_id(), etag=etag, **changes)
        return (await self._call(self._runs.UpdateRun, request)).run

    async def pause_run(self, run: str, reason: str = "") -> run_pb2.Run:
        """Stop training and new sampling; outcomes are still taken."""
        request = run_pb2.PauseRunRequest(run=run, request_id=requests.new_request_id(), reason=reason)
        return (await self._call(self._runs.PauseRun, request)).run

    async def resume_run(self, run: str) -> run_pb2.Run:
        request = run_pb2.ResumeRunRequest(run=run, request_id=requests.new_request_id())
        return (await self._call(self._runs.ResumeRun, request)).run

    async def checkpoint_run(self, run: str) -> int:
        """Keep the newest version from garbage collection; returns it."""
        request = run_pb2.CheckpointRunRequest(run=run, request_id=requests.new_request_id())
        return (await self._call(self._runs.CheckpointRun, request)).version

    async def delete_run(self, run: str) -> None:
        """End a run and free what it holds."""
        await self._call(self._runs.DeleteRun, run_pb2.DeleteRunRequest(run=run, request_id=requests.new_request_id()))

    def watch_run(
        self, run: str, *, after_step: int | None = None, timeout: float | None = None
    ) -> AsyncIterator[run_pb2.RunReport]:
        """Iterate over one report a learner step: those stored after `after_step`, then new ones; none is missed."""
        return self._stream(self._runs.WatchRun, ReportsResume(run, after_step), timeout)

    async def list_replicas(self) -> list[run_pb2.Replica]:
        """Return the policy servers that are attached."""
        return list((await self._call(self._runs.ListReplicas, run_pb2.ListReplicasRequest())).replicas)

    # Rollouts

    async def sample(
        self,
        run: str,
        prompt: PromptLike,
        *,
        group_size: int | None = None,
        sampling: common_pb2.Sampling | None = None,
        labels: Mapping[str, str] | None = None,
        reward_deadline: float | None = None,
        timeout: float = SAMPLE_SECONDS,
    ) -> SampledGroup:
        """Sample one group from the live policy and return it when all its rollouts are finished."""
        request = requests.sample(
            run,
            prompt,
            group_size=group_size,
            sampling=sampling,
            labels=labels,
            reward_deadline=reward_deadline,
            stream_deltas=False,
        )
        opened = rollout_pb2.GroupOpened()
        rollouts: list[common_pb2.Rollout] = []
        async for event in self._stream(self._rollouts.Sample, SampleResume(request), timeout, timeout):
            if event.HasField("opened"):
                opened = event.opened
            else:
                rollouts.append(event.finished)
        rollouts.sort(key=lambda rollout: rollout.index)
        return SampledGroup(opened.group_id, opened.version, tuple(opened.prompt.ids), tuple(rollouts))

    def sample_stream(
        self,
        run: str,
        prompt: PromptLike,
        *,
        group_size: int | None = None,
        sampling: common_pb2.Sampling | None = None,
        labels: Mapping[str, str] | None = None,
        reward_deadline: float | None = None,
        timeout: float = SAMPLE_SECONDS,
    ) -> AsyncIterator[rollout_pb2.SampleResponse]:
        """Sample one group and iterate over its events: opened, token deltas, finished rollouts."""
        request = requests.sample(
            run,
            prompt,
            group_size=group_size,
            sampling=sampling,
            labels=labels,
            reward_deadline=reward_deadline,
            stream_deltas=True,
        )
        return self._stream(self._rollouts.Sample, SampleResume(request), timeout, timeout)

    async def submit_prompts(
        self,
        run: str,
        tasks: Iterable[Task | PromptLike],
        *,
        group_size: int | None = None,
        sampling: common_pb2.Sampling | None = None,
    ) -> list[str]:
        """Store prompts that the service samples at its own pace; returns their group ids."""
        request = requests.submit_prompts(run, tasks, group_size, sampling)
        return list((await self._call(self._rollouts.SubmitPrompts, request)).group_ids)

    async def import_trajectories(
        self, run: str, groups: Iterable[tuple[Task | PromptLike, Sequence[rollout_pb2.Trajectory]]]
    ) -> list[rollout_pb2.ImportedGroup]:
        """Store groups that were sampled elsewhere: (prompt, trajectories) pairs."""
        messages = requests.imported(run, groups)

        async def attempt(seconds: float) -> rollout_pb2.ImportTrajectoriesResponse:
            return await self._rollouts.ImportTrajectories(iter(messages), timeout=seconds)

        return list((await call(attempt, self._retry, self._timeout)).groups)

    async def get_rollout(self, rollout_id: str) -> common_pb2.Rollout:
        return (
            await self._call(self._rollouts.GetRollout, rollout_pb2.GetRolloutRequest(rollout_id=rollout_id))
        ).rollout

    async def list_groups(
        self, run: str, state: rollout_pb2.GroupState.ValueType = rollout_pb2.GROUP_STATE_UNSPECIFIED
    ) -> AsyncIterator[rollout_pb2.Group]:
        """Iterate over the groups of a run, newest first, page by page."""
        request = rollout_pb2.ListGroupsRequest(run=run, state=state)
        while True:
            page = await self._call(self._rollouts.ListGroups, request)
            for group in page.groups:
                yield group
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    # Rewards

    async def submit_rewards(
        self, run: str, rewards: Rewards, *, strict: bool = True
    ) -> list[reward_pb2.OutcomeAnswer]:
        """Store rewards by rollout id, or outcomes; durable when this returns.

        Raises:
            OutcomesRejectedError: Some were refused and `strict` is set; the others are stored.
        """
        answers = list((await self._call(self._rewards.SubmitRewards, requests.submit_rewards(run, rewards))).answers)
        if strict and any(answer.answer == common_pb2.ANSWER_REJECTED for answer in answers):
            raise OutcomesRejectedError(answers)
        return answers

    async def check_rewards(self, run: str, rewards: Rewards) -> list[reward_pb2.CheckedOutcome]:
        """Say what `submit_rewards` would answer, with would-be advantages; nothing is stored."""
        request = reward_pb2.CheckRewardsRequest(run=run, outcomes=requests.outcomes(rewards))
        return list((await self._call(self._rewards.CheckRewards, request)).outcomes)

    async def stream_rewards(
        self,
        run: str,
        reward: AsyncRewardFunction,
        *,
        worker: str = "worker",
        credits: int = 64,
        lease: float | None = None,
        limit: int | None = None,
        stop: asyncio.Event | None = None,
    ) -> WorkerState:
        """Score rollouts that the service pushes, until `stop` is set or `limit` outcomes are answered.

        `reward` may be a coroutine function; an exception of it becomes an error outcome, never a zero. Returns counts.
        """
        state = WorkerState(run, worker, credits, lease)
        await AsyncWorker(
            self._rewards.StreamRewards,
            state,
            reward,
            policy=self._retry,
            limit=limit,
            stop=stop or asyncio.Event(),
        ).run()
        return state

    async def get_receipt(self, rollout_id: str) -> reward_pb2.Receipt:
        """Say what became of a rollout."""
        return (await self._call(self._rewards.GetReceipt, reward_pb2.GetReceiptRequest(rollout_id=rollout_id))).receipt

    def watch_receipts(
        self, run: str, rollout_ids: Iterable[str] = (), *, timeout: float | None = None
    ) -> AsyncIterator[reward_pb2.Receipt]:
        """Iterate over receipts as they become final; with ids the stream ends when all of them are."""
        return self._stream(self._rewards.WatchReceipts, ReceiptsResume(run, list(rollout_ids)), timeout)

    # Versions

    async def get_policy(self, run: str, version: int | None = None) -> policy_pb2.PolicyVersion:
        """Return a version, or the live one."""
        return (
            await self._call(self._policies.GetPolicy, policy_pb2.GetPolicyRequest(run=run, version=version))
        ).version

    async def list_versions(self, run: str) -> AsyncIterator[policy_pb2.PolicyVersion]:
        """Iterate over the versions of a run, newest first, page by page."""
        request = policy_pb2.ListVersionsRequest(run=run)
        while True:
            page = await self._call(self._policies.ListVersions, request)
            for version in page.versions:
                yield version
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def watch_policy(self, run: str, *, timeout: float | None = None) -> AsyncIterator[policy_pb2.PolicyVersion]:
        """Iterate over the live version, now and at each change."""
        return self._stream(self._policies.WatchPolicy, PolicyResume(run), timeout)

    async def download_adapter(
        self, run: str, folder: Path | str, version: int | None = None, *, timeout: float = SAMPLE_SECONDS
    ) -> Path:
        """Download a version (the live one by default) as a PEFT folder; goes on where it broke, checks SHA-256."""
        if version is None:
            version = (await self.get_policy(run)).policy.version
        policy = common_pb2.Policy(run=run, version=version)
        for name in FILES:
            part = PartialFile(Path(folder), policy, name)
            async for chunk in self._stream(self._policies.DownloadAdapter, part.resume, timeout, timeout):
                await asyncio.to_thread(part.write, chunk)
            await asyncio.to_thread(part.finish)
        return Path(folder)

    async def rollback_policy(self, run: str, version: int, reason: str = "") -> policy_pb2.PolicyVersion:
        """Publish a new version with the weights of an older one."""
        request = policy_pb2.RollbackPolicyRequest(
            run=run, request_id=requests.new_request_id(), version=version, reason=reason
        )
        return (await self._call(self._policies.RollbackPolicy, request)).version

    async def pin_policy(self, run: str, version: int, *, pinned: bool = True) -> policy_pb2.PolicyVersion:
        """Keep a version from garbage collection, or let it go."""
        policy = common_pb2.Policy(run=run, version=version)
        request = policy_pb2.PinPolicyRequest(policy=policy, request_id=requests.new_request_id(), pinned=pinned)
        return (await self._call(self._policies.PinPolicy, request)).version

    def evaluate(
        self,
        run: str,
        version: int,
        prompts: Iterable[PromptLike],
        *,
        samples: int = 1,
        greedy: bool = False,
        sampling: common_pb2.Sampling | None = None,
        timeout: float = SAMPLE_SECONDS,
    ) -> AsyncIterator[policy_pb2.EvaluateResponse]:
        """Iterate over completions of prompts by a version without noise."""
        request = policy_pb2.EvaluateRequest(
            policy=common_pb2.Policy(run=run, version=version),
            prompts=map(requests.prompt, prompts),
            samples=samples,
            greedy=greedy,
            sampling=sampling,
        )
        return self._stream(self._policies.Evaluate, EvaluateResume(request), timeout, timeout)

    # The loop

    def train(
        self, run: str, tasks: Iterable[Task | PromptLike], reward: AsyncRewardFunction, *, concurrency: int = 8
    ) -> AsyncIterator[run_pb2.RunReport]:
        """Sample tasks, score their rollouts, submit the rewards; yields a report a learner step.

        Ends when the run has taken its `max_steps`, or when `tasks` is used up and every rollout is rewarded.
        `concurrency` groups are in flight. An exception of `reward` is submitted as an error, never as a zero.
        """
        return train(self, run, tasks, reward, concurrency)
