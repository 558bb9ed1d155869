"""Several updates a batch against a plain loop of autograd and AdamW; rewards by step, filters, KL penalties."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.batch import make_batch, plan_updates
from qerld_learner.trainer.checkpoint import AdapterState
from qerld_learner.trainer.messages import AlgorithmConfig, Group, OptimizerConfig, TrainerConfig
from qerld_learner.trainer.model import BaseModel
from torch import Tensor

from .conftest import make_groups
from .test_multi_turn import plain_logprobs

PPO = AlgorithmConfig(advantage="mean_only", aggregation="token_mean", old_policy="trainer", epochs=3)


def with_algorithm(config: TrainerConfig, algorithm: AlgorithmConfig) -> TrainerConfig:
    # A large epsilon: AdamW's first steps are signs otherwise, and a gradient near 0 may have either.
    optimizer = OptimizerConfig(lr=3e-2, eps=1e-2, max_grad_norm=0)
    return msgspec.structs.replace(config, algorithm=algorithm, optimizer=optimizer)


def fresh(config: TrainerConfig) -> tuple[BaseModel, dict[str, torch.nn.Parameter], AdapterState]:
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(master.shape, generator=generator) / 8 for name, master in masters.items()}
    first, second = ({name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(2))
    return model, masters, AdapterState(weights, first, second, updates=0, step=0)


def run_step(config: TrainerConfig, groups: list[Group], seed: int = 3) -> step.StepOutcome:
    model, masters, state = fresh(config)
    torch.manual_seed(seed)
    return step.train_step(model, masters, state, config, groups, 1, lambda *_: None)


def plain_steps(config: TrainerConfig, groups: list[Group], order: list[list[int]]) -> dict[str, Tensor]:
    """Weights after one AdamW step for each part of `order` (indices of groups), clipped to the first policy."""
    model, masters, state = fresh(config)
    step.load_weights(masters, state.weights)
    optimizer = torch.optim.AdamW(masters.values(), lr=3e-2, betas=(0.9, 0.999), eps=1e-2, weight_decay=0.0)

    def logprobs(group: Group) -> list[Tensor]:
        return [plain_logprobs(model, group.prompt_ids, r.completion_ids, 1.0) for r in group.rollouts]

    with torch.no_grad():
        old = [logprobs(group) for group in groups]
    for part in order:
        terms = []
        for index in part:
            rewards = np.array([r.reward for r in groups[index].rollouts])
            for new, before, reward in zip(logprobs(groups[index]), old[index], rewards, strict=True):
                ratio, advantage = torch.exp(new - before), float(reward - rewards.mean())
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        optimizer.step()
    return {name: master.detach().clone() for name, master in masters.items()}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far apart two outcomes are, in units of how far they are from the start."""
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    moved = sum(float((start[name] - expected[name]).square().sum()) for name in expected)
    return (apart / moved) ** 0.5


