"""A tiny random Llama with a real tokenizer, its NVFP4 form, and adapters for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from qerld_kernels.quantizer import quantize_checkpoint
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512
LAYERS = 2
SHAPES = {  # (out, in) of the linear layers of a decoder layer
    "self_attn.q_proj": (128, 64),
    "self_attn.k_proj": (64, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    "What is three plus four? The answer is seven.",
    "A train leaves at nine and arrives at eleven; the journey takes two hours.",
    "user assistant system question answer number add subtract multiply divide equals",
] * 4


def make_tiny_model(folder: Path) -> tuple[Path, Path]:
    """(Hugging Face folder in bf16, NVFP4 folder) under `folder`; the same bytes each time."""
    hf, nvfp4 = folder / "tiny-bf16", folder / "tiny-nvfp4"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM has attention for on the CPU
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.15,  # at 0.02 the logits are almost flat and mistakes hide
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data = 1.0 + 0.2 * torch.randn_like(weight)
    model.to(torch.bfloat16).save_pretrained(hf)
    make_tokenizer().save_pretrained(hf)
    quantize_checkpoint(hf, nvfp4)
    return hf, nvfp4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 512 tokens with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )


def tiny_shapes() -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer of the tiny model."""
    return {f"model.layers.{layer}.{module}": shape for layer in range(LAYERS) for module, shape in SHAPES.items()}


def make_adapter(
    folder: Path, seed: int, scale: float, rank: int = 8, shapes: Mapping[str, tuple[int, int]] | None = None
) -> Path:
    """A PEFT folder at `folder`, on all linear layers; `scale` is the size of B (0: an adapter without effect)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out, features) in (shapes or tiny_shapes()).items():
        a, b = torch.randn(rank, features, generator=generator), torch.randn(out, rank, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = (a / features**0.5).to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = (b * scale).to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in SHAPES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
