"""Against TRL's trainers, an implementation that shares nothing with ours: the same numbers, every loss type it has.

TRL's own `_compute_loss` runs; only the model's log-probabilities and entropies are fed to it. What differs is said at
the place. Its loss types `sapo` (arXiv 2511.20347) and `vespo` have no counterpart here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from qerld_learner.trainer.advantages import advantages_of
from qerld_learner.trainer.messages import AlgorithmConfig
from qerld_learner.trainer.objectives import policy_loss
from support.tiny import make_tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .numbers import padded, preset, token_batch
from .papers import Array, Problem, problem

# It says that it was not tested with the vLLM at hand, which nothing here uses.
pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM:UserWarning")

LONGEST = 9
ROWS, GROUP = 20, 5


def fed(base: type[Any]) -> type[Any]:
    """A TRL trainer whose model's log-probabilities and entropies are given."""

    class Fed(base):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return self.given[0], self.given[1], None

    return Fed


def trl_trainer(folder: Path, algorithm: str = "grpo", **settings: Any) -> Any:

    name = {"grpo": "GRPO", "rloo": "RLOO"}[algorithm]
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "num_generations": GROUP,
        "max_completion_length": LONGEST,
        "gradient_accumulation_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        **settings,
    }
    tiny = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=96)
    base = getattr(trl, f"{name}Trainer")
    trainer = fed(base)(
        model=LlamaForCausalLM(tiny),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=getattr(trl, f"{name}Config")(**arguments),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * ROWS}),
        processing_class=make_tokenizer(),
        # The reference is then the adapter off, as ours, and no second model.
        peft_config=LoraConfig(r=1, target_modules=["q_proj"]),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # set by its training loop
    return trainer


def trl_inputs(x: Problem, advantages: Array, mask: Array) -> dict[str, Tensor]:
    ids = torch.ones(len(mask), LONGEST, dtype=torch.int64)
    return {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": torch.tensor(mask),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": torch.tensor(x.old),
        "ref_per_token_logps": torch.tensor(x.ref),
        "num_items_in_batch": torch.tensor(mask.sum()),
    }


def trl_loss(trainer: Any, x: Problem, inputs: dict[str, Tensor]) -> tuple[float, Array]:
    logprobs = torch.tensor(x.pi, requires_grad=True)
    trainer.given = (logprobs, torch.tensor(-x.pi / 3))
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.numpy() * inputs["completion_mask"].numpy()


def our_loss(config: AlgorithmConfig, x: Problem) -> tuple[float, Array, Array]:
    """Loss, gradient [R, L], and the advantages [R] that both sides use."""
    batch = token_batch(config, x)
    loss, _ = policy_loss(config, batch)
    loss.backward()
    assert batch.logprobs.grad is not None
    return float(loss.detach()), padded(x, batch.logprobs.grad), padded(x, batch.advantages)[:, 0]


# TRL's settings by loss type, with the same thing of ours. TRL's clips are PPO's where a type has any.
SAME: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    # By default it weighs the KL with the ratio (DeepSeek-V3.2); arXiv 2402.03300, eq. 3, has no such weight.
    "grpo": ({"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}, "grpo", {}),
    "grpo two-sided": (
        {"loss_type": "grpo", "delta": 3.0},
        "grpo",
        {"kl_coef": 0.0, "clip": "dual", "dual_clip": 3.0},  # its delta is the dual clip, by another way
    ),
    # Its mean is of a micro-batch, and means of those are averaged; in one micro-batch that is a mean over tokens.
    "bnpo": ({"loss_type": "bnpo", "epsilon_high": 0.28}, "dapo", {"overlong": "keep"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, "dapo", {"overlong": "keep"}),
    "dapo filter": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True},
        "dapo",
        {"overlong": "filter"},
    ),
    "grpo filter": (
        {"loss_type": "grpo", "mask_truncated_completions": True},
        "grpo",
        {"overlong": "filter", "kl_coef": 0.0},
    ),
    # Its bonus is a mean over tokens whatever the loss type; ours is aggregated as the loss is. Here both are a mean.
    "dapo entropy": (
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1},
        "dapo",
        {"overlong": "keep", "entropy_coef": 0.1},
    ),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "dr_grpo", {}),
    # Its epsilon_high is the bound itself (arXiv 2510.13786), ours is what the bound is above 1 (arXiv 2506.13585).
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "gspo",
        {},
    ),
    # Sequence ratios, weighed with lengths: a sum over tokens.
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "gspo",
        {"aggregation": "constant", "loss_divisor": 1.0},
    ),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", SAME)
