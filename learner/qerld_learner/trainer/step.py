"""One training step: groups → packed micro-batches → gradient → AdamW → new state and what happened to each rollout."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from . import advantages, objectives
from .checkpoint import AdapterState
from .lora import bypassed
from .messages import AlgorithmConfig, Group, OptimizerConfig, Rollout, RolloutResult, TrainerConfig
from .model import BaseModel
from .objectives import TokenBatch
from .packing import PrefixTree, TokenSequence, pack

Report = Callable[[str, int, int], None]


class BatchError(ValueError):
    """The groups of a step cannot be trained on; names the rollout and the field."""


@dataclass(frozen=True)
class Batch:
    """The rollouts of a step, flattened: R rollouts, `rollout_advantages` and `weights` fp32 [R].

    `behaviour`: the behaviour's log-probabilities of each rollout's trainable tokens.
    """

    rollouts: list[Rollout]
    sequences: list[TokenSequence]
    behaviour: list[list[float]]
    rollout_advantages: Tensor
    weights: Tensor
    mixed_groups: int
    groups: int


@dataclass
class Tally:
    """Results at the trainable tokens of the whole step, one tensor a rollout, without gradient."""

    loss: float = 0.0
    logprobs: dict[int, Tensor] = field(default_factory=dict)
    entropy: dict[int, Tensor] = field(default_factory=dict)
    ratio: dict[int, Tensor] = field(default_factory=dict)
    clipped: dict[int, Tensor] = field(default_factory=dict)
    base_kl: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepOutcome:
    """The new state, metrics by name, one result a rollout, seconds by phase, and whether the optimiser was skipped."""

    state: AdapterState
    metrics: dict[str, float]
    rollouts: list[RolloutResult]
    phase_seconds: dict[str, float]
    skipped_optimizer: bool


def make_batch(groups: list[Group], config: AlgorithmConfig, vocab_size: int) -> Batch:
    """Return the flattened batch with advantages and aggregation weights.

    Raises `BatchError` for an empty batch, unequal lengths, ids outside the vocabulary or non-finite numbers, and
    `AdvantageError` or `ObjectiveError` for the algorithm's own limits.
    """
    objectives.check(config)
    if not groups:
        raise BatchError("groups must hold at least one group, got 0; wait for a full batch")
    rollouts, sequences, values, mixed = [], [], [], 0
    for group in groups:
        rewards = [rollout.reward for rollout in group.rollouts]
        values.append(advantages.advantages_of(config.advantage, rewards))
        mixed += not advantages.is_zero_variance(np.asarray(rewards))
        for rollout in group.rollouts:
            _check_rollout(group, rollout, vocab_size)
            rollouts.append(rollout)
            sequences.append(TokenSequence(group.prompt_ids, rollout.completion_ids, rollout.trainable))
    behaviour = [
        [rollout.logprobs[position] for position in sequence.scored]
        for rollout, sequence in zip(rollouts, sequences, strict=True)
    ]
    lengths = torch.tensor([len(values) for values in behaviour], dtype=torch.float64)
    weights = objectives.AGGREGATIONS[config.aggregation](lengths)
    flat = torch.from_numpy(np.concatenate(values))
    return Batch(rollouts, sequences, behaviour, flat.float(), weights.float(), mixed, len(groups))


def train_step(
    model: BaseModel,
    masters: dict[str, torch.nn.Parameter],
    state: AdapterState,
    config: TrainerConfig,
    groups: list[Group],
    step: int,
    report: Report,
) -> StepOutcome:
    """Run one step from `state`. The masters are scratch space: their values before the call do not matter.

    Without a group of mixed rewards, and without a KL term, the loss has no gradient: only metrics are computed, the
    optimiser is skipped and the weights stay the parent's. So too when the gradient is not finite (`nonfinite_grad`).
    """
    clock = Clock()
    with clock("pack"):
        batch = make_batch(groups, config.algorithm, model.vocab_size)
        trees = [tree.to(model.device) for tree in pack(batch.sequences, config.token_budget)]
        load_weights(masters, state.weights)
    learn = bool(batch.mixed_groups or config.algorithm.kl_coef)
    tally = Tally()
    for done, tree in enumerate(trees):
        report("train", done, len(trees))
        with torch.set_grad_enabled(learn):
            micro_batch(model, config, batch, tree, tally, clock, learn)
    report("train", len(trees), len(trees))
    with clock("optimizer"):
        unscale(masters, loss_scale(model.dtype, batch))
        grad_norm = _clip(masters, config.optimizer.max_grad_norm) if learn else 0.0
        skipped = not learn or not math.isfinite(grad_norm)
        state = replace(state, step=step) if skipped else _update(masters, state, config.optimizer, step)
        _drop_gradients(masters)
    metrics = _metrics(config, batch, tally, trees)
    metrics |= {"grad_norm": grad_norm if math.isfinite(grad_norm) else 0.0, "lr": config.optimizer.lr}
    metrics |= {"nonfinite_grad": float(not math.isfinite(grad_norm))}
    return StepOutcome(state, metrics, _results(batch, tally), dict(clock.seconds), skipped)


def load_weights(masters: dict[str, torch.nn.Parameter], weights: dict[str, Tensor]) -> None:
    """Copy weights into the masters."""
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(weights[name])


def token_logprobs(
    model: BaseModel, sequences: list[TokenSequence], token_budget: int, temperature: float, report: Report
) -> list[list[float]]:
    """Return the log-probability of each trainable token of each sequence under the loaded weights."""
    scores: list[list[float]] = [[] for _ in sequences]
    trees = pack(sequences, token_budget)
    with torch.no_grad():
        for done, tree in enumerate(trees):
            report("score", done, len(trees))
            pairs = model.pair_logprobs(tree.to(model.device), temperature)[0].tolist()
            for member, span in zip(tree.members, tree.spans, strict=True):
                scores[member] = [pairs[pair] for pair in span]
    return scores


def micro_batch(
    model: BaseModel,
    config: TrainerConfig,
    batch: Batch,
    tree: PrefixTree,
    tally: Tally,
    clock: Clock,
    learn: bool,
) -> None:
    """Add one micro-batch's results to `tally` and (when `learn`) its share of the step's gradient to the masters.

    The gradient there is `loss_scale` times as large.
    """
    reference = None
    if config.algorithm.kl_coef:
        with clock("reference"), torch.no_grad(), bypassed(model.causal):
            reference = model.pair_logprobs(tree, config.temperature)[0]
    with clock("forward"):
        pair_logprobs, row_entropy = model.pair_logprobs(tree, config.temperature)
        pairs = torch.tensor([pair for span in tree.spans for pair in span], device=model.device)
        tokens = _token_batch(batch, tree, pair_logprobs[pairs], None if reference is None else reference[pairs])
        loss, terms = objectives.policy_loss(config.algorithm, tokens)
    if learn:
        with clock("backward"):
            (loss * loss_scale(model.dtype, batch)).backward()  # type: ignore[no-untyped-call]
    tally.loss += float(loss.detach())
    lengths = [len(span) for span in tree.spans]
    columns = {
        "logprobs": tokens.logprobs.detach(),
        "entropy": row_entropy[tree.pair_row[pairs]],
        "ratio": terms.ratio,
        "clipped": terms.clipped.float(),
    }
    if tokens.reference is not None:
        columns["base_kl"] = objectives.kl_k3(tokens.logprobs.detach(), tokens.reference)
    for name, column in columns.items():
        getattr(tally, name).update(zip(tree.members, torch.split(column.cpu(), lengths), strict=True))


def _token_batch(batch: Batch, tree: PrefixTree, logprobs: Tensor, reference: Tensor | None) -> TokenBatch:
    device = logprobs.device
    lengths = torch.tensor([len(span) for span in tree.spans])
    behaviour = [value for member in tree.members for value in batch.behaviour[member]]
    return TokenBatch(
        logprobs=logprobs,
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantages=batch.rollout_advantages[tree.members].repeat_interleave(lengths).to(device),
        weights=batch.weights[tree.members].repeat_interleave(lengths).to(device),
        reference=reference,
    )


def loss_scale(dtype: torch.dtype, batch: Batch) -> float:
    """Return the power of two that brings a log-probability's gradient to about its advantage; 1 unless in fp16.

    Unscaled it is advantage / tokens, and further back it would fall below 6e-8, fp16's least number. The masters'
    gradients are fp32 and lose nothing. One that overflows all the same skips the step, as any that is not finite.
    """
    if dtype != torch.float16:
        return 1.0
    return float(2.0 ** round(-math.log2(float(batch.weights.max()))))


def unscale(masters: dict[str, torch.nn.Parameter], scale: float) -> None:
    """Divide the masters' gradients by `scale`."""
    for master in masters.values():
        if master.grad is not None and scale != 1.0:
            master.grad.mul_(1.0 / scale)


