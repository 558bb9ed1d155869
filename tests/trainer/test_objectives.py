"""Losses and gradients recomputed in NumPy, token by token, on ragged random batches."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import objectives
from qerld_learner.trainer.messages import AlgorithmConfig
from qerld_learner.trainer.objectives import TokenBatch, policy_loss

GRPO = AlgorithmConfig(aggregation="sequence_mean")
DAPO = AlgorithmConfig(aggregation="token_mean", clip_low=0.2, clip_high=0.28)
CASES = {
    "grpo": GRPO,
    "dapo": DAPO,
    "grpo_kl": msgspec.structs.replace(GRPO, kl_coef=0.3),
    "dapo_tis": msgspec.structs.replace(DAPO, tis_cap=1.5),
    "grpo_kl_tis": msgspec.structs.replace(GRPO, kl_coef=0.1, tis_cap=2.0),
}


def ragged(seed: int) -> tuple[list[int], dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=7).tolist()
    total = sum(lengths)
    logprobs = -rng.exponential(1.0, total)
    return lengths, {
        "logprobs": logprobs,
        "behaviour": logprobs + rng.normal(0, 0.4, total),
        "reference": logprobs + rng.normal(0, 0.4, total),
        "advantages": np.repeat(rng.normal(0, 1, len(lengths)), lengths),
    }


def by_hand(config: AlgorithmConfig, lengths: list[int], x: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The loss and its derivative by each log-probability, one token at a time."""
    loss, gradient, t = 0.0, np.zeros(sum(lengths)), 0
    for length in lengths:
        weight = 1 / sum(lengths) if config.aggregation == "token_mean" else 1 / (length * len(lengths))
        for _ in range(length):
            pi, mu, ref, a = (float(x[name][t]) for name in ("logprobs", "behaviour", "reference", "advantages"))
            if config.tis_cap is None:
                ratio, correction = math.exp(pi - mu), 1.0
            else:
                ratio, correction = 1.0, min(math.exp(pi - mu), config.tis_cap)
            bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            active = bounded * a < ratio * a
            loss += -weight * correction * (bounded if active else ratio) * a
            gradient[t] += 0.0 if active else -weight * correction * ratio * a
            loss += weight * config.kl_coef * (math.exp(ref - pi) - (ref - pi) - 1)
            gradient[t] += weight * config.kl_coef * (1 - math.exp(ref - pi))
            t += 1
    return loss, gradient


def as_batch(config: AlgorithmConfig, lengths: list[int], x: dict[str, np.ndarray]) -> TokenBatch:
    tensors = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in x.items()}
    sizes = torch.tensor(lengths, dtype=torch.float64)
    weights = objectives.AGGREGATIONS[config.aggregation](sizes).repeat_interleave(torch.tensor(lengths))
    return TokenBatch(**tensors, weights=weights.requires_grad_())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_match_the_hand_computation(name: str, seed: int) -> None:
    lengths, x = ragged(seed)
    batch = as_batch(CASES[name], lengths, x)
    loss, _ = policy_loss(CASES[name], batch)
    loss.backward()
    expected_loss, expected_gradient = by_hand(CASES[name], lengths, x)
    assert float(loss.detach()) == pytest.approx(expected_loss, abs=1e-6)
    np.testing.assert_allclose(batch.logprobs.grad.numpy(), expected_gradient, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_only_the_policy_carries_a_gradient(name: str) -> None:
    lengths, x = ragged(1)
    batch = as_batch(CASES[name], lengths, x)
    loss, terms = policy_loss(CASES[name], batch)
    loss.backward()
    assert batch.logprobs.grad is not None
    for field in ("behaviour", "advantages", "weights", "reference"):
        assert getattr(batch, field).grad is None, field
    assert not any(value.requires_grad for value in (terms.ratio, terms.clipped, terms.correction))


def test_aggregations_differ_on_ragged_batches_and_sum_to_one() -> None:
    lengths = torch.tensor([1.0, 3.0])
    assert objectives.sequence_mean(lengths).tolist() == pytest.approx([1 / 2, 1 / 6])
    assert objectives.token_mean(lengths).tolist() == pytest.approx([1 / 4, 1 / 4])


def test_clip_is_one_sided() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    term, clipped = objectives.ppo_clip(ratio, advantages, 0.2, 0.28)
    assert clipped.tolist() == [True, False, False, True, False]
    assert term.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.1])


def test_extreme_log_probabilities_stay_finite() -> None:
    logprobs = torch.tensor([-1e4, -1e-4, -3.0], requires_grad=True)
    behaviour = torch.tensor([-1e-4, -1e4, -3.0])
    batch = TokenBatch(logprobs, behaviour, torch.tensor([0.0, 0.0, 1.0]), torch.full((3,), 1 / 3), behaviour)
    loss, terms = policy_loss(CASES["grpo_kl"], batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(terms.ratio).all()


def test_mismatch_metrics_by_hand() -> None:
    pi, mu = np.array([-1.0, -2.0, -0.5]), np.array([-1.2, -1.5, -0.5])
    w = np.exp(pi - mu)
    found = objectives.mismatch_metrics(torch.tensor(pi), torch.tensor(mu))
    expected = {
        "mismatch_kl_k1": (mu - pi).mean(),
        "mismatch_kl_k3": (w - 1 - (pi - mu)).mean(),
        "logprob_abs_diff": np.abs(pi - mu).mean(),
        "ratio_mean": w.mean(),
        "ess": w.sum() ** 2 / (3 * (w**2).sum()),
    }
    assert found == pytest.approx(expected, abs=1e-6)


def test_tis_truncated_share_counts_ratios_above_the_cap() -> None:
    ratio = torch.tensor([0.5, 1.0, 2.5, 3.0])
    assert objectives.tis_truncated_share(msgspec.structs.replace(GRPO, tis_cap=2.0), ratio) == 0.5
    assert objectives.tis_truncated_share(GRPO, ratio) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("aggregation", "sum"), ("clip_low", 1.5), ("clip_high", -0.1), ("kl_coef", float("nan")), ("tis_cap", 0.0)],
)
def test_bad_fields_are_named_with_their_value(field: str, value: object) -> None:
    with pytest.raises(objectives.ObjectiveError, match=rf"algorithm\.{field} .*got"):
        objectives.check(msgspec.structs.replace(GRPO, **{field: value}))
