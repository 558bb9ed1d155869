"""Each objective against its paper's equation in NumPy, loss and gradient; what must carry no gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import objectives
from qerld_learner.trainer.algorithm import NAMES, PRESETS
from qerld_learner.trainer.messages import AlgorithmConfig
from qerld_learner.trainer.objectives import TokenBatch, policy_loss
from torch import Tensor

from . import papers
from .numbers import padded, preset, token_batch
from .papers import PAPERS, Array, Problem, derivative, problem

GRPO = AlgorithmConfig()


def loss_and_gradient(config: AlgorithmConfig, x: Problem) -> tuple[float, Array]:
    batch = token_batch(config, x)
    loss, _ = policy_loss(config, batch)
    loss.backward()
    assert batch.logprobs.grad is not None
    return float(loss.detach()), padded(x, batch.logprobs.grad)


def compare(config: AlgorithmConfig, x: Problem, paper: Callable[[Array], float]) -> None:
    loss, gradient = loss_and_gradient(config, x)
    assert loss == pytest.approx(paper(x.pi), rel=1e-6, abs=1e-6)
    expected = derivative(paper, x.pi, x.mask)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-6)


def test_every_preset_has_its_paper() -> None:
    assert set(PAPERS) == set(PRESETS) - {"none"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_is_its_papers_equation(name: str, seed: int) -> None:
    x = problem(seed)
    compare(preset(name, x.longest), x, lambda pi: PAPERS[name](x, pi))


@pytest.mark.parametrize("name", PAPERS)
def test_without_any_variance_no_preset_has_a_policy_gradient(name: str) -> None:
    x = problem(1)
    x = replace(x, rewards=np.full_like(x.rewards, 0.7))
    config = preset(name, x.longest, kl_coef=0.0, overlong="keep")
    loss, gradient = loss_and_gradient(config, x)
    assert loss == 0
    assert not gradient.any()


def filtered(x: Problem) -> Problem:
    return replace(x, mask=x.mask * ~x.truncated[:, None])


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo"])
def test_truncated_rollouts_are_left_out_of_the_loss_and_kept_in_their_groups(name: str) -> None:
    """Rows without a token: no term, no share of a token mean; a rollout still in means over rollouts."""
    x = problem(2)
    y = filtered(x)
    config = preset(name, x.longest, overlong="filter", kl_coef=0.0)
    kept = y.mask.sum(1)

    def paper(pi: Array) -> float:
        advantages = papers.centred(x, x.rewards) if name == "dr_grpo" else papers.normalised(x, x.rewards)
        high = config.clip_high
        token = papers.clipped_surrogate(np.exp(pi - x.old), advantages[:, None], 0.2, high) * y.mask
        return -float(
            {
                "dapo": token.sum() / kept.sum(),
                "grpo": (token.sum(1) / np.maximum(kept, 1)).mean(),
                "dr_grpo": token.sum(1).mean() / x.longest,
            }[name]
        )

    assert 0 < x.truncated.sum() < len(x.truncated)
    loss, gradient = loss_and_gradient(config, x)
    assert loss == pytest.approx(paper(x.pi), rel=1e-6)
    np.testing.assert_allclose(gradient, derivative(paper, x.pi, x.mask), rtol=2e-6, atol=1e-6)


def test_a_batch_of_truncated_rollouts_only_has_no_loss() -> None:
    x = problem(2)
    x = replace(x, truncated=np.ones_like(x.truncated))
    for aggregation in NAMES["aggregation"]:
        config = preset("dapo", x.longest, overlong="filter", aggregation=aggregation)
        loss, gradient = loss_and_gradient(config, x)
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip(seed: int) -> None:
    """arXiv 1912.09729: max(min(r·A, clip(r)·A), c·A) where A < 0."""
    x = problem(seed)

    def paper(pi: Array) -> float:
        advantages, ratio = papers.normalised(x, x.rewards)[:, None], np.exp(pi - x.old)
        token = papers.clipped_surrogate(ratio, advantages, 0.2, 0.2)
        token = np.where(advantages < 0, np.maximum(token, 3.0 * advantages), token)
        return -float(((token * x.mask).sum(1) / x.lengths).mean())

    config = preset("grpo", x.longest, kl_coef=0.0, clip="dual", dual_clip=3.0)
    _, terms = policy_loss(config, token_batch(config, x))
    advantages = papers.normalised(x, x.rewards)[:, None] * np.ones_like(x.pi)
    cut = (advantages < 0) & (np.exp(x.pi - x.old) > 3.0) & (x.mask > 0)
    assert cut.any()
    assert padded(x, terms.clipped.double())[cut].all()
    compare(config, x, paper)


KL_OF_TOKEN = {
    "k1": lambda pi, ref: pi - ref,
    "k2": lambda pi, ref: (pi - ref) ** 2 / 2,
    "k3": lambda pi, ref: np.exp(ref - pi) - (ref - pi) - 1,
}


@pytest.mark.parametrize("name", KL_OF_TOKEN)
def test_kl_in_the_loss(name: str) -> None:
    """Schulman's estimators of KL(π ‖ ref), "Approximating KL divergence" (2020)."""
    x = problem(3)

    def paper(pi: Array) -> float:
        token = -papers.clipped_surrogate(np.exp(pi - x.old), papers.normalised(x, x.rewards)[:, None], 0.2, 0.28)
        token = token + 0.3 * KL_OF_TOKEN[name](pi, x.ref)
        return float((token * x.mask).sum() / x.mask.sum())

    config = preset("dapo", x.longest, overlong="keep", kl_coef=0.3, kl_estimator=name, kl_in="loss")
    compare(config, x, paper)


