"""Every RPC of the public API, described once for both clients; `calls` says what a description is.

Their names, arguments and texts are those of the clients' methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qerld.v1 import common_pb2, policy_pb2, reward_pb2, rollout_pb2, run_pb2

from qerld_client import requests
from qerld_client.calls import Gathered, Paged, Streamed, Unary, streamed, unary
from qerld_client.channel import CREATE_SECONDS, SAMPLE_SECONDS, STREAM_SECONDS
from qerld_client.requests import PromptLike, Rewards, SampledGroup, Task
from qerld_client.resume import (
    DownloadResume,
    EvaluateResume,
    PolicyResume,
    ReceiptsResume,
    ReportsResume,
    SampleResume,
)

# Runs


def create_run(
    run: str,
    config: run_pb2.RunConfig | None = None,
    *,
    initial_adapter: bytes = b"",
    exist_ok: bool = False,
) -> Unary[run_pb2.Run]:
    """Create a run; its version 0 is live at once. With `exist_ok` a run of that name is returned as it is."""
    request = run_pb2.CreateRunRequest(
        run=run, request_id=requests.new_request_id(), config=config, initial_adapter=initial_adapter
    )
    return unary(
        lambda stubs: stubs.runs.CreateRun,
        request,
        lambda response: response.run,
        least_seconds=CREATE_SECONDS,
        if_exists=get_run(run) if exist_ok else None,
    )


def get_run(run: str) -> Unary[run_pb2.Run]:
    """Return a run."""
    return unary(lambda stubs: stubs.runs.GetRun, run_pb2.GetRunRequest(run=run), lambda response: response.run)


def list_runs() -> Unary[list[run_pb2.Run]]:
    """Return all runs, oldest first."""
    return unary(lambda stubs: stubs.runs.ListRuns, run_pb2.ListRunsRequest(), lambda response: list(response.runs))


def update_run(run: str, etag: str, **changes: Any) -> Unary[run_pb2.Run]:
    """Change live fields (`learning_rate`, `max_steps`, `groups_per_step`, `max_lag`) of the run seen as `etag`."""
    request = run_pb2.UpdateRunRequest(run=run, request_id=requests.new_request_id(), etag=etag, **changes)
    return unary(lambda stubs: stubs.runs.UpdateRun, request, lambda response: response.run)


def pause_run(run: str, reason: str = "") -> Unary[run_pb2.Run]:
    """Stop training and new sampling; outcomes are still taken."""
    request = run_pb2.PauseRunRequest(run=run, request_id=requests.new_request_id(), reason=reason)
    return unary(lambda stubs: stubs.runs.PauseRun, request, lambda response: response.run)


def resume_run(run: str) -> Unary[run_pb2.Run]:
    """Let a paused run go on."""
    request = run_pb2.ResumeRunRequest(run=run, request_id=requests.new_request_id())
    return unary(lambda stubs: stubs.runs.ResumeRun, request, lambda response: response.run)


def checkpoint_run(run: str) -> Unary[int]:
    """Keep the newest version from garbage collection; returns it."""
    request = run_pb2.CheckpointRunRequest(run=run, request_id=requests.new_request_id())
    return unary(lambda stubs: stubs.runs.CheckpointRun, request, lambda response: response.version)


def delete_run(run: str) -> Unary[None]:
    """End a run for good and free what it holds; its receipts, files and name stay."""
    request = run_pb2.DeleteRunRequest(run=run, request_id=requests.new_request_id())
    return unary(lambda stubs: stubs.runs.DeleteRun, request, lambda _: None)


def watch_run(run: str, *, after_step: int | None = None, timeout: float | None = None) -> Streamed[run_pb2.RunReport]:
    """Iterate over one report a learner step: those stored after `after_step` (0: all), then new ones; none is missed.

    None: only new ones. Those of a reconnection before the first are missed then.
    """
    return streamed(lambda stubs: stubs.runs.WatchRun, ReportsResume(run, after_step), timeout, STREAM_SECONDS)


def list_replicas() -> Unary[list[run_pb2.Replica]]:
    """Return the attached policy servers, and those that were refused lately: their `refused_reason` says why."""
    request = run_pb2.ListReplicasRequest()
    return unary(lambda stubs: stubs.runs.ListReplicas, request, lambda response: list(response.replicas))


# Rollouts


def sample(
    run: str,
    prompt: PromptLike,
    *,
    group_size: int | None = None,
    sampling: common_pb2.Sampling | None = None,
    labels: Mapping[str, str] | None = None,
    reward_deadline: float | None = None,
    timeout: float = SAMPLE_SECONDS,
) -> Gathered[SampledGroup]:
    """Sample one group from the live policy and return it when all its rollouts are finished."""
    request = requests.sample(run, prompt, group_size, sampling, labels, reward_deadline, stream_deltas=False)
    return Gathered(_sampling(request, timeout), requests.sampled_group)


def sample_stream(
    run: str,
    prompt: PromptLike,
    *,
    group_size: int | None = None,
    sampling: common_pb2.Sampling | None = None,
    labels: Mapping[str, str] | None = None,
    reward_deadline: float | None = None,
    timeout: float = SAMPLE_SECONDS,
) -> Streamed[rollout_pb2.SampleResponse]:
    """Sample one group and iterate over its events: opened, token deltas, finished rollouts."""
    request = requests.sample(run, prompt, group_size, sampling, labels, reward_deadline, stream_deltas=True)
    return _sampling(request, timeout)


def _sampling(request: rollout_pb2.SampleRequest, timeout: float) -> Streamed[rollout_pb2.SampleResponse]:
    return streamed(lambda stubs: stubs.rollouts.Sample, SampleResume(request), timeout, timeout)


def submit_prompts(
    run: str,
    tasks: Iterable[Task | PromptLike],
    *,
    group_size: int | None = None,
    sampling: common_pb2.Sampling | None = None,
) -> Unary[list[str]]:
    """Store prompts that the service samples at its own pace; returns their group ids."""
    request = requests.submit_prompts(run, tasks, group_size, sampling)
    return unary(lambda stubs: stubs.rollouts.SubmitPrompts, request, lambda response: list(response.group_ids))


def import_trajectories(
    run: str, groups: Iterable[tuple[Task | PromptLike, Sequence[rollout_pb2.Trajectory]]]
) -> Unary[list[rollout_pb2.ImportedGroup]]:
    """Store groups that were sampled elsewhere: (prompt, trajectories) pairs."""
    messages = requests.imported(run, groups)

    def result(response: rollout_pb2.ImportTrajectoriesResponse) -> list[rollout_pb2.ImportedGroup]:
        return list(response.groups)

    return Unary(lambda stubs: stubs.rollouts.ImportTrajectories, lambda: iter(messages), result)


def get_rollout(rollout_id: str) -> Unary[common_pb2.Rollout]:
    """Return a rollout."""
    request = rollout_pb2.GetRolloutRequest(rollout_id=rollout_id)
    return unary(lambda stubs: stubs.rollouts.GetRollout, request, lambda response: response.rollout)


def list_groups(
    run: str, state: rollout_pb2.GroupState.ValueType = rollout_pb2.GROUP_STATE_UNSPECIFIED
) -> Paged[rollout_pb2.Group]:
    """Iterate over the groups of a run, newest first, page by page."""
    request = rollout_pb2.ListGroupsRequest(run=run, state=state)
    page = unary(lambda stubs: stubs.rollouts.ListGroups, request, lambda response: response)
    return Paged(page, lambda response: response.groups)


# Rewards


def submit_rewards(run: str, rewards: Rewards, *, strict: bool = True) -> Unary[list[reward_pb2.OutcomeAnswer]]:
    """Store rewards by rollout id, or outcomes; durable when this returns.

    Raises:
        OutcomesRejectedError: Some were refused and `strict` is set; the others are stored.
    """
    request = requests.submit_rewards(run, rewards)
    return unary(
        lambda stubs: stubs.rewards.SubmitRewards,
        request,
        lambda response: requests.checked_answers(response.answers, strict=strict),
    )


def check_rewards(run: str, rewards: Rewards) -> Unary[list[reward_pb2.CheckedOutcome]]:
    """Say what `submit_rewards` would answer, with would-be advantages; nothing is stored."""
    request = reward_pb2.CheckRewardsRequest(run=run, outcomes=requests.outcomes(rewards))
    return unary(lambda stubs: stubs.rewards.CheckRewards, request, lambda response: list(response.outcomes))


def get_receipt(rollout_id: str) -> Unary[reward_pb2.Receipt]:
    """Say what became of a rollout."""
    request = reward_pb2.GetReceiptRequest(rollout_id=rollout_id)
    return unary(lambda stubs: stubs.rewards.GetReceipt, request, lambda response: response.receipt)


def watch_receipts(
    run: str, rollout_ids: Iterable[str] = (), *, timeout: float | None = None
) -> Streamed[reward_pb2.Receipt]:
    """Iterate over receipts as they become final; with ids, at most 4096, the stream ends when all of them are."""
    resume = ReceiptsResume(run, list(rollout_ids))
    return streamed(lambda stubs: stubs.rewards.WatchReceipts, resume, timeout, STREAM_SECONDS)


# Versions


def get_policy(run: str, version: int | None = None) -> Unary[policy_pb2.PolicyVersion]:
    """Return a version, or the live one."""
    request = policy_pb2.GetPolicyRequest(run=run, version=version)
    return unary(lambda stubs: stubs.policies.GetPolicy, request, lambda response: response.version)


def list_versions(run: str) -> Paged[policy_pb2.PolicyVersion]:
    """Iterate over the versions of a run, newest first, page by page."""
    request = policy_pb2.ListVersionsRequest(run=run)
    page = unary(lambda stubs: stubs.policies.ListVersions, request, lambda response: response)
    return Paged(page, lambda response: response.versions)


def watch_policy(run: str, *, timeout: float | None = None) -> Streamed[policy_pb2.PolicyVersion]:
    """Iterate over the live version, now and at each change."""
    return streamed(lambda stubs: stubs.policies.WatchPolicy, PolicyResume(run), timeout, STREAM_SECONDS)


def download(resume: DownloadResume, timeout: float) -> Streamed[bytes]:
    """Iterate over the rest of one file of an adapter."""
    return streamed(lambda stubs: stubs.policies.DownloadAdapter, resume, timeout, timeout)


def rollback_policy(run: str, version: int, reason: str = "") -> Unary[policy_pb2.PolicyVersion]:
    """Publish a new version with the weights of an older one."""
    request = policy_pb2.RollbackPolicyRequest(
        run=run, request_id=requests.new_request_id(), version=version, reason=reason
    )
    return unary(lambda stubs: stubs.policies.RollbackPolicy, request, lambda response: response.version)


def pin_policy(run: str, version: int, *, pinned: bool = True) -> Unary[policy_pb2.PolicyVersion]:
    """Keep a version from garbage collection, or let it go."""
    policy = common_pb2.Policy(run=run, version=version)
    request = policy_pb2.PinPolicyRequest(policy=policy, request_id=requests.new_request_id(), pinned=pinned)
    return unary(lambda stubs: stubs.policies.PinPolicy, request, lambda response: response.version)


def evaluate(
    run: str,
    version: int,
    prompts: Iterable[PromptLike],
    *,
    samples: int = 1,
    greedy: bool = False,
    sampling: common_pb2.Sampling | None = None,
    timeout: float = SAMPLE_SECONDS,
) -> Streamed[policy_pb2.EvaluateResponse]:
    """Iterate over completions of prompts by a version without noise."""
    request = policy_pb2.EvaluateRequest(
        policy=common_pb2.Policy(run=run, version=version),
        prompts=map(requests.prompt, prompts),
        samples=samples,
        greedy=greedy,
        sampling=sampling,
    )
    return streamed(lambda stubs: stubs.policies.Evaluate, EvaluateResume(request), timeout, timeout)
