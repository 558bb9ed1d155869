"""Every preset is a row of a run's fields, is accepted as it is, and learns: a tiny model, sampled under noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from statistics import fmean

import msgspec
import pytest
import torch
from qerld.v1 import run_pb2
from qerld_learner.api import convert
from qerld_learner.api.checks import Checks
from qerld_learner.api.run_config import run_config
from qerld_learner.records import RunConfig
from qerld_learner.run_options import algorithm_config, check_run_config
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.algorithm import PRESETS
from qerld_learner.trainer.checkpoint import AdapterState
from qerld_learner.trainer.messages import AlgorithmConfig, Group, NoiseSpec, Rollout, TrainerConfig
from qerld_learner.trainer.model import BaseModel

from .conftest import VOCAB

TOKENS, GROUPS, ROLLOUTS, STEPS = 4, 2, 16, 18
PROMPTS = [[5, 6, 7], [8, 9]]


def of_preset(name: str, **algorithm: object) -> RunConfig:
    """What CreateRun makes of a preset and what is set beside it."""
    number = run_pb2.AlgorithmPreset.Value(f"ALGORITHM_PRESET_{name.upper()}")
    checks = Checks()
    message = run_pb2.Algorithm(preset=number, **algorithm)  # type: ignore[arg-type]
    config = run_config(checks, run_pb2.RunConfig(max_tokens=TOKENS, groups_per_step=GROUPS, algorithm=message))
    assert checks.violations == []
    return config


def test_the_api_has_every_preset() -> None:
    names = {name.removeprefix("ALGORITHM_PRESET_").lower() for name in run_pb2.AlgorithmPreset.keys()}  # noqa: SIM118
    assert names - {"unspecified"} == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_row_of_fields_that_is_accepted_and_returned(name: str) -> None:
    assert set(PRESETS[name]) <= {field.name for field in fields(RunConfig)}
    config = of_preset(name)
    assert check_run_config(config) == []
    assert {field: getattr(config, field) for field in PRESETS[name]} == PRESETS[name]
    assert run_config(Checks(), convert.run_config(config)) == config


def test_what_is_set_beside_a_preset_wins() -> None:
    config = of_preset("grpo", kl_coef=0.0, clip_high=0.3, aggregation=run_pb2.LOSS_AGGREGATION_TOKEN_MEAN)
    assert (config.kl_coef, config.clip_low, config.clip_high) == (0.0, 0.2, 0.3)
    assert (config.aggregation, config.preset) == ("token_mean", "grpo")
    assert of_preset("ppo_clip", epochs=1).epochs == 1


def test_what_depends_on_other_fields_follows_them() -> None:
    assert of_preset("dr_grpo").loss_divisor == TOKENS
    assert of_preset("rloo").loss_divisor == 1.0
    assert (of_preset("none").correction, of_preset("none").old_policy) == ("token_truncate", "trainer")
    assert (of_preset("none", tis_cap=0).correction, of_preset("none", tis_cap=0).old_policy) == ("none", "behaviour")
    assert of_preset("none", tis_cap=0, mini_batches=2).old_policy == "trainer"
    assert of_preset("none", kl_in=run_pb2.KL_PLACEMENT_REWARD).kl_estimator == "k1"
    geometric = of_preset("none", correction=run_pb2.MISMATCH_CORRECTION_GEOMETRIC_MASK)
    assert (geometric.mask_low, geometric.mask_high) == (0.9, 1.1)


def sample(model: BaseModel, prompt: list[int], count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Completions and their log-probabilities, under whatever the model has loaded and its norms add."""
    ids = torch.tensor([prompt] * count)
    chosen = []
    with torch.no_grad():
        for _ in range(TOKENS):
            logprobs = torch.log_softmax(model.causal(input_ids=ids).logits[:, -1].float(), dim=-1)
            token = torch.multinomial(logprobs.exp(), 1)
            chosen.append(logprobs.gather(1, token))
            ids = torch.cat([ids, token], dim=1)
    return ids[:, len(prompt) :].tolist(), torch.cat(chosen, dim=1).tolist()


def even(completion: list[int]) -> float:
    """Share of even token ids: a random policy gets a half."""
    return sum(token % 2 == 0 for token in completion) / len(completion)


def scored_group(model: BaseModel, index: int, score: Callable[[list[int]], float]) -> Group:
    completions, logprobs = sample(model, PROMPTS[index], ROLLOUTS)
    rollouts = [
        Rollout(f"g{index}r{i}", ids, values, score(ids), 0)
        for i, (ids, values) in enumerate(zip(completions, logprobs, strict=True))
    ]
    return Group(f"g{index}", PROMPTS[index], rollouts)


def learn(config: TrainerConfig, algorithm: AlgorithmConfig, steps: int = STEPS) -> list[dict[str, float]]:
    """Metrics of each step of a whole training run."""
    config = msgspec.structs.replace(config, algorithm=algorithm)
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    weights = lora.first_weights(masters, 1)
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    state, metrics = AdapterState(weights, first, second, updates=0, step=0), []
    torch.manual_seed(2)
    for number in range(1, steps + 1):
        step.load_weights(masters, state.weights)
        with model.noise(NoiseSpec(0.02, number)):
            groups = [scored_group(model, index, even) for index in range(GROUPS)]
        outcome = step.train_step(model, masters, state, config, groups, number, lambda *_: None)
        state = outcome.state
        metrics.append(outcome.metrics)
    return metrics


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns(config: TrainerConfig, name: str) -> None:
    rewards = [metrics["reward_mean"] for metrics in learn(config, algorithm_config(of_preset(name)))]
    assert fmean(rewards[:2]) < 0.62
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.15, rewards


@pytest.mark.parametrize("correction", ["token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"])
def test_every_correction_learns(config: TrainerConfig, correction: str) -> None:
    number = run_pb2.MismatchCorrection.Value(f"MISMATCH_CORRECTION_{correction.upper()}")
    metrics = learn(config, algorithm_config(of_preset("none", correction=number)))
    rewards = [one["reward_mean"] for one in metrics]
    assert all(0 < one["mismatch_kl_k3"] < 1 for one in metrics)
    assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.15, rewards


def test_an_entropy_bonus_alone_raises_the_entropy(config: TrainerConfig) -> None:
    """A preference that the model has to give up again: the bonus is the only gradient."""
    algorithm = AlgorithmConfig(advantage="mean_only", aggregation="token_mean", entropy_coef=1.0)
    model = BaseModel(msgspec.structs.replace(config, algorithm=algorithm))
    masters = lora.attach(model.causal, config.lora)
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(master.shape, generator=generator) / 4 for name, master in masters.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    state, entropies = AdapterState(weights, first, second, updates=0, step=0), []
    for number in range(1, 9):
        step.load_weights(masters, state.weights)
        groups = [scored_group(model, 0, lambda _: 1.0)]
        changed = msgspec.structs.replace(config, algorithm=algorithm)
        outcome = step.train_step(model, masters, state, changed, groups, number, lambda *_: None)
        assert not outcome.skipped_optimizer
        state = outcome.state
        entropies.append(outcome.metrics["entropy"])
    assert entropies[-1] > entropies[0] + 0.2, entropies
    assert entropies[-1] <= torch.tensor(float(VOCAB)).log()
