"""A tiny Llama folder with random weights, in one or several shards, written by the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, FFN, LAYERS, KV, VOCAB = 64, 96, 2, 32, 50
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}

MakeModel = Callable[..., Path]


def random_tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    for layer in range(LAYERS):
        for position, (name, shape) in enumerate(SHAPES.items()):
            # Magnitudes that differ within a fused group, so that a scale of one's own would show.
            weight = torch.randn(shape, generator=generator) * 0.02 * (1 + position)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write_model(
    folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        # Round robin: the members of a fused group lie in different files.
        part = dict(list(tensors.items())[shard::shards])
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
