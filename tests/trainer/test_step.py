"""The training step: exactness of packing and accumulation, skipped updates, refused batches, isolation of runs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from qerld_learner.trainer import lora, step
from qerld_learner.trainer.algorithm import NAMES
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
from qerld_learner.trainer.packing import TokenSequence, build_tree, pack
from qerld_learner.trainer.worker import Worker
from torch import Tensor

from .conftest import make_groups


def ignore(_event: Event) -> None:
    """Progress is of no interest here."""


def digest(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.safetensors")
    }


def train(worker: Worker, config: TrainerConfig, folder: Path, number: int, groups: list[Group]) -> StepResult:
    parent, out = str(folder / f"v{number - 1}"), str(folder / f"v{number}")
    reply = worker.handle(TrainStep("run", config, number, parent, out, 100 + number, groups))
    assert isinstance(reply, StepResult)
    return reply


def new_run(worker: Worker, config: TrainerConfig, folder: Path) -> None:
    worker.handle(InitVersion("run", config, str(folder / "v0")))


def gradients(config: TrainerConfig, groups: list[Group], trees_of: str, *, weight: float = 1.0) -> dict[str, Tensor]:
    """Gradient of the whole step's loss, by the real model with a random adapter, for one way of packing.

    `weight` multiplies the weight of every token, as a larger batch would.
    """
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    torch.manual_seed(5)
    step.load_weights(masters, {name: torch.randn(master.shape) / 8 for name, master in masters.items()})
    work = step.begin(model, config, groups, lambda *_: None)
    (update,) = plan_updates(work.batch, config.algorithm)
    update = replace(update, weights=update.weights * weight)
    budget = {"tree": 10**6, "micro": 20}.get(trees_of, 1)
    trees = pack(work.batch.sequences, budget, share=trees_of != "plain")
    assert len(trees) == {"tree": 1, "plain": len(work.batch.sequences)}.get(trees_of, len(trees))
    for tree in trees:
        step.micro_batch(work, update, tree, learn=True)
    step.unscale(masters, step.loss_scale(model.dtype, update))
    return {name: master.grad.clone() for name, master in masters.items() if master.grad is not None}


WIDE = {"clip_low": 0.9, "clip_high": 9.0}
ALGORITHMS = {
    "sequence_mean": AlgorithmConfig(kl_coef=0.1, **WIDE),
    "token_mean": AlgorithmConfig(aggregation="token_mean", kl_coef=0.1, **WIDE),
    "constant": AlgorithmConfig(aggregation="constant", loss_divisor=5.0, kl_coef=0.1, kl_estimator="k2", **WIDE),
    "sequence_ratio": AlgorithmConfig(ratio="sequence", **WIDE),
    "entropy": AlgorithmConfig(aggregation="token_mean", entropy_coef=0.3, **WIDE),
    "kl_in_reward": AlgorithmConfig(advantage="batch_norm", kl_coef=0.1, kl_in="reward", kl_estimator="k1", **WIDE),
    **{
        name: AlgorithmConfig(old_policy="trainer", correction=name, mask_low=0.01, mask_high=9.0, tis_cap=1.5)
        for name in NAMES["correction"]
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("packing", ["plain", "micro"])
def test_gradients_do_not_depend_on_the_packing(config: TrainerConfig, packing: str, name: str) -> None:
    """Accumulated over micro-batches of any make-up they are the whole batch's: token counts, rollouts, sums within."""
    config = msgspec.structs.replace(config, algorithm=ALGORITHMS[name])
    tree, other = (gradients(config, make_groups(2), name) for name in ("tree", packing))
    assert max(float(g.abs().max()) for g in tree.values()) > 1e-3
    for name, gradient in tree.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)


def test_in_half_precision_the_gradient_of_a_large_batch_is_not_lost(config: TrainerConfig) -> None:
    share = 2.0**-24  # 16 million times as many tokens: in fp16 nothing of an unscaled gradient would be left
    exact = gradients(config, make_groups(2), "tree")
    half = gradients(msgspec.structs.replace(config, dtype="float16"), make_groups(2), "tree", weight=share)
    for name, gradient in exact.items():
        error = (half[name] / share - gradient).norm() / gradient.norm()
        assert error < 0.02, (name, error)


