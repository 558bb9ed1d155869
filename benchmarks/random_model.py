"""A checkpoint of random weights with the shapes of Qwen2.5, for speed and memory: bf16 or NVFP4.

    python benchmarks/random_model.py --shapes 7B --format nvfp4 --tokenizer FOLDER --out FOLDER

Real bytes and not vLLM's dummy ones: products of zeros draw less power and run faster. One shard a layer. FOLDER of the
tokenizer: any model's, its ids must fit (SmolLM2's do).
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from qerld_kernels.nvfp4 import global_scale_for
from qerld_kernels.quantize import quantize
from qerld_kernels.quantizer import quantization_config
from safetensors.torch import save_file
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# hidden, ffn, layers, heads, key/value heads, vocabulary
SHAPES = {
    "tiny": (128, 256, 2, 4, 2, 49152),
    "3B": (2048, 11008, 36, 16, 2, 151936),
    "7B": (3584, 18944, 28, 28, 4, 152064),
    "14B": (5120, 13824, 48, 40, 8, 152064),
    "32B": (5120, 27648, 64, 40, 8, 152064),
}
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def config_of(shapes: str, nvfp4: bool) -> dict[str, Any]:
    """config.json."""
    hidden, ffn, layers, heads, key_value, vocabulary = SHAPES[shapes]
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return config | ({"quantization_config": quantization_config()} if nvfp4 else {})


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) by the last part of the name."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "q_proj": (hidden, hidden),
        "k_proj": (narrow, hidden),
        "v_proj": (narrow, hidden),
        "o_proj": (hidden, hidden),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }


def layer_tensors(config: dict[str, Any], number: int, nvfp4: bool) -> dict[str, Tensor]:
    """One decoder layer; weights so small that activations stay near 1."""
    shapes, prefix = linear_shapes(config), f"model.layers.{number}"
    found = {
        f"{prefix}.{norm}.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for fused in FUSED:
        weights = {name: torch.randn(*shapes[name], device=DEVICE) / shapes[name][1] ** 0.5 for name in fused}
        g = global_scale_for(list(weights.values()))
        for name, weight in weights.items():
            part = f"{prefix}.{'mlp' if name in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}.{name}"
            if name[0] in "qkv":
                found[f"{part}.bias"] = torch.zeros(shapes[name][0], dtype=torch.bfloat16)
            if not nvfp4:
                found[f"{part}.weight"] = weight.bfloat16()
                continue
            tensor = quantize(weight.bfloat16(), global_scale=g)
            found[f"{part}.weight_packed"], found[f"{part}.weight_scale"] = tensor.packed, tensor.scale
            found[f"{part}.weight_global_scale"] = (1 / tensor.global_scale).reshape(1)
    return found


def shards(config: dict[str, Any], nvfp4: bool) -> Iterator[dict[str, Tensor]]:
    """Embedding and head, then layer by layer."""
    size = (config["vocab_size"], config["hidden_size"])
    yield {
        "model.embed_tokens.weight": torch.randn(*size, device=DEVICE).bfloat16(),
        "lm_head.weight": (torch.randn(*size, device=DEVICE) / size[1] ** 0.5).bfloat16(),
        "model.norm.weight": torch.ones(size[1], dtype=torch.bfloat16),
    }
    for number in range(config["num_hidden_layers"]):
        yield layer_tensors(config, number, nvfp4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="7B")
    parser.add_argument("--format", choices=["nvfp4", "bf16"], default="nvfp4")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model folder whose tokenizer is copied")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    for file in args.tokenizer.glob("*token*"):
        shutil.copy(file, args.out)
    config = config_of(args.shapes, args.format == "nvfp4")
    (args.out / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    places: dict[str, str] = {}
    for number, tensors in enumerate(shards(config, args.format == "nvfp4"), 1):
        name = f"model-{number:05}-of-{config['num_hidden_layers'] + 1:05}.safetensors"
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, args.out / name)
        places |= dict.fromkeys(tensors, name)
    (args.out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


if __name__ == "__main__":
    main()
