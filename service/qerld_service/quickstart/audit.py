"""Checks of a finished run through its API: every trained token's version is known, no held-out prompt was trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qerld.v1 import common_pb2, rollout_pb2
from qerld_client import Client

from qerld_service.quickstart.held_out import Question
from qerld_service.quickstart.session import QuickstartError


@dataclass(frozen=True)
class Audit:
    """What was checked: trained rollouts, their tokens (each of a known version), versions that made them."""

    rollouts: int
    tokens: int
    versions_sampled: int


def audit(client: Client, run: str, questions: Sequence[Question]) -> Audit:
    """Check every trained rollout of the run; raises QuickstartError naming the first that does not hold."""
    noises = {version.policy.version: version.noise for version in client.list_versions(run)}
    held_out = {question.prompt_ids for question in questions}
    rollouts = tokens = 0
    used: set[int] = set()
    for rollout in trained_rollouts(client, run):
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


def trained_rollouts(client: Client, run: str) -> Iterator[common_pb2.Rollout]:
    for group in client.list_groups(run, rollout_pb2.GROUP_STATE_TRAINED):
        for rollout_id in group.rollout_ids:
            rollout = client.get_rollout(rollout_id)
            # A failed rollout takes no part in training.
            if rollout.state == common_pb2.ROLLOUT_STATE_FINISHED:
                yield rollout
