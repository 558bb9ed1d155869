"""What a step has to tell: results token by token as its updates go, then metrics and one result a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .corrections import mismatch_metrics
from .messages import RolloutResult
from .objectives import TokenBatch, TokenTerms, kl_k3
from .packing import PrefixTree


@dataclass
class Tally:
    """Results at the policy tokens of the whole step by rollout, without gradient, on the CPU.

    `logprobs` and `entropy` are those before the first update (`entropy`: in the first epoch), the others of the last
    time that a rollout was computed; `loss` and `clipped` are means over `updates` and `epochs`.
    """

    loss: float = 0.0
    updates: int = 1
    epochs: int = 1
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    latest: dict[int, Tensor] = field(default_factory=dict)
    ratio: dict[int, Tensor] = field(default_factory=dict)
    clipped: dict[int, Tensor] = field(default_factory=dict)
    correction: dict[int, Tensor] = field(default_factory=dict)
    limited: dict[int, Tensor] = field(default_factory=dict)

    def add(self, tree: PrefixTree, loss: Tensor, tokens: TokenBatch, terms: TokenTerms) -> None:
        """Take in what one micro-batch gave, its tokens in the order of the tree's members."""
        self.loss += float(loss.detach()) / self.updates
        lengths = [len(span) for span in tree.spans]

        def by_rollout(column: Tensor) -> dict[int, Tensor]:
            return dict(zip(tree.members, torch.split(column.detach().float().cpu(), lengths), strict=True))

        self.latest |= by_rollout(tokens.logprobs)
        self.logprobs = by_rollout(tokens.logprobs) | self.logprobs
        self.entropy = by_rollout(tokens.entropy) | self.entropy
        self.ratio |= by_rollout(terms.ratio)
        self.correction |= by_rollout(terms.correction)
        self.limited |= by_rollout(terms.limited)
        for member, clipped in by_rollout(terms.clipped).items():
            self.clipped[member] = self.clipped.get(member, 0) + clipped / self.epochs


def metrics(batch: Batch, tally: Tally, reference: list[Tensor] | None) -> dict[str, float]:
    """Return the step's metrics; `reference`: the base's log-probabilities, where there is a KL term."""
    flat = {
        name: torch.cat([getattr(tally, name)[i] for i in range(len(batch.rollouts))])
        for name in ("logprobs", "entropy", "latest", "clipped", "correction", "limited")
    }
    behaviour = torch.tensor([value for values in batch.behaviour for value in values])
    rewards = np.asarray([rollout.reward for rollout in batch.rollouts])
    found = mismatch_metrics(flat["logprobs"], behaviour)
    found |= {
        "loss": tally.loss,
        "entropy": float(flat["entropy"].mean()),
        "clipped_share": float(flat["clipped"].mean()),
        "correction_mean": float(flat["correction"].mean()),
        "correction_limited_share": float(flat["limited"].mean()),
        "update_kl": float(kl_k3(flat["logprobs"], flat["latest"]).mean()),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "mixed_groups": float(batch.mixed_groups),
        "zero_variance_share": 1 - batch.mixed_groups / len(batch.groups),
        "filtered_share": len(batch.filtered) / len(batch.rollouts),
        "completion_tokens": float(len(behaviour)),
    }
    if reference is not None:
        found["base_kl"] = float(kl_k3(flat["logprobs"], torch.cat(reference)).mean())
    return found


def results(batch: Batch, tally: Tally, advantages: list[Tensor]) -> list[RolloutResult]:
    """Return what the step did with each rollout, in the batch's order."""
    return [
        RolloutResult(
            rollout_id=rollout.rollout_id,
            advantage=float(advantages[index].mean()),
            mean_ratio=float(tally.ratio[index].mean()),
            clipped_share=float(tally.clipped[index].mean()),
            filtered=index in batch.filtered,
        )
        for index, rollout in enumerate(batch.rollouts)
    ]
