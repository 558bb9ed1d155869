"""The batch of a step: its rollouts, flattened, with their rewards as steps; and the parts of it that updates take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import advantages, objectives
from .advantages import Rewards, Scored
from .messages import AlgorithmConfig, Group, NoiseSpec, Rollout
from .packing import TokenSequence
from .shaping import scored, with_kl


class BatchError(ValueError):
    """The groups of a step cannot be trained on; names the rollout and the field."""


@dataclass(frozen=True)
class Batch:
    """The R rollouts of a step, group after group.

    `behaviour`: the behaviour's log-probabilities of each rollout's policy tokens. `scored`: their rewards.
    `groups`: the rollouts of each group. `filtered`: rollouts that are left out of the loss. `noises`: the noise that
    each policy token was sampled under.
    """

    rollouts: list[Rollout]
    sequences: list[TokenSequence]
    behaviour: list[list[float]]
    scored: list[Scored]
    groups: list[range]
    filtered: frozenset[int]
    noises: list[list[NoiseSpec | None]]

    @property
    def mixed_groups(self) -> int:
        """Groups whose rewards differ."""
        return sum(_is_mixed([self.rollouts[index] for index in group]) for group in self.groups)


@dataclass(frozen=True)
class Update:
    """What one optimiser update is made of: rollouts by index in the batch, and the weight fp32 [R] of their tokens."""

    members: list[int]
    weights: Tensor


def make_batch(groups: list[Group], config: AlgorithmConfig, vocab_size: int) -> Batch:
    """Return the flattened batch.

    Raises `BatchError` for an empty batch, unequal lengths, ids outside the vocabulary or non-finite numbers,
    `AdvantageError` for rewards that are not finite and `ObjectiveError` for the algorithm's own limits.
    """
    objectives.check(config)
    if not groups:
        raise BatchError("groups must hold at least one group, got 0; wait for a full batch")
    batch = Batch([], [], [], [], [], _overlong(groups) if config.overlong == "filter" else frozenset(), [])
    for group in groups:
        start = len(batch.rollouts)
        for rollout in group.rollouts:
            _check_rollout(group, rollout, vocab_size)
            sequence = TokenSequence(group.prompt_ids, rollout.completion_ids, rollout.trainable)
            batch.rollouts.append(rollout)
            batch.sequences.append(sequence)
            batch.behaviour.append([rollout.logprobs[position] for position in sequence.scored])
            batch.scored.append(scored(rollout, sequence.scored, config))
            batch.noises.append([_noise_at(rollout, position) for position in sequence.scored])
        batch.groups.append(range(start, len(batch.rollouts)))
    return batch


def _noise_at(rollout: Rollout, position: int) -> NoiseSpec | None:
    noise = next((noise for end, noise in rollout.noises or [] if position < end), None)
    return noise if noise is not None and noise.sigma else None


def _overlong(groups: list[Group]) -> frozenset[int]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return frozenset(index for index, rollout in enumerate(rollouts) if rollout.truncated)


def _is_mixed(rollouts: list[Rollout]) -> bool:
    said = [tuple(value for _, value in rollout.steps or [(0, rollout.reward)]) for rollout in rollouts]
    return len(said) > 1 and len({value for values in said for value in values}) > 1


def advantages_of(batch: Batch, config: AlgorithmConfig, penalties: Sequence[Rewards] | None) -> list[Tensor]:
    """Return the advantages fp32 of each rollout's policy tokens; `penalties`: of a KL in the reward, by token."""
    found = batch.scored
    if penalties is not None:
        found = [with_kl(one, kl, config.advantage) for one, kl in zip(found, penalties, strict=True)]
    groups = [[found[index] for index in group] for group in batch.groups]
    return [torch.from_numpy(one).float() for one in advantages.token_advantages(config.advantage, groups)]


def kl_penalties(config: AlgorithmConfig, old: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Rewards]:
    """Return what a KL in the reward costs each policy token of each rollout: coefficient × KL(π_old ‖ base)."""
    estimate = objectives.KLS[config.kl_estimator]
    return [
        config.kl_coef * estimate(policy, base).double().cpu().numpy()
        for policy, base in zip(old, reference, strict=True)
    ]


def plan_updates(batch: Batch, config: AlgorithmConfig) -> list[Update]:
    """Return the updates of a step: each epoch shuffles the groups (torch's global generator) and splits them anew."""
    updates = []
    for _ in range(config.epochs):
        order = torch.randperm(len(batch.groups)).tolist() if config.mini_batches > 1 else range(len(batch.groups))
        for part in np.array_split(np.asarray(order), min(config.mini_batches, len(batch.groups))):
            members = [index for group in sorted(part) for index in batch.groups[group]]
            updates.append(Update(members, _weights(batch, config, members)))
    return updates


def _weights(batch: Batch, config: AlgorithmConfig, members: list[int]) -> Tensor:
    lengths = [0 if index in batch.filtered else len(batch.behaviour[index]) for index in members]
    weights = torch.zeros(len(batch.rollouts), dtype=torch.float64)
    aggregate = objectives.AGGREGATIONS[config.aggregation]
    weights[members] = aggregate(torch.tensor(lengths, dtype=torch.float64), config.loss_divisor)
    return weights.float()


def _check_rollout(group: Group, rollout: Rollout, vocab_size: int) -> None:
    where = f"group {group.group_id}, rollout {rollout.rollout_id}"
    if not group.prompt_ids or not rollout.completion_ids:
        raise BatchError(f"{where}: prompt_ids and completion_ids must not be empty; drop the rollout")
    if len(rollout.logprobs) != len(rollout.completion_ids):
        raise BatchError(
            f"{where}: logprobs must hold one number a completion token ({len(rollout.completion_ids)}), "
            f"got {len(rollout.logprobs)}"
        )
    if rollout.trainable is not None:
        _check_mask(where, rollout.trainable, len(rollout.completion_ids))
    if not all(math.isfinite(value) for value in rollout.logprobs):
        raise BatchError(f"{where}: logprobs must be finite; the sampler returned NaN or −∞, drop the rollout")
    low, high = min(*group.prompt_ids, *rollout.completion_ids), max(*group.prompt_ids, *rollout.completion_ids)
    if low < 0 or high >= vocab_size:
        raise BatchError(f"{where}: token ids must be in [0, {vocab_size}), got {low if low < 0 else high}")


def _check_mask(where: str, trainable: list[bool], length: int) -> None:
    if len(trainable) != length:
        raise BatchError(f"{where}: trainable must hold one entry a completion token ({length}), got {len(trainable)}")
    if not any(trainable):
        raise BatchError(f"{where}: trainable must mark at least one token, got 0; drop the rollout")
