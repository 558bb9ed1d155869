"""Packed forward and plain forward are one on every family: log-probabilities, and the gradients of LoRA.

The reference is transformers' own model with dequantised weights and PEFT's own LoRA layers, one sequence at a time
with all logits, in fp32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from qerld_kernels.quantizer import quantize_checkpoint
from qerld_learner.trainer import lora
from qerld_learner.trainer.checkpoint import PEFT_PREFIX
from qerld_learner.trainer.messages import LoraShape, TrainerConfig
from qerld_learner.trainer.model import BaseModel
from qerld_learner.trainer.packing import TokenSequence, pack
from qerld_learner.trainer.step import load_weights
from support.tiny import make_tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from .conftest import VOCAB, make_groups
from .test_model import plain_model

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.15,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention"] * 2},
}
SHAPES = {
    "alpha / r": LoraShape(rank=4, alpha=6.0),
    "alpha / sqrt r": LoraShape(rank=4, alpha=3.0, rslora=True),
    "attention only": LoraShape(rank=2, alpha=2.0, target_modules=("q_proj", "v_proj")),
}


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An NVFP4 folder of the family, norms and biases away from their first values."""
    folder = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **{**SIZES, **FAMILIES[request.param]})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(folder / "plain")
    make_tokenizer().save_pretrained(folder / "plain")
    quantize_checkpoint(folder / "plain", folder / "nvfp4")
    return folder / "nvfp4"


def sequences() -> list[TokenSequence]:
    """Ragged groups with shared prefixes, and one rollout whose middle the environment made."""
    found = [TokenSequence(g.prompt_ids, r.completion_ids) for g in make_groups(3) for r in g.rollouts]
    return [*found, TokenSequence([9, 8, 7], list(range(20, 29)), [t < 3 or t > 5 for t in range(9)])]


def reference(base: Path, shape: LoraShape, weights: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """PEFT's own model, and its LoRA parameters by the trainer's names."""
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        use_rslora=shape.rslora,
        target_modules=list(shape.target_modules),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(plain_model(base), config)  # type: ignore[arg-type]
    named = {
        name.replace(".default.", ".").removeprefix(PEFT_PREFIX): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert set(named) == set(weights)
    for name, parameter in named.items():
        parameter.data = weights[name].clone()
    return model, named


def plain_loss(model: nn.Module, found: list[TokenSequence], factors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Each sequence's log-probabilities at its scored tokens, alone; and their weighted sum."""
    logprobs = []
    for sequence in found:
        ids = torch.tensor([*sequence.prompt_ids, *sequence.completion_ids])
        rows = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), dim=-1)
        at = torch.tensor([len(sequence.prompt_ids) + position for position in sequence.scored])
        logprobs.append(rows[at - 1, ids[at]])
    return logprobs, torch.stack([(one * f).sum() for one, f in zip(logprobs, factors, strict=True)]).sum()


@pytest.mark.parametrize("budget", [10**6, 24])
@pytest.mark.parametrize("name", SHAPES)
def test_packed_is_plain(base: Path, name: str, budget: int) -> None:
    shape, found = SHAPES[name], sequences()
    model = BaseModel(TrainerConfig(base=str(base)))
    masters = lora.attach(model.causal, shape)
    generator = torch.Generator().manual_seed(4)
    weights = {  # exact in bf16, as published: rounding plays no part
        key: (torch.randn(master.shape, generator=generator) / 6).bfloat16().float() for key, master in masters.items()
    }
    load_weights(masters, weights)
    factors = [torch.randn(len(one.scored), generator=generator) / 20 for one in found]
    plain, named = reference(base, shape, weights)
    expected, loss = plain_loss(plain, found, factors)
    loss.backward()

    trees = pack(found, budget)
    assert len(trees) == 1 if budget > 1000 else len(trees) > 2
    for tree in trees:
        pairs = model.pair_logprobs(tree, 1.0)[0]
        for member, span in zip(tree.members, tree.spans, strict=True):
            torch.testing.assert_close(pairs[span], expected[member].detach(), rtol=1e-5, atol=1e-5)
        terms = [(pairs[span] * factors[member]).sum() for member, span in zip(tree.members, tree.spans, strict=True)]
        torch.stack(terms).sum().backward()

    assert max(float(parameter.grad.abs().max()) for parameter in named.values()) > 0.05
    for key, parameter in named.items():
        torch.testing.assert_close(masters[key].grad, parameter.grad, rtol=1e-5, atol=1e-5)
