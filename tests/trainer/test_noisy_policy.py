"""The noise in the trainer: the noisy behaviour policy as π_old, the paper's rounding, and a base in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.batch import plan_updates
from qerld_learner.trainer.messages import AlgorithmConfig, Group, NoiseSpec, Rollout, TrainerConfig
from qerld_learner.trainer.model import BaseModel
from qerld_learner.trainer.packing import TokenSequence, pack
from qerld_learner.trainer.step import load_weights, token_logprobs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .conftest import make_groups
from .test_model import plain_logprobs, some_sequences

FIRST, SECOND = NoiseSpec(0.3, 11, relative=True), NoiseSpec(0.2, 12)


def adapted(config: TrainerConfig) -> tuple[BaseModel, dict[str, nn.Parameter]]:
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    torch.manual_seed(5)
    load_weights(masters, {name: torch.randn(master.shape) / 8 for name, master in masters.items()})
    return model, masters


def scores(model: BaseModel, rollout: Rollout, prompt: list[int], noise: NoiseSpec | None) -> Tensor:
    sequence = TokenSequence(prompt, rollout.completion_ids)
    with model.noise(noise):
        return torch.tensor(token_logprobs(model, [sequence], 64, 1.0, lambda *_: None)[0])


def noisy_groups() -> list[Group]:
    """One rollout without noise, one each with two kinds, one whose turns have both; six tokens each."""
    ids = [[i, i + 10, i + 20, i + 30, i + 40, i + 50] for i in range(4)]
    noises = [[(6, NoiseSpec(0.0, 3))], [(6, FIRST)], [(6, SECOND)], [(4, FIRST), (6, SECOND)]]
    rollouts = [
        Rollout(f"r{i}", one, [-4.0] * 6, float(i % 2), 0, noises=noise)
        for i, (one, noise) in enumerate(zip(ids, noises, strict=True))
    ]
    return [Group("g", [5, 6, 7], rollouts)]


@pytest.mark.parametrize("budget", [10**6, 10])
def test_pi_old_with_noise_is_each_tokens_own_noisy_policy(config: TrainerConfig, budget: int) -> None:
    """Its log-probabilities are those of each token under its own noise; the ratio is taken to them."""
    algorithm = AlgorithmConfig(advantage="mean_only", old_policy="trainer_noisy", clip_low=0.01, clip_high=0.02)
    config = msgspec.structs.replace(config, algorithm=algorithm, token_budget=budget)
    model, _masters = adapted(config)
    (group,) = noisy_groups()
    kinds = [[None] * 6, [FIRST] * 6, [SECOND] * 6, [FIRST] * 4 + [SECOND] * 2]
    by_noise = [
        {noise: scores(model, rollout, group.prompt_ids, noise) for noise in (None, FIRST, SECOND)}
        for rollout in group.rollouts
    ]
    expected = [
        torch.stack([found[noise][t] for t, noise in enumerate(kind)])
        for found, kind in zip(by_noise, kinds, strict=True)
    ]
    work = step.begin(model, config, [group], lambda *_: None)
    assert work.known.old is not None
    for old, wanted in zip(work.known.old, expected, strict=True):
        torch.testing.assert_close(old, wanted, rtol=1e-5, atol=1e-5)
    assert all(float((by_noise[i][None] - expected[i]).abs().max()) > 0.05 for i in (1, 2, 3))

    (update,) = plan_updates(work.batch, algorithm)
    for tree in pack(work.batch.sequences, budget):
        step.micro_batch(work, update, tree, learn=True)
    clean = np.concatenate([found[None].numpy() for found in by_noise])
    old = torch.cat(expected).numpy()
    advantages = np.repeat([-0.5, 0.5, -0.5, 0.5], 6)
    ratio = np.exp(clean - old)
    loss = -np.minimum(ratio * advantages, np.clip(ratio, 0.99, 1.02) * advantages)
    assert work.told.loss == pytest.approx(loss.mean(), rel=1e-4)
    clipped = torch.cat([work.told.clipped[i] for i in range(4)]).numpy()
    assert (clipped == (np.clip(ratio, 0.99, 1.02) * advantages < ratio * advantages)).all()
    assert 0 < clipped.mean() < 1


def test_without_noise_it_is_the_trainers_own(config: TrainerConfig) -> None:
    found = []
    for old_policy in ("trainer", "trainer_noisy"):
        algorithm = AlgorithmConfig(old_policy=old_policy, correction="token_truncate")
        model, masters = adapted(msgspec.structs.replace(config, algorithm=algorithm))
        state = step.AdapterState(
            {name: master.detach().clone() for name, master in masters.items()},
            *({name: torch.zeros_like(master) for name, master in masters.items()} for _ in range(2)),
            updates=0,
            step=0,
        )
        changed = msgspec.structs.replace(config, algorithm=algorithm)
        found.append(step.train_step(model, masters, state, changed, make_groups(), 1, lambda *_: None))
    assert found[1].metrics == pytest.approx(found[0].metrics, abs=1e-5)
    for name, weight in found[0].state.weights.items():
        torch.testing.assert_close(found[1].state.weights[name], weight, rtol=1e-3, atol=1e-5)


def test_with_noise_the_correction_is_left_with_what_is_not_noise(config: TrainerConfig) -> None:
    """On-policy but for the noise: all of it is in the ratio, nothing in the correction."""
    algorithm = AlgorithmConfig(old_policy="trainer_noisy", correction="token_truncate", clip_high=0.28)
    config = msgspec.structs.replace(config, algorithm=algorithm)
    model, masters = adapted(config)
    (group,) = noisy_groups()
    behaviour = step.noisy_logprobs(
        model, step.begin(model, config, [group], lambda *_: None).batch, config, lambda *_: None
    )
    rollouts = [
        msgspec.structs.replace(rollout, logprobs=one.tolist())
        for rollout, one in zip(group.rollouts, behaviour, strict=True)
    ]
    zeros = {name: torch.zeros_like(master) for name, master in masters.items()}
    weights = {name: master.detach().clone() for name, master in masters.items()}
    state = step.AdapterState(weights, zeros, zeros, updates=0, step=0)
    groups = [msgspec.structs.replace(group, rollouts=rollouts)]
    metrics = step.train_step(model, masters, state, config, groups, 1, lambda *_: None).metrics
    assert metrics["correction_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["logprob_abs_diff"] < 1e-4
    assert metrics["clipped_share"] > 0.1


def noisy_reference(folder: Path, noise: NoiseSpec) -> Any:
    """transformers' own bf16 model in fp32 arithmetic, its norms changed in bf16 as the paper's code changes them."""
    from qerld_kernels.noise import noise_vector

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    for index in range(model.config.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{index}.{norm}"
            weight = model.get_submodule(name).weight
            sigma = noise.sigma * (float(weight.detach().double().abs().mean()) if noise.relative else 1.0)
            weight.data += (noise_vector(noise.seed, name, weight.numel()) * sigma).bfloat16()
    return model.float().eval()


@pytest.mark.parametrize("relative", [False, True])
def test_a_bf16_base_with_the_papers_rounding(
    config: TrainerConfig, tiny_model: tuple[Path, Path], relative: bool
) -> None:
    """No quantisation at all, the ablation: the trainer's noisy policy is the paper's, to the last bit of its norms."""
    noise = NoiseSpec(0.05, 21, relative, "bfloat16")
    model = BaseModel(msgspec.structs.replace(config, base=str(tiny_model[0])))
    sequences = some_sequences()[:3]
    with model.noise(noise):
        found = token_logprobs(model, sequences, 64, 1.0, lambda *_: None)
    reference = noisy_reference(tiny_model[0], noise)
    for sequence, one in zip(sequences, found, strict=True):
        expected = plain_logprobs(reference, sequence).detach()
        torch.testing.assert_close(torch.tensor(one), expected, rtol=1e-5, atol=2e-5)
    with model.noise(msgspec.structs.replace(noise, dtype="float32")):
        unrounded = token_logprobs(model, sequences, 64, 1.0, lambda *_: None)
    assert max(abs(a - b) for a, b in zip(found[0], unrounded[0], strict=True)) > 1e-3
