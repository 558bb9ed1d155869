"""The parameters that a config.json implies, so that a folder's headers can be checked before anything loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qerld_kernels.architectures import Architecture, architecture_of, layer_count
from qerld_kernels.errors import CheckpointError

__all__ = ["parameter_shapes"]

_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of the unquantised model; without lm_head where it is the embedding.

    Raises:
        CheckpointError: a size is missing or none, or `model_type` is not the architecture's.
        UnsupportedArchitectureError: as `architecture_of` and `layer_count`.
    """
    row = architecture_of(config)
    if config.get("model_type") != row.model_type:
        raise CheckpointError(
            f"model_type: must be {row.model_type!r} for {row.name}, got {config.get('model_type')!r}"
        )
    vocabulary, sizes = _size(config, "vocab_size"), _sizes_of(row, config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, sizes.hidden)}
    for index in range(layer_count(config)):
        layer = f"{row.layers_prefix}.{index}"
        shapes |= {f"{layer}.{name}": shape for name, shape in _layer(row, config, sizes)}
    shapes["model.norm.weight"] = (sizes.hidden,)
    if not config.get("tie_word_embeddings", row.tied):
        shapes["lm_head.weight"] = (vocabulary, sizes.hidden)
    return shapes


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    mlp: int
    queries: int
    keys: int
    head: int


def _sizes_of(row: Architecture, config: Mapping[str, Any]) -> _Sizes:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head = _size(config, "head_dim", row.head_dim or hidden // heads)
    keys = _size(config, "num_key_value_heads", row.key_value_heads or heads)
    return _Sizes(hidden, _size(config, "intermediate_size"), heads * head, keys * head, head)


def _layer(row: Architecture, config: Mapping[str, Any], sizes: _Sizes) -> _Shapes:
    linears = {
        "self_attn.q_proj": (sizes.queries, sizes.hidden),
        "self_attn.k_proj": (sizes.keys, sizes.hidden),
        "self_attn.v_proj": (sizes.keys, sizes.hidden),
        "self_attn.o_proj": (sizes.hidden, sizes.queries),
        "mlp.gate_proj": (sizes.mlp, sizes.hidden),
        "mlp.up_proj": (sizes.mlp, sizes.hidden),
        "mlp.down_proj": (sizes.hidden, sizes.mlp),
    }
    biased = _biased(row, config)
    for name, shape in linears.items():
        yield f"{name}.weight", shape
        if name in biased:
            yield f"{name}.bias", shape[:1]
    for norm in (row.pre_attention_norm, row.pre_mlp_norm, *row.other_norms):
        yield f"{norm}.weight", (sizes.hidden,)
    for norm in ("self_attn.q_norm", "self_attn.k_norm") if row.head_norms else ():
        yield f"{norm}.weight", (sizes.head,)


def _biased(row: Architecture, config: Mapping[str, Any]) -> set[str]:
    attention = [name for name in row.linear_names if name.startswith("self_attn.")]
    if row.attention_bias == "qkv":
        attention.remove("self_attn.o_proj")
    elif row.attention_bias == "never" or not config.get("attention_bias"):
        attention = []
    mlp = row.mlp_bias and config.get("mlp_bias")
    return {*attention, *(name for name in row.linear_names if mlp and name.startswith("mlp."))}


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "nothing" if value is None else repr(value)
        raise CheckpointError(f"{key}: must be an integer of at least 1, got {found}")
    return value
