"""Rollouts of several turns: environment tokens are context, and nothing else sees them.

The reference computes each rollout alone: a plain causal forward over the whole sequence, all logits, and the loss of
the policy's tokens one by one.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.advantages import advantages_of
from qerld_learner.trainer.batch import plan_updates
from qerld_learner.trainer.messages import (
    AlgorithmConfig,
    Event,
    Group,
    InitVersion,
    Rollout,
    Score,
    Scores,
    Sequence,
    StepResult,
    TrainerConfig,
    TrainStep,
)
from qerld_learner.trainer.model import BaseModel
from qerld_learner.trainer.packing import pack
from qerld_learner.trainer.worker import Worker
from torch import Tensor

from .conftest import VOCAB

TURNS = ([3, 4, 2], [2, 3], [1, 2, 2, 3], [4])  # lengths; the policy and the environment in turn
PROMPT = [5, 6, 7]
ALGORITHMS = {
    "grpo_kl": AlgorithmConfig(kl_coef=0.2, clip_low=0.2, clip_high=0.28),
    "dapo_tis": AlgorithmConfig(
        aggregation="token_mean", old_policy="trainer", correction="token_truncate", tis_cap=1.5
    ),
    "mean_only": AlgorithmConfig(advantage="mean_only", aggregation="token_mean", clip_low=0.1, clip_high=0.3),
}


def multi_turn_group(model: BaseModel | None = None, *, context_logprob: float = 0.0) -> Group:
    """Rollouts with turns of the environment within and at the end, and one without; behaviour near the model's."""
    generator = torch.Generator().manual_seed(3)
    shared_turn = torch.randint(0, VOCAB, (4,), generator=generator).tolist()
    rollouts = []
    for index, lengths in enumerate(TURNS):
        mask = [turn % 2 == 0 for turn, length in enumerate(lengths) for _ in range(length)]
        ids = torch.randint(0, VOCAB, (len(mask),), generator=generator).tolist()
        ids[: min(4, len(ids))] = shared_turn[: len(ids)]  # the tree shares more than the prompt
        own = [-4.5] * len(ids) if model is None else plain_logprobs(model, PROMPT, ids, 1.0).tolist()
        near = (torch.tensor(own) + 0.4 * torch.randn(len(ids), generator=generator)).clamp(max=0).tolist()
        logprobs = [value if policy else context_logprob for value, policy in zip(near, mask, strict=True)]
        trainable = None if all(mask) else mask
        rollouts.append(Rollout(f"r{index}", ids, logprobs, float(index % 3), 0, trainable))
    return Group("g", PROMPT, rollouts)


def plain_logprobs(model: BaseModel, prompt: list[int], completion: list[int], temperature: float) -> Tensor:
    """One sequence, the architecture's own causal attention and full logits."""
    logits = model.causal(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float() / temperature
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(completion)), torch.tensor(completion)]


def adapted(config: TrainerConfig) -> tuple[BaseModel, dict[str, torch.nn.Parameter]]:
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    torch.manual_seed(5)
    step.load_weights(masters, {name: torch.randn(master.shape) / 8 for name, master in masters.items()})
    return model, masters


def token_derivative(config: AlgorithmConfig, pi: float, mu: float, ref: float, a: float) -> tuple[float, float]:
    """Loss of one token and its derivative by π's log-probability, without the weight."""
    if config.correction == "none":
        ratio, correction = math.exp(pi - mu), 1.0
    else:
        ratio, correction = 1.0, min(math.exp(pi - mu), config.tis_cap)
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    clipped = bounded * a < ratio * a
    loss = -correction * (bounded if clipped else ratio) * a
    slope = 0.0 if clipped else -correction * ratio * a
    loss += config.kl_coef * (math.exp(ref - pi) - (ref - pi) - 1)
    return loss, slope + config.kl_coef * (1 - math.exp(ref - pi))


