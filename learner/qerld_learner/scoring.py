"""Log-probabilities of tokens that were sampled: the trainer's against a policy server's.

Only the policy's own tokens are compared; those of the environment are context.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from .batches import noise_spec, trainable_mask
from .records import NoiseRecord, RolloutRecord, RunRecord
from .run_options import trainer_config
from .shared import Shared
from .store import runs
from .trainer.client import TrainerFailure
from .trainer.messages import Score, Scores
from .trainer.messages import Sequence as TokenSequence

_log = logging.getLogger(__name__)


async def trainer_scores(
    shared: Shared,
    run: RunRecord,
    folder: Path,
    rollouts: Sequence[RolloutRecord],
    *,
    noise: NoiseRecord | None = None,
    temperature: float = 1.0,
) -> list[list[float]]:
    """Return the trainer's log-probability of each policy token of each rollout, under the version in `folder`."""
    if not rollouts:
        return []
    request = Score(
        run=run.name,
        config=trainer_config(run.config, shared.options),
        version_dir=str(folder),
        sequences=[TokenSequence(list(r.prompt_ids), list(r.completion_ids), trainable_mask(r)) for r in rollouts],
        temperature=temperature,
        noise=None if noise is None else noise_spec(noise),
    )
    reply = await shared.trainer.call(request, attempts=shared.options.trainer_attempts)
    assert isinstance(reply, Scores)
    return reply.logprobs


async def behaviour_gap(shared: Shared, run: RunRecord, rollouts: Sequence[RolloutRecord]) -> float | None:
    """Return the mean |difference| between trainer and sampler, in nats a token: same version, noise and temperature.

    The sampler's numbers are those that it recorded while sampling. Left out are rollouts of several versions, whose
    later tokens saw keys and values of the earlier ones, and those whose version's folder is gone. None: none is left.
    """
    by_policy = _by_policy(rollouts)
    made_by = {version for version, _noise in by_policy}
    versions = await shared.store.read(lambda connection: runs.find_versions(connection, run.name, made_by))
    ours: list[list[float]] = []
    theirs: list[list[float]] = []
    for (version, noise), members in by_policy.items():
        _record, kept = versions[version]
        if not kept:
            continue
        folder = shared.options.state_dir / kept
        try:
            ours += await trainer_scores(shared, run, folder, members, noise=noise, temperature=run.config.temperature)
        except TrainerFailure as error:  # a metric must not stop the run
            _log.warning("version %d of run %s cannot be compared with its sampler: %s", version, run.name, error)
            continue
        theirs += [policy_logprobs(member, member.logprobs) for member in members]
    return mean_gap(ours, theirs) if ours else None


def _by_policy(rollouts: Sequence[RolloutRecord]) -> dict[tuple[int, NoiseRecord], list[RolloutRecord]]:
    found: dict[tuple[int, NoiseRecord], list[RolloutRecord]] = defaultdict(list)
    for rollout in rollouts:
        policies = {(span.version, span.noise) for span in rollout.spans if not span.environment}
        if len(policies) == 1:
            found[policies.pop()].append(rollout)
    return found


def policy_logprobs(rollout: RolloutRecord, logprobs: Sequence[float]) -> list[float]:
    """Return the entries at the policy's tokens; none when there is not one entry a completion token."""
    if len(logprobs) != len(rollout.completion_ids):
        return []
    return list(compress(logprobs, rollout.trainable))


def mean_gap(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the mean |difference| over all tokens, in nats; infinite when shapes differ or one is not finite."""
    if [len(one) for one in ours] != [len(one) for one in theirs]:
        return math.inf
    gaps = [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    gap = sum(gaps) / len(gaps) if gaps else 0.0
    return gap if math.isfinite(gap) else math.inf