def test_a_loss_is_trls(case: str, seed: int, tmp_path: Path) -> None:
    settings, name, changes = SAME[case]
    x = problem(seed)
    loss, gradient, advantages = our_loss(preset(name, LONGEST, **changes), x)
    mask = x.mask * (~x.truncated[:, None] if "filter" in case else 1)
    found, expected = trl_loss(trl_trainer(tmp_path, **settings), x, trl_inputs(x, advantages, mask))
    assert loss == pytest.approx(found, rel=1e-6, abs=1e-6)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-6)


def test_every_loss_type_of_trl_is_compared_or_named() -> None:
    """The types are in its help text: a new one shows up here."""

    text = trl.GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    known = {settings["loss_type"] for settings, _, _ in SAME.values()} | {"sapo", "vespo"}
    listed = text.split("Supported values are")[-1] if "Supported values are" in text else text
    quoted = {word.strip("'\",.:") for word in listed.replace(",", " ").split() if word.startswith(("'", '"'))}
    assert {word for word in quoted if word.isidentifier()} == known


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_corrected_loss_is_trls(correction: str, tmp_path: Path) -> None:
    """Its four modes with vLLM, which it computes where it samples: min(exp(Δ), cap), or 0 outside the bounds."""
    x = problem(3)
    changes = {"overlong": "keep", "correction": correction, "tis_cap": 1.3, "mask_low": 0.7, "mask_high": 1.3}
    loss, gradient, advantages = our_loss(preset("dapo", LONGEST, **changes), x)
    difference = (x.old - x.mu) * x.mask
    if correction.startswith("sequence"):
        difference = difference.sum(1, keepdims=True)
    ratio = np.exp(difference)
    ratio = np.minimum(ratio, 1.3) if correction.endswith("truncate") else ratio * ((ratio >= 0.7) & (ratio <= 1.3))
    trainer = trl_trainer(tmp_path, loss_type="dapo", epsilon_high=0.28)
    trainer.use_vllm = True
    inputs = trl_inputs(x, advantages, x.mask) | {"importance_sampling_ratio": torch.tensor(ratio)}
    found, expected = trl_loss(trainer, x, inputs)
    assert loss == pytest.approx(found, rel=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-6)


def test_on_policy_rloo_has_trls_gradient(tmp_path: Path) -> None:
    """Its ratio is that of the whole completion, ours each token's: at a ratio of 1 the gradients are the same.

    The losses then differ by constants (−A against −A·tokens); the paper has neither, being REINFORCE.
    """
    x = problem(4)
    x = replace(x, old=x.pi.copy())
    _, gradient, advantages = our_loss(preset("rloo", LONGEST, kl_coef=0.0), x)
    inputs = trl_inputs(x, advantages, x.mask) | {"old_logps": torch.tensor((x.old * x.mask).sum(1))}
    _, expected = trl_loss(trl_trainer(tmp_path, "rloo", beta=0.0), x, inputs)
    np.testing.assert_allclose(gradient, expected, rtol=2e-6, atol=1e-9)


def test_advantages_are_trls_but_for_the_floor_of_the_standard_deviation() -> None:
    """TRL: (r − mean) / (std + 1e-4), and r − mean without scaling; ours has 1e-6, so that small rewards count."""
    rewards = np.array([0.2, 0.9, 0.4, 0.4, 1.0])
    table = torch.tensor(rewards)
    scaled = (table - table.mean()) / (table.std() + 1e-4)
    np.testing.assert_allclose(advantages_of("group_norm", rewards.tolist()), scaled.numpy(), rtol=5e-4)
    np.testing.assert_allclose(advantages_of("mean_only", rewards.tolist()), (table - table.mean()).numpy())
