"""One training step: groups → packed micro-batches → gradients → optimiser → new state, and a result a rollout.

A step makes one update, or several (`epochs` × `mini_batches`). What all of them refer to is computed before the first:
the base's log-probabilities for a KL term, advantages, and π_old's log-probabilities where there are several updates,
a KL in the reward, or a π_old with noise.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from . import objectives, tally
from .batch import Batch, Update, advantages_of, kl_penalties, make_batch, plan_updates
from .checkpoint import AdapterState
from .learning_rate import lr_at
from .lora import bypassed
from .messages import AlgorithmConfig, Group, OptimizerConfig, RolloutResult, TrainerConfig
from .model import BaseModel
from .objectives import TokenBatch
from .optimizers import OPTIMIZERS, Masters
from .packing import PrefixTree, TokenSequence, pack
from .tally import Tally

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Known:
    """What is known before the first update, one tensor a rollout: advantages, and log-probabilities where needed."""

    advantages: list[Tensor]
    old: list[Tensor] | None = None
    reference: list[Tensor] | None = None


@dataclass(frozen=True)
class StepOutcome:
    """The new state, metrics by name, one result a rollout, seconds by phase, and whether the optimiser was skipped."""

    state: AdapterState
    metrics: dict[str, float]
    rollouts: list[RolloutResult]
    phase_seconds: dict[str, float]
    skipped_optimizer: bool


@dataclass(frozen=True)
class Work:
    """A step under way: what its updates read, and `told`, which they add to."""

    model: BaseModel
    config: TrainerConfig
    batch: Batch
    known: Known
    told: Tally
    clock: Clock


def train_step(
    model: BaseModel,
    masters: Masters,
    state: AdapterState,
    config: TrainerConfig,
    groups: list[Group],
    step: int,
    report: Report,
) -> StepOutcome:
    """Run one step from `state`. The masters are scratch space: their values before the call do not matter.

    Where nothing has a gradient (no advantage, no KL in the loss, no entropy bonus) only metrics are computed, the
    optimiser is skipped and the weights stay the parent's. So too when the gradient is not finite (`nonfinite_grad`).
    """
    optimizer = msgspec.structs.replace(config.optimizer, lr=lr_at(config.optimizer, step))
    config = msgspec.structs.replace(config, optimizer=optimizer)
    load_weights(masters, state.weights)
    work = begin(model, config, groups, report)
    with work.clock("pack"):
        updates = plan_updates(work.batch, work.config.algorithm)
        trees = [pack(work.batch.sequences, config.token_budget, members=update.members) for update in updates]
    new, norms = _run_updates(work, masters, state, list(zip(updates, trees, strict=True)), report)
    metrics = tally.metrics(work.batch, work.told, work.known.reference) | _gradient_metrics(norms, config.optimizer)
    metrics |= _token_metrics(trees) | {"updates": float(new.updates - state.updates)}
    results = tally.results(work.batch, work.told, work.known.advantages)
    skipped = new.updates == state.updates
    return StepOutcome(replace(new, step=step), metrics, results, dict(work.clock.seconds), skipped)


def begin(model: BaseModel, config: TrainerConfig, groups: list[Group], report: Report) -> Work:
    """Return a step from the loaded weights, as far as it is known before its first update.

    One that has no gradient is computed once, whatever the number of updates.
    """
    clock = Clock()
    with clock("pack"):
        batch = make_batch(groups, config.algorithm, model.vocab_size)
    known = look_ahead(model, config, batch, clock, report)
    if not has_gradient(config.algorithm, batch, known, range(len(batch.rollouts))):
        algorithm = msgspec.structs.replace(config.algorithm, epochs=1, mini_batches=1)
        config = msgspec.structs.replace(config, algorithm=algorithm)
    algorithm = config.algorithm
    parts = min(algorithm.mini_batches, len(batch.groups))
    told = Tally(updates=algorithm.epochs * parts, epochs=algorithm.epochs, logprobs=dict(enumerate(known.old or [])))
    return Work(model, config, batch, known, told, clock)


def _run_updates(
    work: Work, masters: Masters, state: AdapterState, plan: list[tuple[Update, list[PrefixTree]]], report: Report
) -> tuple[AdapterState, list[float]]:
    """Return the state after all updates and the norm of each gradient."""
    total, done, norms = sum(len(trees) for _, trees in plan), 0, []
    for update, trees in plan:
        learn = has_gradient(work.config.algorithm, work.batch, work.known, update.members)
        for tree in trees:
            report("train", done, total)
            with torch.set_grad_enabled(learn):
                micro_batch(work, update, tree.to(work.model.device), learn=learn)
            done += 1
        if learn:
            with work.clock("optimizer"):
                scale = loss_scale(work.model.dtype, update)
                norm, state = _take_update(masters, state, work.config.optimizer, scale)
            norms.append(norm)
    report("train", total, total)
    return state, norms


def look_ahead(model: BaseModel, config: TrainerConfig, batch: Batch, clock: Clock, report: Report) -> Known:
    """Compute what the updates refer to, under the loaded weights and, for a KL term, with the adapter off."""
    algorithm = config.algorithm
    in_reward = bool(algorithm.kl_coef) and algorithm.kl_in == "reward"
    several = algorithm.epochs * algorithm.mini_batches > 1
    reference = old = penalties = None
    if algorithm.kl_coef:
        with clock("reference"), bypassed(model.causal):
            reference = rollout_logprobs(model, batch.sequences, config, report)
    if algorithm.old_policy == "trainer_noisy":
        with clock("forward"):
            old = noisy_logprobs(model, batch, config, report)
    elif several or in_reward:
        with clock("forward"):
            old = rollout_logprobs(model, batch.sequences, config, report)
    if in_reward and old is not None and reference is not None:
        penalties = kl_penalties(algorithm, old, reference)
    return Known(advantages_of(batch, algorithm, penalties), old, reference)


def has_gradient(algorithm: AlgorithmConfig, batch: Batch, known: Known, members: Iterable[int]) -> bool:
    """Tell whether the loss of these rollouts depends on the policy at all."""
    kept = [member for member in members if member not in batch.filtered]
    in_loss = (algorithm.kl_in == "loss" and algorithm.kl_coef) or algorithm.entropy_coef
    return bool(kept) and (bool(in_loss) or any(bool(known.advantages[member].any()) for member in kept))


def load_weights(masters: Masters, weights: dict[str, Tensor]) -> None:
    """Copy weights into the masters."""
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(weights[name])


def rollout_logprobs(
    model: BaseModel, sequences: Sequence[TokenSequence], config: TrainerConfig, report: Report
) -> list[Tensor]:
    """Return the log-probabilities of each sequence's policy tokens under the loaded weights, on the CPU."""
    scores = token_logprobs(model, sequences, config.token_budget, config.temperature, report)
    return [torch.tensor(one, dtype=torch.float32) for one in scores]


