"""Mismatch corrections and their metrics in NumPy; lag and adaptive noise, which are one thing to them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.algorithm import MASKS, NAMES
from qerld_learner.trainer.batch import Update
from qerld_learner.trainer.corrections import CORRECTIONS, Weights, mismatch_metrics
from qerld_learner.trainer.messages import AlgorithmConfig, Group, NoiseSpec, Rollout, TrainerConfig
from qerld_learner.trainer.model import BaseModel
from qerld_learner.trainer.objectives import policy_loss
from qerld_learner.trainer.packing import TokenSequence, pack
from torch import Tensor

from .conftest import VOCAB
from .numbers import padded, preset, token_batch
from .papers import Array, Problem, problem

CAP, LOW, HIGH = 1.5, 0.8, 1.2


def by_hand(name: str, x: Problem, log_ratio: Array) -> tuple[Array, Array]:
    """The weight of each token [R, L], and where a cap or a mask acted."""
    token = np.exp(log_ratio)
    product = np.exp((log_ratio * x.mask).sum(1, keepdims=True)) * np.ones_like(token)
    geometric = np.exp((log_ratio * x.mask).sum(1, keepdims=True) / x.lengths[:, None]) * np.ones_like(token)
    tested = {"token": token, "sequence": product, "geometric": geometric}[name.split("_")[0]]
    if name.endswith("truncate"):
        return np.minimum(tested, CAP), tested > CAP
    inside = (tested >= LOW) & (tested <= HIGH)
    return inside * (np.ones_like(token) if name == "geometric_mask" else tested), ~inside


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name in NAMES["correction"] if name != "none"])
def test_a_correction_by_hand_and_in_the_loss(name: str, seed: int) -> None:
    x = problem(seed)
    config = preset("dapo", x.longest, overlong="keep", correction=name, tis_cap=CAP, mask_low=LOW, mask_high=HIGH)
    weights, limited = by_hand(name, x, x.old - x.mu)
    loss, terms = policy_loss(config, token_batch(config, x))
    np.testing.assert_allclose(padded(x, terms.correction), weights * x.mask, rtol=1e-9)
    assert (padded(x, terms.limited.double()) == limited * x.mask).all()
    assert 0 < float(terms.limited.double().mean()) < 1
    plain = token_batch(config, x)
    tokens = -torch.minimum(
        (plain.logprobs - plain.old).exp() * plain.advantages,
        (plain.logprobs - plain.old).exp().clamp(0.8, 1.28) * plain.advantages,
    )
    # Tokens that a mask leaves out are part of the mean's divisor.
    expected = (padded(x, tokens) * weights * x.mask).sum() / x.mask.sum()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", NAMES["correction"])
def test_on_policy_every_correction_is_one(name: str) -> None:
    low, high = MASKS.get(name, (0.5, 5.0))
    config = AlgorithmConfig(correction=name, mask_low=low, mask_high=high)
    found: Weights = CORRECTIONS[name](torch.zeros(5), torch.tensor([0, 0, 1, 1, 1]), config)
    assert found.values.tolist() == [1.0] * 5
    assert not found.limited.any()


def test_mismatch_metrics_by_hand() -> None:
    pi, mu = np.array([-1.0, -2.0, -0.5]), np.array([-1.2, -1.5, -0.5])
    w = np.exp(pi - mu)
    found = mismatch_metrics(torch.tensor(pi), torch.tensor(mu))
    expected = {
        "mismatch_kl_k1": (mu - pi).mean(),
        "mismatch_kl_k3": (w - 1 - (pi - mu)).mean(),
        "logprob_abs_diff": np.abs(pi - mu).mean(),
        "ratio_mean": w.mean(),
        "ess": w.sum() ** 2 / (3 * (w**2).sum()),
    }
    assert found == pytest.approx(expected, abs=1e-6)


# Off-policy, with the model: every completion of one token, weighed with the probability that it is sampled with, gives
# the expectation of what a step does. Corrected, it is the on-policy one, whatever made the behaviour another.


PROMPT = [5, 6, 7]


def one_token_group(behaviour: list[float]) -> Group:
    """All tokens of the vocabulary as completions; rewards by token id."""
    rollouts = [Rollout(f"r{i}", [i], [behaviour[i]], float(i % 3 == 0), 0) for i in range(VOCAB)]
    return Group("g", PROMPT, rollouts)


def adapted(config: TrainerConfig) -> tuple[BaseModel, dict[str, torch.nn.Parameter]]:
    model = BaseModel(config)
    return model, lora.attach(model.causal, config.lora)


def weights(masters: dict[str, torch.nn.Parameter], seed: int, size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(master.shape, generator=generator) * size for name, master in masters.items()}


def next_token_logprobs(model: BaseModel, config: TrainerConfig, noise: NoiseSpec | None = None) -> list[float]:
    sequences = [TokenSequence(PROMPT, [i]) for i in range(VOCAB)]
    with model.noise(noise):
        scores = step.token_logprobs(model, sequences, config.token_budget, config.temperature, lambda *_: None)
    return [one[0] for one in scores]


def expected_gradient(
    model: BaseModel, masters: dict[str, torch.nn.Parameter], config: TrainerConfig, behaviour: list[float]
) -> dict[str, Tensor]:
    """The expectation, over what the behaviour samples, of the gradient of a step from the loaded weights."""
    work = step.begin(model, config, [one_token_group(behaviour)], lambda *_: None)
    update = Update(list(range(VOCAB)), torch.tensor(behaviour).exp())
    for master in masters.values():
        master.grad = None
    for tree in pack(work.batch.sequences, config.token_budget):
        step.micro_batch(work, update, tree, learn=True)
    return {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    difference = torch.cat([(found[name] - gradient).flatten() for name, gradient in expected.items()])
    return float(difference.norm() / torch.cat([gradient.flatten() for gradient in expected.values()]).norm())


def behaviours(
    model: BaseModel, masters: dict[str, torch.nn.Parameter], config: TrainerConfig
) -> dict[str, list[float]]:
    """What other policies than the current one sample with; leaves the current one loaded."""
    current = weights(masters, 1, 0.15)
    older = {name: tensor + 0.1 * weights(masters, 2, 1.0)[name] for name, tensor in current.items()}
    step.load_weights(masters, older)
    lag = next_token_logprobs(model, config)
    both = next_token_logprobs(model, config, NoiseSpec(0.1, 9))
    step.load_weights(masters, current)
    return {"lag": lag, "aqn": next_token_logprobs(model, config, NoiseSpec(0.3, 7)), "lag and aqn": both}


@pytest.mark.parametrize("kind", ["lag", "aqn", "lag and aqn"])
@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_off_policy_by_lag_and_by_noise_is_corrected_alike(config: TrainerConfig, kind: str, correction: str) -> None:
    """Importance weights within their bounds give the on-policy gradient exactly; without them it is another one."""
    algorithm = AlgorithmConfig(
        advantage="mean_only", old_policy="trainer", correction=correction, tis_cap=1e6, mask_low=0.0, mask_high=1e6
    )
    config = msgspec.structs.replace(config, algorithm=algorithm)
    plain = msgspec.structs.replace(config, algorithm=msgspec.structs.replace(algorithm, correction="none"))
    model, masters = adapted(config)
    behaviour = behaviours(model, masters, config)[kind]
    on_policy = expected_gradient(model, masters, plain, next_token_logprobs(model, config))
    assert distance(expected_gradient(model, masters, config, behaviour), on_policy) < 1e-4
    assert distance(expected_gradient(model, masters, plain, behaviour), on_policy) > 0.05


def test_a_cap_trades_the_gradients_size_for_its_variance(config: TrainerConfig) -> None:
    """Truncated weights are between no correction and the full one."""
    algorithm = AlgorithmConfig(advantage="mean_only", old_policy="trainer", correction="token_truncate")
    model, masters = adapted(config)
    behaviour = behaviours(model, masters, config)["lag"]
    found = {}
    for cap in (1e6, 2.0, 1.0):
        capped = msgspec.structs.replace(config, algorithm=msgspec.structs.replace(algorithm, tis_cap=cap))
        found[cap] = expected_gradient(model, masters, capped, behaviour)
    assert 0 < distance(found[2.0], found[1e6]) < distance(found[1.0], found[1e6])


def test_a_steps_metrics_say_how_far_off_policy_its_rollouts_are(config: TrainerConfig) -> None:
    """By the behaviour's log-probabilities as given, for lag and noise alike."""
    algorithm = AlgorithmConfig(old_policy="trainer", correction="token_mask", mask_low=0.5, mask_high=2.0)
    config = msgspec.structs.replace(config, algorithm=algorithm)
    model, masters = adapted(config)
    for behaviour in behaviours(model, masters, config).values():
        current = np.array(next_token_logprobs(model, config))
        state = step.AdapterState(
            {name: master.detach().clone() for name, master in masters.items()},
            *({name: torch.zeros_like(master) for name, master in masters.items()} for _ in range(2)),
            updates=0,
            step=0,
        )
        outcome = step.train_step(model, masters, state, config, [one_token_group(behaviour)], 1, lambda *_: None)
        step.load_weights(masters, state.weights)
        w = np.exp(current - np.array(behaviour))
        outside = (w < 0.5) | (w > 2.0)
        assert outside.any()
        assert outcome.metrics["logprob_abs_diff"] == pytest.approx(np.abs(np.log(w)).mean(), rel=1e-3)
        assert outcome.metrics["mismatch_kl_k1"] == pytest.approx(-np.log(w).mean(), rel=1e-3, abs=1e-5)
        assert outcome.metrics["mismatch_kl_k3"] == pytest.approx((w - 1 - np.log(w)).mean(), rel=1e-3)
        assert outcome.metrics["correction_limited_share"] == pytest.approx(outside.mean())
        assert outcome.metrics["correction_mean"] == pytest.approx((w * ~outside).mean(), rel=1e-4)
        assert outcome.metrics["ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-3)


def test_rollouts_are_rejected_whole() -> None:
    """A rollout far from the trainer leaves no gradient; its sibling keeps its own."""
    x = problem(0)
    algorithm = preset("grpo", x.longest, kl_coef=0.0, correction="geometric_mask", mask_low=0.9, mask_high=1.1)
    near = replace(x, mu=x.old.copy())
    near.mu[3] = x.old[3] - 0.5
    batch = token_batch(algorithm, near)
    policy_loss(algorithm, batch)[0].backward()
    assert batch.logprobs.grad is not None
    gradient = padded(x, batch.logprobs.grad)
    assert not gradient[3].any()
    assert gradient[2].any()