def test_identical_rollouts_share_their_nodes_and_keep_their_own_weight(config: TrainerConfig) -> None:
    groups = make_groups(4, groups=1)
    twin = groups[0].rollouts[0]
    rollouts = [*groups[0].rollouts, msgspec.structs.replace(twin, rollout_id="twin", reward=1.0)]
    groups = [msgspec.structs.replace(groups[0], rollouts=rollouts)]
    tree, plain = (gradients(config, groups, name) for name in ("tree", "plain"))
    for name, gradient in tree.items():
        torch.testing.assert_close(plain[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_step_moves_probability_towards_the_rewarded_rollouts(config: TrainerConfig, tmp_path: Path) -> None:
    worker, group = Worker(ignore), make_groups(1, groups=1)[0]
    new_run(worker, config, tmp_path)
    sequences = [Sequence(group.prompt_ids, r.completion_ids) for r in group.rollouts]

    def scores(version: int) -> np.ndarray:
        reply = worker.handle(Score("run", config, str(tmp_path / f"v{version}"), sequences))
        assert isinstance(reply, Scores)
        return np.array([sum(one) for one in reply.logprobs])

    behaviour = worker.handle(Score("run", config, str(tmp_path / "v0"), sequences))
    assert isinstance(behaviour, Scores)
    rollouts = [
        msgspec.structs.replace(r, logprobs=logprobs)
        for r, logprobs in zip(group.rollouts, behaviour.logprobs, strict=True)
    ]
    result = train(worker, config, tmp_path, 1, [msgspec.structs.replace(group, rollouts=rollouts)])
    assert result.metrics["mismatch_kl_k3"] == pytest.approx(0, abs=1e-6)
    assert result.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    moved = scores(1) - scores(0)
    rewarded = np.array([r.reward for r in group.rollouts]) > 0
    assert moved[rewarded].mean() > 0 > moved[~rewarded].mean()


def test_no_mixed_group_skips_the_optimiser_and_says_so(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(ignore)
    new_run(worker, config, tmp_path)
    result = train(worker, config, tmp_path, 1, make_groups(mixed=False))
    assert result.skipped_optimizer
    assert result.metrics["mixed_groups"] == 0
    assert result.metrics["zero_variance_share"] == 1
    assert result.metrics["entropy"] > 0
    assert all(np.isfinite(value) for value in result.metrics.values())
    assert digest(tmp_path / "v1") == digest(tmp_path / "v0")


def test_a_kl_term_learns_even_without_a_mixed_group(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(ignore)
    new_run(worker, config, tmp_path)
    train(worker, config, tmp_path, 1, make_groups())
    kl = msgspec.structs.replace(config, algorithm=AlgorithmConfig(kl_coef=0.5))
    result = train(worker, kl, tmp_path, 2, make_groups(mixed=False))
    assert not result.skipped_optimizer
    assert result.metrics["base_kl"] > 0


def test_single_rollout_groups_train_nothing_and_give_no_nan(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(ignore)
    new_run(worker, config, tmp_path)
    result = train(worker, config, tmp_path, 1, make_groups(rollouts=1))
    assert result.skipped_optimizer
    assert [r.advantage for r in result.rollouts] == [0.0] * 3
    assert all(np.isfinite(value) for value in result.metrics.values())


def test_results_name_every_rollout_in_order(config: TrainerConfig, tmp_path: Path) -> None:
    worker, groups = Worker(ignore), make_groups(6)
    new_run(worker, config, tmp_path)
    result = train(worker, msgspec.structs.replace(config, token_budget=16), tmp_path, 1, groups)
    assert [r.rollout_id for r in result.rollouts] == [r.rollout_id for g in groups for r in g.rollouts]
    assert result.metrics["micro_batches"] > 1
    assert set(result.phase_seconds) >= {"load", "pack", "forward", "backward", "optimizer", "commit"}
    reply = worker.handle(
        Score(
            "run",
            config,
            str(tmp_path / "v0"),
            [Sequence(g.prompt_ids, r.completion_ids) for g in groups for r in g.rollouts],
        )
    )
    assert isinstance(reply, Scores)
    for found, logprobs, rollout in zip(
        result.rollouts, reply.logprobs, [r for g in groups for r in g.rollouts], strict=True
    ):
        expected = np.exp(np.array(logprobs) - np.array(rollout.logprobs)).mean()
        assert found.mean_ratio == pytest.approx(expected, rel=1e-4)


def test_resumed_training_continues_bit_for_bit(config: TrainerConfig, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    worker = Worker(ignore)
    new_run(worker, config, straight)
    for number in (1, 2, 3):
        train(worker, config, straight, number, make_groups(number))
    new_run(Worker(ignore), config, broken)
    for number in (1, 2, 3):
        train(Worker(ignore), config, broken, number, make_groups(number))
    assert digest(straight / "v3") == digest(broken / "v3")


def test_training_one_run_leaves_another_bit_equal(config: TrainerConfig, tmp_path: Path) -> None:
    worker, other = Worker(ignore), msgspec.structs.replace(config, lora=msgspec.structs.replace(config.lora, rank=2))
    alone, first, second = (tmp_path / name for name in ("alone", "first", "second"))
    new_run(worker, config, alone)
    for number in (1, 2):
        train(worker, config, alone, number, make_groups(number))
    new_run(worker, config, first)
    new_run(worker, other, second)
    for number in (1, 2):
        train(worker, config, first, number, make_groups(number))
        before = digest(first / f"v{number}")
        train(worker, other, second, number, make_groups(number + 10))
        assert digest(first / f"v{number}") == before
    assert digest(first / "v2") == digest(alone / "v2")


def test_a_refused_shape_leaves_the_adapter_in_memory_usable(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(ignore)
    new_run(worker, config, tmp_path)
    for layer in ("no_such_layer", "nor_this_one"):
        shape = msgspec.structs.replace(config.lora, target_modules=(layer,))
        with pytest.raises(lora.LoraError, match=layer):
            new_run(worker, msgspec.structs.replace(config, lora=shape), tmp_path / "refused")
    train(worker, config, tmp_path, 1, make_groups())


@pytest.mark.parametrize("budget", [1, 16, 40])
def test_a_step_in_micro_batches_is_the_step_in_one(config: TrainerConfig, tmp_path: Path, budget: int) -> None:
    """Metrics, token counts among them, results and gradients do not depend on the token budget."""
    found = []
    for tokens in (10**6, budget):
        worker, folder = Worker(ignore), tmp_path / str(tokens)
        algorithm = AlgorithmConfig(aggregation="token_mean", kl_coef=0.1, entropy_coef=0.01)
        changed = msgspec.structs.replace(config, token_budget=tokens, algorithm=algorithm)
        new_run(worker, changed, folder)
        found.append(train(worker, changed, folder, 1, make_groups(2)))
    whole, parts = found
    packing = {"micro_batches", "tokens_computed", "tokens_plain", "peak_rss_bytes"}
    assert parts.metrics["micro_batches"] > whole.metrics["micro_batches"] == 1
    for name in set(whole.metrics) - packing:
        assert parts.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-5, abs=1e-6), name
    assert whole.metrics["completion_tokens"] == sum(len(r.completion_ids) for g in make_groups(2) for r in g.rollouts)
    for one, other in zip(parts.rollouts, whole.rollouts, strict=True):
        assert (one.rollout_id, one.advantage) == (other.rollout_id, other.advantage)
        assert one.mean_ratio == pytest.approx(other.mean_ratio, rel=1e-5)


def test_eos_and_pad_are_tokens_like_any_other(config: TrainerConfig) -> None:
    """The end token that the policy sampled is trained wherever it stands, and nothing behind a truncated end is.

    Nothing is padded: an id that a tokenizer also pads with (here 2, the end token) is never masked away.
    """
    eos, prompt = 2, [1, 2, 2, 5]
    completions = [[7, 8, eos], [eos], [7, eos, eos], [7, 8, 9, 10]]  # the last was cut off: it has no end
    rollouts = [
        Rollout(f"r{i}", ids, [-4.0] * len(ids), float(i % 2), 0, truncated=i == 3) for i, ids in enumerate(completions)
    ]
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    step.load_weights(masters, lora.first_weights(masters, 0))
    work = step.begin(model, config, [Group("g", prompt, rollouts)], lambda *_: None)
    (update,) = plan_updates(work.batch, config.algorithm)
    for tree in pack(work.batch.sequences, 10**6):
        step.micro_batch(work, update, tree, learn=False)
    assert [len(work.told.logprobs[i]) for i in range(4)] == [3, 1, 3, 4]
    for index, ids in enumerate(completions):
        whole = torch.tensor([[*prompt, *ids]])
        rows = torch.log_softmax(model.causal(input_ids=whole).logits[0], dim=-1)[len(prompt) - 1 : -1]
        expected = rows[torch.arange(len(ids)), torch.tensor(ids)].detach()
        torch.testing.assert_close(work.told.logprobs[index], expected, rtol=1e-5, atol=1e-5)
    assert update.weights.tolist() == pytest.approx([1 / 12, 1 / 4, 1 / 12, 1 / 16])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completion_ids": []}, "g0, rollout g0r0: .*must not be empty"),
        ({"logprobs": [-1.0] * 20}, "g0r0: logprobs must hold one number a completion token"),
        ({"completion_ids": [96], "logprobs": [-1.0]}, r"token ids must be in \[0, 96\), got 96"),
        ({"completion_ids": [1], "logprobs": [float("nan")]}, "logprobs must be finite"),
        ({"reward": float("nan")}, "reward 0 of the group must be finite"),
        ({"trainable": [True] * 20}, "g0r0: trainable must hold one entry a completion token"),
        ({"completion_ids": [1], "logprobs": [-1.0], "trainable": [False]}, "trainable must mark at least one token"),
    ],
)
def test_bad_rollouts_are_refused_and_nothing_is_written(
    config: TrainerConfig, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    worker, groups = Worker(ignore), make_groups()
    new_run(worker, config, tmp_path)
    rollouts = [msgspec.structs.replace(groups[0].rollouts[0], **change), *groups[0].rollouts[1:]]
    with pytest.raises(ValueError, match=message):
        train(worker, config, tmp_path, 1, [msgspec.structs.replace(groups[0], rollouts=rollouts)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v0"]
    train(worker, config, tmp_path, 1, groups)


def test_a_gradient_that_is_not_finite_is_not_applied(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(ignore)
    new_run(worker, config, tmp_path)
    group = make_groups(groups=1)[0]
    huge = [msgspec.structs.replace(r, reward=r.reward * 1e38) for r in group.rollouts]
    algorithm = AlgorithmConfig(advantage="mean_only", aggregation="token_mean", clip_low=1.0, clip_high=1e9)
    extreme = msgspec.structs.replace(config, algorithm=algorithm)
    far = [msgspec.structs.replace(r, logprobs=[-30.0] * len(r.logprobs)) for r in huge]
    result = train(worker, extreme, tmp_path, 1, [msgspec.structs.replace(group, rollouts=far)])
    assert result.skipped_optimizer
    assert result.metrics["nonfinite_grad"] == 1
    assert digest(tmp_path / "v1") == digest(tmp_path / "v0")


def test_tree_positions_do_not_leak_between_rollouts(config: TrainerConfig) -> None:
    """Changing one rollout's tokens leaves the log-probabilities of its siblings alone."""
    model = BaseModel(config)
    prompt = [1, 2, 3]
    sibling, left, right = (
        TokenSequence(prompt, [4, 5, 6]),
        TokenSequence(prompt, [7, 8, 9]),
        TokenSequence(prompt, [7, 1, 1]),
    )

    def sibling_logprobs(other: TokenSequence) -> list[float]:
        tree = build_tree([sibling, other])
        pairs = model.pair_logprobs(tree, 1.0)[0]
        return pairs[tree.spans[tree.members.index(0)]].tolist()

    assert sibling_logprobs(left) == pytest.approx(sibling_logprobs(right), abs=1e-6)