def noisy_logprobs(model: BaseModel, batch: Batch, config: TrainerConfig, report: Report) -> list[Tensor]:
    """Return `rollout_logprobs` of a batch, each token's under the noise that it was sampled with."""
    found = [torch.zeros(len(noises)) for noises in batch.noises]
    for noise in dict.fromkeys(noise for noises in batch.noises for noise in noises):
        members = [member for member, noises in enumerate(batch.noises) if noise in noises]
        with model.noise(noise):
            scores = rollout_logprobs(model, [batch.sequences[member] for member in members], config, report)
        for member, score in zip(members, scores, strict=True):
            own = torch.tensor([one == noise for one in batch.noises[member]])
            found[member] = torch.where(own, score, found[member])
    return found


def token_logprobs(
    model: BaseModel, sequences: Sequence[TokenSequence], token_budget: int, temperature: float, report: Report
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


def micro_batch(work: Work, update: Update, tree: PrefixTree, *, learn: bool) -> None:
    """Add one micro-batch's results to the tally and (when `learn`) its share of the update's gradient to the masters.

    The gradient there is `loss_scale` times as large.
    """
    model, config = work.model, work.config
    with work.clock("forward"):
        bonus = bool(config.algorithm.entropy_coef)
        pair_logprobs, row_entropy = model.pair_logprobs(tree, config.temperature, entropy_gradient=bonus)
        pairs = torch.tensor([pair for span in tree.spans for pair in span], device=model.device)
        tokens = _token_batch(work, update, tree, pair_logprobs[pairs], row_entropy[tree.pair_row[pairs]])
        loss, terms = objectives.policy_loss(config.algorithm, tokens)
    if learn:
        with work.clock("backward"):
            (loss * loss_scale(model.dtype, update)).backward()  # type: ignore[no-untyped-call]
    work.told.add(tree, loss, tokens, terms)


def _token_batch(work: Work, update: Update, tree: PrefixTree, logprobs: Tensor, entropy: Tensor) -> TokenBatch:
    lengths = torch.tensor([len(span) for span in tree.spans])
    behaviour = [value for member in tree.members for value in work.batch.behaviour[member]]

    def flat(of_rollouts: list[Tensor]) -> Tensor:
        return torch.cat([of_rollouts[member] for member in tree.members]).to(logprobs.device)

    return TokenBatch(
        logprobs=logprobs,
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=logprobs.device),
        advantages=flat(work.known.advantages),
        weights=update.weights[tree.members].repeat_interleave(lengths).to(logprobs.device),
        owners=torch.arange(len(lengths)).repeat_interleave(lengths).to(logprobs.device),
        old=None if work.known.old is None else flat(work.known.old),
        reference=None if work.known.reference is None else flat(work.known.reference),
        entropy=entropy,
    )