def reference_step(
    model: BaseModel, masters: dict[str, torch.nn.Parameter], config: TrainerConfig, group: Group
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the group, one rollout and one token at a time."""
    algorithm = config.algorithm
    masks = [np.array(r.trainable or [True] * len(r.completion_ids)) for r in group.rollouts]
    total, count, loss = sum(int(mask.sum()) for mask in masks), len(masks), 0.0
    scores = advantages_of(algorithm.advantage, [r.reward for r in group.rollouts])
    for rollout, mask, advantage in zip(group.rollouts, masks, scores, strict=True):
        weight = 1 / total if algorithm.aggregation == "token_mean" else 1 / (int(mask.sum()) * count)
        policy = plain_logprobs(model, group.prompt_ids, rollout.completion_ids, config.temperature)
        with torch.no_grad(), lora.bypassed(model.causal):
            base = plain_logprobs(model, group.prompt_ids, rollout.completion_ids, config.temperature)
        slopes = torch.zeros(len(mask))
        for t in np.flatnonzero(mask):
            numbers = (float(policy[t].detach()), rollout.logprobs[t], float(base[t]), float(advantage))
            value, slope = token_derivative(algorithm, *numbers)
            loss, slopes[t] = loss + weight * value, weight * slope
        policy.backward(slopes)
    return loss, {name: m.grad.clone() for name, m in masters.items() if m.grad is not None}


@pytest.mark.parametrize("budget", [10**6, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradients_are_those_of_each_rollout_alone(config: TrainerConfig, name: str, budget: int) -> None:
    config = msgspec.structs.replace(config, algorithm=ALGORITHMS[name], temperature=1.3)
    model, masters = adapted(config)
    group = multi_turn_group(model)
    expected_loss, expected = reference_step(model, masters, config, group)
    for master in masters.values():
        master.grad = None
    work = step.begin(model, config, [group], lambda *_: None)
    (update,) = plan_updates(work.batch, config.algorithm)
    for tree in pack(work.batch.sequences, budget):
        step.micro_batch(work, update, tree, learn=True)
    assert work.told.loss == pytest.approx(expected_loss, abs=1e-5)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for key, gradient in expected.items():
        grad = masters[key].grad
        assert grad is not None
        torch.testing.assert_close(grad, gradient, rtol=1e-3, atol=2e-5)


def ignore(_event: Event) -> None:
    """Progress is of no interest here."""


def test_no_number_depends_on_what_is_said_of_environment_tokens(config: TrainerConfig, tmp_path: Path) -> None:
    """Their log-probabilities change nothing, in metrics, results or weights; counts are of the policy's tokens."""
    worker, results = Worker(ignore), []
    worker.handle(InitVersion("run", config, str(tmp_path / "v0")))
    for index, value in enumerate((0.0, -30.0)):
        out = str(tmp_path / f"out-{index}")
        group = multi_turn_group(context_logprob=value)
        reply = worker.handle(TrainStep("run", config, 1, str(tmp_path / "v0"), out, 7, [group]))
        assert isinstance(reply, StepResult)
        results.append(reply)
    first, second = results
    assert first.adapter_sha256 == second.adapter_sha256
    assert first.rollouts == second.rollouts
    assert first.metrics | {"peak_rss_bytes": 0} == second.metrics | {"peak_rss_bytes": 0}
    assert first.metrics["completion_tokens"] == sum(sum(lengths[::2]) for lengths in TURNS)
    assert not first.skipped_optimizer


def test_what_the_environment_says_is_context_of_what_follows(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(ignore)
    worker.handle(InitVersion("run", config, str(tmp_path / "v0")))
    mask = [True, False, False, True]

    def scores(ids: list[int], trainable: list[bool] | None) -> list[float]:
        sequences = [Sequence(PROMPT, ids, trainable), Sequence(PROMPT, [9, 9], None)]
        reply = worker.handle(Score("run", config, str(tmp_path / "v0"), sequences))
        assert isinstance(reply, Scores)
        assert len(reply.logprobs[1]) == 2
        return reply.logprobs[0]

    masked, whole = scores([1, 2, 3, 4], mask), scores([1, 2, 3, 4], None)
    assert masked == pytest.approx([whole[0], whole[3]], abs=1e-5)
    other = scores([1, 2, 30, 4], mask)
    assert other[0] == pytest.approx(masked[0], abs=1e-6)
    assert abs(other[1] - masked[1]) > 1e-3
