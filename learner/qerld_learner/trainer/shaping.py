"""From what is said of a rollout to the rewards that advantages are made of: steps, overlong penalty, KL penalty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .advantages import OF_BATCHES, Indices, Rewards, Scored
from .messages import AlgorithmConfig, Rollout


def scored(rollout: Rollout, policy: Sequence[int], config: AlgorithmConfig) -> Scored:
    """Return the rewards of a rollout whose policy tokens are at the positions `policy` of the completion.

    What the environment's tokens are rewarded with counts for the policy's token before them; before the first one it
    is nobody's doing and left out.
    """
    tokens = len(policy)
    steps = rollout.steps or [(len(rollout.completion_ids), rollout.reward)]
    ends = np.searchsorted(np.asarray(policy), [end for end, _ in steps])
    values = np.asarray([value for _, value in steps], dtype=np.float64)
    kept = ends > 0
    found = Scored(*_joined(values[kept], ends[kept]), tokens)
    if config.overlong != "penalty":
        return found
    return at_the_end(found, config.overlong_penalty * soft_overlong(tokens, config.max_tokens, config.overlong_buffer))


def _joined(values: Rewards, ends: Indices) -> tuple[Rewards, Indices]:
    """Add up steps that end with the same policy token."""
    last, owner = np.unique(ends, return_inverse=True)
    return np.bincount(owner, values, minlength=len(last)).astype(np.float64), last.astype(np.int64)


def soft_overlong(length: int, longest: int, buffer: int) -> float:
    """Return DAPO's soft overlong punishment, 0 to −1, of a completion (arXiv 2503.14476, eq. 13)."""
    free = longest - buffer
    return -min(max(0.0, (length - free) / buffer), 1.0)


def at_the_end(scored: Scored, value: float) -> Scored:
    """Return the rewards with `value` added for the whole rollout."""
    if scored.ends[-1] == scored.tokens:
        return replace(scored, values=np.append(scored.values[:-1], scored.values[-1] + value))
    return replace(scored, values=np.append(scored.values, value), ends=np.append(scored.ends, scored.tokens))


def with_kl(scored: Scored, penalties: Rewards, advantage: str) -> Scored:
    """Return the rewards less the KL penalties [tokens].

    Token by token where returns are normalised over the batch (arXiv 2501.03262, eq. 8); else as part of the rollout's
    reward (RLOO, arXiv 2402.14740), so that they are no steps in the statistics of their group.
    """
    if advantage not in OF_BATCHES:
        return at_the_end(scored, -float(penalties.sum()))
    values = -penalties
    np.add.at(values, scored.ends - 1, scored.values)
    return Scored(values, np.arange(1, scored.tokens + 1), scored.tokens)