def loss_scale(dtype: torch.dtype, update: Update) -> float:
    """Return the power of two that brings a log-probability's gradient to about its advantage; 1 unless in fp16.

    Unscaled it is advantage / tokens, and further back it would fall below 6e-8, fp16's least number. The masters'
    gradients are fp32 and lose nothing. One that overflows all the same skips the step, as any that is not finite.
    """
    largest = float(update.weights.max())
    if dtype != torch.float16 or not largest:
        return 1.0
    return float(2.0 ** round(-math.log2(largest)))


def unscale(masters: Masters, scale: float) -> None:
    """Divide the masters' gradients by `scale`."""
    for master in masters.values():
        if master.grad is not None and scale != 1.0:
            master.grad.mul_(1.0 / scale)


def _clip(masters: Masters, limit: float) -> float:
    """Clip the gradient to norm `limit` (0: leave it) and return its norm before."""
    norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), limit or math.inf)
    return float(norm)


def _take_update(
    masters: Masters, state: AdapterState, config: OptimizerConfig, scale: float
) -> tuple[float, AdapterState]:
    """Apply the masters' gradient, if it is finite, and drop it; return its norm and the state after it."""
    unscale(masters, scale)
    norm = _clip(masters, config.max_grad_norm)
    if math.isfinite(norm):
        state = OPTIMIZERS[config.kind](masters, state, config)
    for master in masters.values():
        master.grad = None
    return norm, state


def _gradient_metrics(norms: list[float], config: OptimizerConfig) -> dict[str, float]:
    """Mean norm of the finite gradients, and the share of the others."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {
        "grad_norm": sum(finite) / len(finite) if finite else 0.0,
        "nonfinite_grad": (len(norms) - len(finite)) / len(norms) if norms else 0.0,
        "lr": config.lr,
    }


def _token_metrics(trees: list[list[PrefixTree]]) -> dict[str, float]:
    flat = [tree for parts in trees for tree in parts]
    return {
        "tokens_computed": float(sum(tree.tokens for tree in flat)),
        "tokens_plain": float(sum(tree.plain_tokens for tree in flat)),
        "micro_batches": float(len(flat)),
    }


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
