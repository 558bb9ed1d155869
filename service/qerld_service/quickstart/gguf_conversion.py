"""Converts a Llama model in llama.cpp's GGUF format to a Hugging Face folder: bf16 safetensors, tokenizer, configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from qerld_kernels.safetensors_io import ShardWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["ConversionError", "convert_llama_gguf"]

Progress = Callable[[int, int, str], None]

_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


class ConversionError(ValueError):
    """The GGUF file holds a model or a tokenizer that this converter does not know."""


def convert_llama_gguf(source: Path, out: Path, progress: Progress | None = None) -> None:
    """Write the model of the GGUF file `source` into the existing folder `out`, one tensor at a time.

    `progress` is called with (tensors done, tensors in all, name).

    Raises:
        ConversionError: not a Llama model, or not with the byte-pair tokenizer of SmolLM2.
    """
    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ConversionError(
            f"{source}: must be a llama model with the smollm tokenizer, got "
            f"{fields['general.architecture']} with {fields['tokenizer.ggml.pre']}"
        )
    _write_json(out / "config.json", _model_config(fields))
    _write_json(out / "generation_config.json", _special_ids(fields))
    _write_tokenizer(fields, out)
    _write_weights(reader, fields, out / "model.safetensors", progress)


def _model_config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    theta = float(fields["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps fp32: 1e-5 comes back as 9.999999747e-06.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    # The file pads with its end-of-turn token, which would mask the real one; <|endoftext|> is free for padding.
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.unknown_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], out: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm" in llama.cpp: each digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    ids = _special_ids(fields)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": special,
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(out / "tokenizer_config.json", config)
    (out / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], "utf-8")


def _write_weights(reader: GGUFReader, fields: dict[str, Any], path: Path, progress: Progress | None) -> None:
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    # GGUF lists dimensions innermost first.
    entries = {name: (torch.bfloat16, tuple(int(n) for n in tensor.shape[::-1])) for name, tensor in tensors.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    with ShardWriter(path, entries) as writer:
        for done, (name, tensor) in enumerate(tensors.items(), start=1):
            values = dequantize(tensor.data, tensor.tensor_type)
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                values = _undo_rope_permutation(values, heads[kind])
            writer.write(name, torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16))
            if progress is not None:
                progress(done, len(tensors), name)


def _hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    module, _, suffix = name.rpartition(".")
    if module in _OUTER_NAMES:
        return f"{_OUTER_NAMES[module]}.{suffix}"
    parts = module.split(".")
    if len(parts) != 3 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        raise ConversionError(f"{name}: is not a tensor of a Llama model")
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{suffix}"


def _undo_rope_permutation(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp interleaves the two halves that RoPE rotates: rows (0, d/2, 1, d/2 + 1, …) of each head. [out, in]."""
    out, features = weight.shape
    return weight.reshape(heads, out // heads // 2, 2, features).swapaxes(1, 2).reshape(out, features)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
