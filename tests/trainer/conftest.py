"""A tiny NVFP4 Llama with random weights, and configurations and batches that fit it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from qerld_kernels.quantizer import quantize_checkpoint
from qerld_learner.trainer.messages import Group, LoraShape, OptimizerConfig, Rollout, TrainerConfig
from support.tiny import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

os.environ.setdefault("OMP_NUM_THREADS", "1")
VOCAB = 96


def write_tiny_llama(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "plain")
    make_tokenizer().save_pretrained(folder / "plain")  # `quantize_checkpoint` asks for one; nothing here uses it
    quantize_checkpoint(folder / "plain", folder / "nvfp4")
    return folder / "nvfp4"


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def config(tiny_base: Path) -> TrainerConfig:
    return TrainerConfig(
        base=str(tiny_base),
        lora=LoraShape(rank=4, alpha=8.0, seed=1),
        optimizer=OptimizerConfig(lr=1e-2),
    )


def make_groups(seed: int = 0, *, groups: int = 3, rollouts: int = 4, mixed: bool = True) -> list[Group]:
    """Ragged groups behind one shared prefix; rewards alternate when `mixed`."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    shared, made = ids(6, 6), []
    for g in range(groups):
        prompt = shared + ids(1, 5)
        completions = [ids(1, 7) for _ in range(rollouts)]
        made.append(
            Group(
                f"g{g}",
                prompt,
                [
                    Rollout(
                        f"g{g}r{i}",
                        c,
                        (-4 - torch.rand(len(c), generator=generator)).tolist(),
                        float(mixed and i % 2),
                        0,
                    )
                    for i, c in enumerate(completions)
                ],
            )
        )
    return made