@pytest.mark.parametrize("name", KL_OF_TOKEN)
@pytest.mark.parametrize("advantage", ["mean_only", "leave_one_out"])
def test_kl_in_the_reward_is_the_rollouts(name: str, advantage: str) -> None:
    """It is taken at π_old and off the rollout's reward, before the group is centred: no gradient flows through it."""
    x = problem(3)
    total = x.rewards - 0.3 * (KL_OF_TOKEN[name](x.old, x.ref) * x.mask).sum(1)

    def paper(pi: Array) -> float:
        scale = x.group / (x.group - 1) if advantage == "leave_one_out" else 1.0
        advantages = scale * papers.centred(x, total)[:, None]
        token = papers.clipped_surrogate(np.exp(pi - x.old), advantages, 0.2, 0.28)
        return -float((token * x.mask).sum() / x.mask.sum())

    changes = {"overlong": "keep", "kl_coef": 0.3, "kl_estimator": name, "kl_in": "reward", "advantage": advantage}
    compare(preset("dapo", x.longest, **changes), x, paper)


def test_the_entropy_bonus_has_the_losss_weights() -> None:
    x = problem(4)
    for aggregation in NAMES["aggregation"]:
        config = preset("dapo", x.longest, overlong="keep", aggregation=aggregation)
        bonus = msgspec.structs.replace(config, entropy_coef=0.3)
        plain, batch = policy_loss(config, token_batch(config, x))[0], token_batch(bonus, x)
        loss, _ = policy_loss(bonus, batch)
        loss.backward()
        assert float((loss - plain).detach()) == pytest.approx(
            -0.3 * float((batch.weights * batch.entropy).sum().detach())
        )
        assert batch.entropy.grad is not None
        torch.testing.assert_close(batch.entropy.grad, -0.3 * batch.weights.detach())


def test_on_policy_rloo_is_reinforce() -> None:
    """At π = π_old the gradient is −(R − b)·∇ log π(y), averaged over rollouts: arXiv 2402.14740's estimator."""
    x = problem(5)
    x = replace(x, old=x.pi.copy())
    _, gradient = loss_and_gradient(preset("rloo", x.longest, kl_coef=0.0), x)
    advantages = papers.centred(x, x.rewards) * x.group / (x.group - 1)
    np.testing.assert_allclose(gradient, -advantages[:, None] * x.mask / len(x.rewards), rtol=2e-6, atol=1e-9)


def test_gspo_with_an_advantage_a_token_keeps_each_tokens_own() -> None:
    """arXiv 2507.18071, eq. 13 and 14 (GSPO-token): −sg(s)·A_t·∇ log π_t."""
    x = problem(6)
    config = preset("gspo", x.longest, clip="none")
    batch = token_batch(config, x)
    own = torch.linspace(-1, 1, len(batch.logprobs), dtype=torch.float64)
    batch = replace(batch, advantages=own)
    policy_loss(config, batch)[0].backward()
    ratio = np.exp(((x.pi - x.old) * x.mask).sum(1) / x.lengths)[:, None]
    expected = -ratio * padded(x, own) * x.mask / x.lengths[:, None] / len(x.rewards)
    assert batch.logprobs.grad is not None
    np.testing.assert_allclose(padded(x, batch.logprobs.grad), expected, rtol=2e-6, atol=1e-9)


