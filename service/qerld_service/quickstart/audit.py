"""Checks of a finished run through its API: every trained token's version is known, no held-out prompt was trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
from qerld.v1 import common_pb2, policy_pb2, policy_pb2_grpc, rollout_pb2, rollout_pb2_grpc

from qerld_service.quickstart.held_out import Question
from qerld_service.quickstart.session import QuickstartError

DEADLINE = 30.0
PAGE = 1000


@dataclass(frozen=True)
class Audit:
    """What was checked: trained rollouts, their tokens (each of a known version), versions that made them."""

    rollouts: int
    tokens: int
    versions_sampled: int


def audit(channel: grpc.Channel, run: str, questions: Sequence[Question]) -> Audit:
    """Check every trained rollout of the run; raises QuickstartError naming the first that does not hold."""
    noises = {version.policy.version: version.noise for version in list_versions(channel, run)}
    held_out = {question.prompt_ids for question in questions}
    rollouts = tokens = 0
    used: set[int] = set()
    for rollout in trained_rollouts(channel, run):
        if tuple(rollout.prompt.ids) in held_out:
            raise QuickstartError(f"rollout {rollout.rollout_id}: its prompt is held out and was trained on")
        check_spans(rollout, noises)
        rollouts += 1
        tokens += len(rollout.completion.ids)
        used |= {span.version for span in rollout.spans}
    return Audit(rollouts, tokens, len(used))


def check_spans(rollout: common_pb2.Rollout, noises: dict[int, common_pb2.Noise]) -> None:
    """The spans cover the completion without gaps, and each names a version of the run with that version's noise."""
    at = 0
    for span in rollout.spans:
        noise = noises.get(span.version)
        if span.begin != at or noise is None or not same_noise(span.noise, noise):
            raise QuickstartError(f"rollout {rollout.rollout_id}: span {span} does not fit the run's versions")
        at = span.end
    if at != len(rollout.completion.ids) or at != len(rollout.logprobs):
        raise QuickstartError(
            f"rollout {rollout.rollout_id}: spans cover {at} tokens, of {len(rollout.completion.ids)} tokens and "
            f"{len(rollout.logprobs)} log-probabilities"
        )


def same_noise(first: common_pb2.Noise, second: common_pb2.Noise) -> bool:
    """Whether both are the same noise; without any, the seed says nothing."""
    return first == second or first.sigma == second.sigma == 0


def list_versions(channel: grpc.Channel, run: str) -> Iterator[policy_pb2.PolicyVersion]:
    """All versions of the run, newest first."""
    stub = policy_pb2_grpc.PolicyServiceStub(channel)
    token = ""
    while True:
        page = stub.ListVersions(
            policy_pb2.ListVersionsRequest(run=run, page_size=PAGE, page_token=token), timeout=DEADLINE
        )
        yield from page.versions
        token = page.next_page_token
        if not token:
            return


def trained_rollouts(channel: grpc.Channel, run: str) -> Iterator[common_pb2.Rollout]:
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    token = ""
    while True:
        request = rollout_pb2.ListGroupsRequest(
            run=run, state=rollout_pb2.GROUP_STATE_TRAINED, page_size=PAGE, page_token=token
        )
        page = stub.ListGroups(request, timeout=DEADLINE)
        for group in page.groups:
            for rollout_id in group.rollout_ids:
                answer = stub.GetRollout(rollout_pb2.GetRolloutRequest(rollout_id=rollout_id), timeout=DEADLINE)
                # A failed rollout takes no part in training.
                if answer.rollout.state == common_pb2.ROLLOUT_STATE_FINISHED:
                    yield answer.rollout
        token = page.next_page_token
        if not token:
            return