def _clip(masters: dict[str, torch.nn.Parameter], limit: float) -> float:
    """Clip the gradient to norm `limit` (0: leave it) and return its norm before."""
    norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), limit or math.inf)
    return float(norm)


def _update(
    masters: dict[str, torch.nn.Parameter], state: AdapterState, config: OptimizerConfig, step: int
) -> AdapterState:
    """Take one AdamW step from the state's moments and return the new state."""
    optimizer = torch.optim.AdamW(
        list(masters.values()),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    for name, master in masters.items():
        optimizer.state[master] = {
            "step": torch.tensor(float(state.updates)),
            "exp_avg": state.first_moments[name].clone(),
            "exp_avg_sq": state.second_moments[name].clone(),
        }
    optimizer.step()
    return AdapterState(
        weights={name: master.detach().clone() for name, master in masters.items()},
        first_moments={name: optimizer.state[master]["exp_avg"] for name, master in masters.items()},
        second_moments={name: optimizer.state[master]["exp_avg_sq"] for name, master in masters.items()},
        updates=state.updates + 1,
        step=step,
    )


def _drop_gradients(masters: dict[str, torch.nn.Parameter]) -> None:
    for master in masters.values():
        master.grad = None


def _metrics(config: TrainerConfig, batch: Batch, tally: Tally, trees: list[PrefixTree]) -> dict[str, float]:
    order = range(len(batch.rollouts))
    flat = {
        name: torch.cat([getattr(tally, name)[i] for i in order])
        for name in ("logprobs", "entropy", "ratio", "clipped")
    }
    behaviour = torch.tensor([value for values in batch.behaviour for value in values])
    rewards = np.asarray([rollout.reward for rollout in batch.rollouts])
    metrics = objectives.mismatch_metrics(flat["logprobs"], behaviour)
    metrics |= {
        "loss": tally.loss,
        "entropy": float(flat["entropy"].mean()),
        "clipped_share": float(flat["clipped"].mean()),
        "tis_truncated_share": objectives.tis_truncated_share(config.algorithm, flat["ratio"]),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "mixed_groups": float(batch.mixed_groups),
        "zero_variance_share": 1 - batch.mixed_groups / batch.groups,
        "completion_tokens": float(len(behaviour)),
        "tokens_computed": float(sum(tree.tokens for tree in trees)),
        "tokens_plain": float(sum(tree.plain_tokens for tree in trees)),
        "micro_batches": float(len(trees)),
    }
    if tally.base_kl:
        metrics["base_kl"] = float(torch.cat(list(tally.base_kl.values())).mean())
    return metrics


def _results(batch: Batch, tally: Tally) -> list[RolloutResult]:
    return [
        RolloutResult(
            rollout_id=rollout.rollout_id,
            advantage=float(batch.rollout_advantages[index]),
            mean_ratio=float(tally.ratio[index].mean()),
            clipped_share=float(tally.clipped[index].mean()),
        )
        for index, rollout in enumerate(batch.rollouts)
    ]


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


class Clock:
    """Adds up wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