@pytest.mark.parametrize(("epochs", "mini_batches"), [(3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("budget", [10**6, 16])
def test_updates_are_those_of_a_plain_loop(config: TrainerConfig, epochs: int, mini_batches: int, budget: int) -> None:
    algorithm = msgspec.structs.replace(PPO, epochs=epochs, mini_batches=mini_batches)
    config = msgspec.structs.replace(with_algorithm(config, algorithm), token_budget=budget)
    groups = make_groups(4, groups=4)
    batch = make_batch(groups, algorithm, 96)
    torch.manual_seed(3)
    updates = plan_updates(batch, algorithm)
    order = [sorted({index // len(groups[0].rollouts) for index in update.members}) for update in updates]
    outcome = run_step(config, groups)
    expected = plain_steps(config, groups, order)
    assert outcome.metrics["updates"] == epochs * mini_batches == outcome.state.updates
    assert distance(outcome.state.weights, expected, fresh(config)[2].weights) < 1e-3
    assert outcome.metrics["clipped_share"] > 0  # the ratio leaves 1 after the first update


def test_one_update_is_the_first_of_several(config: TrainerConfig) -> None:
    """The ratio to the trainer's own log-probabilities, computed beforehand or not."""
    groups = make_groups(4)
    once = run_step(with_algorithm(config, msgspec.structs.replace(PPO, epochs=1)), groups)
    expected = plain_steps(with_algorithm(config, PPO), groups, [[0, 1, 2]])
    assert distance(once.state.weights, expected, fresh(config)[2].weights) < 1e-3
    assert once.metrics["clipped_share"] == once.metrics["update_kl"] == 0


def test_every_epoch_takes_every_group_once_and_whole() -> None:
    groups, algorithm = make_groups(1, groups=5), msgspec.structs.replace(PPO, epochs=4, mini_batches=3)
    batch = make_batch(groups, algorithm, 96)
    torch.manual_seed(7)
    updates = plan_updates(batch, algorithm)
    again = (torch.manual_seed(7), plan_updates(batch, algorithm))[1]
    assert [u.members for u in updates] == [u.members for u in again]
    epochs = [updates[i : i + 3] for i in range(0, 12, 3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*(u.members for u in epoch))) == list(range(20))
        for update in epoch:
            assert len(update.members) % 4 == 0
            tokens = sum(len(batch.behaviour[i]) for i in update.members)
            assert float(update.weights[update.members[0]]) == pytest.approx(1 / tokens)
            assert float(update.weights.count_nonzero()) == len(update.members)
    assert len({tuple(epoch[0].members) for epoch in epochs}) > 1


def test_more_parts_than_groups_are_as_many_as_groups(config: TrainerConfig) -> None:
    algorithm = msgspec.structs.replace(PPO, epochs=1, mini_batches=8)
    outcome = run_step(with_algorithm(config, algorithm), make_groups(4))
    assert outcome.metrics["updates"] == 3


def test_metrics_of_several_updates_are_those_before_the_first(config: TrainerConfig) -> None:
    groups = make_groups(4)
    once = run_step(with_algorithm(config, msgspec.structs.replace(PPO, epochs=1)), groups)
    many = run_step(with_algorithm(config, msgspec.structs.replace(PPO, epochs=3, mini_batches=3)), groups)
    for name in ("mismatch_kl_k3", "logprob_abs_diff", "ess", "ratio_mean"):
        assert many.metrics[name] == pytest.approx(once.metrics[name], rel=1e-4), name
    assert many.metrics["update_kl"] > 1e-4
    for one, other in zip(once.rollouts, many.rollouts, strict=True):
        assert other.mean_ratio == pytest.approx(one.mean_ratio, rel=1e-4)
        assert other.advantage == one.advantage


def test_loss_and_clipped_share_of_several_updates_are_means(config: TrainerConfig) -> None:
    """Without a learning rate to speak of each update is the first again."""
    algorithm = msgspec.structs.replace(PPO, epochs=1, old_policy="behaviour")
    config = msgspec.structs.replace(with_algorithm(config, algorithm), optimizer=OptimizerConfig(lr=1e-12))
    once = run_step(config, make_groups(4))
    many = run_step(
        msgspec.structs.replace(config, algorithm=msgspec.structs.replace(algorithm, epochs=3)), make_groups(4)
    )
    assert 0 < once.metrics["clipped_share"] < 1
    for name in ("loss", "clipped_share", "grad_norm"):
        assert many.metrics[name] == pytest.approx(once.metrics[name], rel=1e-5), name
    for one, other in zip(once.rollouts, many.rollouts, strict=True):
        assert other.clipped_share == pytest.approx(one.clipped_share)


def test_a_step_without_a_signal_is_computed_once(config: TrainerConfig) -> None:
    outcome = run_step(with_algorithm(config, PPO), make_groups(4, mixed=False))
    assert outcome.skipped_optimizer
    assert outcome.metrics["micro_batches"] == 1
    assert outcome.metrics["updates"] == 0


def test_truncated_rollouts_are_filtered_and_named(config: TrainerConfig) -> None:
    """Nothing of what they are trained on changes when such a rollout's tokens do; all of them filtered: no update."""
    algorithm = msgspec.structs.replace(PPO, epochs=1, overlong="filter")
    config = with_algorithm(config, algorithm)
    (group,) = make_groups(4, groups=1)
    cut = msgspec.structs.replace(group.rollouts[1], truncated=True)
    other = msgspec.structs.replace(cut, completion_ids=[t + 1 if t < 95 else 0 for t in cut.completion_ids])
    outcomes = [
        run_step(config, [msgspec.structs.replace(group, rollouts=[group.rollouts[0], rollout, *group.rollouts[2:]])])
        for rollout in (cut, other)
    ]
    for outcome in outcomes:
        assert [r.filtered for r in outcome.rollouts] == [False, True, False, False]
        assert outcome.metrics["filtered_share"] == 0.25
    start = fresh(config)[2].weights
    assert distance(outcomes[0].state.weights, outcomes[1].state.weights, start) < 1e-3
    kept = run_step(config, [group])
    assert distance(kept.state.weights, outcomes[0].state.weights, start) > 1e-2
    all_cut = [msgspec.structs.replace(rollout, truncated=True) for rollout in group.rollouts]
    assert run_step(config, [msgspec.structs.replace(group, rollouts=all_cut)]).skipped_optimizer


def test_rewards_by_token_reach_the_gradient(config: TrainerConfig) -> None:
    """All credit on first tokens against all of it on last ones: two directions from equal sums."""
    (group,) = make_groups(6, groups=1, rollouts=2)
    config = with_algorithm(config, msgspec.structs.replace(PPO, epochs=1))

    def at(position: int) -> Group:
        rollouts = []
        for index, rollout in enumerate(group.rollouts):
            ids = [3, 4, 5 + index, 6]
            steps = [(end + 1, float(end == position and index == 0)) for end in range(4)]
            changed = {"completion_ids": ids, "logprobs": [-4.0] * 4, "steps": steps, "reward": float(index == 0)}
            rollouts.append(msgspec.structs.replace(rollout, **changed))
        return msgspec.structs.replace(group, rollouts=rollouts)

    early, late = run_step(config, [at(0)]), run_step(config, [at(3)])
    assert early.metrics["mixed_groups"] == late.metrics["mixed_groups"] == 1
    # r̃ of the rewarded step is 7/8, of the others −1/8: the mean over tokens of the sums to come.
    assert early.rollouts[0].advantage == pytest.approx(np.mean([7 / 8 - 3 / 8, -3 / 8, -2 / 8, -1 / 8]))
    assert late.rollouts[0].advantage == pytest.approx(np.mean([4 / 8, 5 / 8, 6 / 8, 7 / 8]))
    assert distance(early.state.weights, late.state.weights, fresh(config)[2].weights) > 0.5


@pytest.mark.parametrize(("where", "estimator"), [("loss", "k2"), ("loss", "k3"), ("reward", "k1")])
def test_a_kl_penalty_brings_the_policy_back_to_its_base(config: TrainerConfig, where: str, estimator: str) -> None:
    """Sampled on-policy and without any reward, the penalty is the only signal."""
    algorithm = msgspec.structs.replace(PPO, epochs=1, kl_coef=1.0, kl_in=where, kl_estimator=estimator)
    config = msgspec.structs.replace(with_algorithm(config, algorithm), optimizer=OptimizerConfig(lr=2e-2))
    model, masters, state = fresh(config)
    found = []
    for number in range(1, 16):
        step.load_weights(masters, state.weights)
        draws = torch.Generator().manual_seed(number)
        tokens = torch.multinomial(_next(model).exp(), 64, replacement=True, generator=draws)
        (group,) = make_groups(0, groups=1, rollouts=64, mixed=False)
        chosen = _next(model)[tokens].tolist()
        rollouts = [
            msgspec.structs.replace(r, completion_ids=[t], logprobs=[p])
            for r, t, p in zip(group.rollouts, tokens.tolist(), chosen, strict=True)
        ]
        groups = [msgspec.structs.replace(group, prompt_ids=[5, 6, 7], rollouts=rollouts)]
        outcome = step.train_step(model, masters, state, config, groups, number, lambda *_: None)
        state = outcome.state
        found.append(_exact_kl(model, masters, state))
    assert found[-1] < 0.5 * found[0], found


def _next(model: BaseModel) -> Tensor:
    with torch.no_grad():
        logits = model.causal(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)


def _exact_kl(model: BaseModel, masters: dict[str, torch.nn.Parameter], state: AdapterState) -> float:
    step.load_weights(masters, state.weights)
    policy = _next(model)
    with lora.bypassed(model.causal):
        base = _next(model)
    return float((policy.exp() * (policy - base)).sum())