CORRECTED = [{"correction": name, "old_policy": "trainer"} for name in NAMES["correction"]]
CORRECTED += [{"correction": "none", "old_policy": "behaviour"}]


@pytest.mark.parametrize("changes", CORRECTED, ids=lambda changes: "-".join(changes.values()))
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("first", [True, False])
def test_only_the_policy_carries_a_gradient(name: str, changes: dict[str, str], first: bool) -> None:
    x = problem(1)
    config = preset(name, x.longest, kl_coef=0.1, **changes)
    batch = token_batch(config, x)
    batch = replace(batch, old=None if first else batch.old)
    loss, terms = policy_loss(config, batch)
    loss.backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.any()
    for field in ("behaviour", "advantages", "weights", "reference", "old"):
        tensor = getattr(batch, field)
        assert tensor is None or tensor.grad is None, field
    assert not any(getattr(terms, field).requires_grad for field in terms.__dataclass_fields__)


@pytest.mark.parametrize("correction", NAMES["correction"])
def test_in_the_first_update_a_correction_weighs_the_score_function(correction: str) -> None:
    """With π_old = π the gradient is −weight · A · w, w held: were it not, sequence weights would double it."""
    x = problem(1)
    config = preset("dapo", x.longest, overlong="keep", correction=correction)
    batch = replace(token_batch(config, x), old=None)
    loss, terms = policy_loss(config, batch)
    loss.backward()
    expected = -batch.weights * batch.advantages * terms.correction
    torch.testing.assert_close(batch.logprobs.grad, expected.detach())


def test_the_behaviour_may_be_the_old_policy() -> None:
    x = problem(2)
    moved = replace(x, old=x.mu)
    config = preset("grpo", x.longest, kl_coef=0.0, old_policy="behaviour")
    compare(config, x, lambda pi: PAPERS["grpo"](replace(moved, ref=pi), pi))


def test_clip_is_one_sided() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.28)
    term, clipped = objectives.ppo_clip(ratio, ratio.log(), advantages, config)
    assert clipped.tolist() == [True, False, False, True, False]
    assert term.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -1.1])


def all_alike(logprobs: Tensor, behaviour: Tensor) -> TokenBatch:
    count = len(logprobs)
    owners, thirds = torch.zeros(count, dtype=torch.int64), torch.full((count,), 1 / count)
    advantages = torch.tensor([0.0, 0.0, 1.0])
    return TokenBatch(logprobs, behaviour, advantages, thirds, owners, thirds, None, behaviour)


@pytest.mark.parametrize("changes", CORRECTED, ids=lambda changes: "-".join(changes.values()))
@pytest.mark.parametrize("kl", NAMES["kl_estimator"])
def test_log_probabilities_beyond_any_ratio_stay_finite(changes: dict[str, str], kl: str) -> None:
    logprobs = torch.tensor([-1e4, -1e-4, -3.0], requires_grad=True)
    config = AlgorithmConfig(kl_coef=0.3, kl_estimator=kl, **changes)
    loss, terms = policy_loss(config, all_alike(logprobs, torch.tensor([-1e-4, -1e4, -3.0])))
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(terms.ratio).all()


def test_the_tables_have_the_names_that_the_api_knows() -> None:
    """`algorithm.NAMES` stands for them where torch is not at hand."""
    for field, table in (
        ("ratio", objectives.RATIOS),
        ("clip", objectives.CLIPS),
        ("aggregation", objectives.AGGREGATIONS),
        ("kl_estimator", objectives.KLS),
        ("correction", objectives.CORRECTIONS),
    ):
        assert set(NAMES[field]) == set(table), field


@pytest.mark.parametrize(
    ("field", "value"),
    [("aggregation", "sum"), ("clip_low", 1.5), ("clip_high", -0.1), ("kl_coef", float("nan")), ("epochs", 0)],
)
def test_bad_fields_are_named_with_their_value(field: str, value: object) -> None:
    with pytest.raises(objectives.ObjectiveError, match=rf"algorithm\.{field} .*got"):
        objectives.check(msgspec.structs.replace(GRPO, **{field: value}))
