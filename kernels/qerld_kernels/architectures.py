"""What has to be known of a model family: which norms carry noise, which linear layers are quantised, its parameters.

A family without a row is refused: a norm that is silently left without noise, or a layer left out of a fused
group, would give served weights that differ from the trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qerld_kernels.errors import UnsupportedArchitectureError

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "UnsupportedArchitectureError",
    "architecture_of",
    "layer_count",
    "noisy_norm_names",
]

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class Architecture:
    """One decoder family. All names are relative to a layer, `model.layers.{i}.`."""

    name: str
    """The name in `architectures` of a Hugging Face config.json."""
    model_type: str
    """What config.json has as `model_type`; transformers and vLLM choose the code by it."""
    pre_attention_norm: str = "input_layernorm"
    """The norm whose output feeds q, k and v."""
    pre_mlp_norm: str = "post_attention_layernorm"
    """The norm whose output feeds gate and up."""
    norm_unit_offset: bool = False
    """The norm multiplies by 1 + w instead of w (Gemma)."""
    fused_groups: tuple[tuple[str, ...], ...] = (_QKV, ("self_attn.o_proj",), _GATE_UP, ("mlp.down_proj",))
    """Linear layers of a decoder layer; those of one group are one matrix in vLLM and share one global scale."""
    layers_prefix: str = "model.layers"
    other_norms: tuple[str, ...] = ()
    """Norms of a decoder layer beside the two noisy ones, each as wide as the hidden state."""
    head_norms: bool = False
    """q and k are normalised head by head (`self_attn.q_norm`, `self_attn.k_norm`)."""
    attention_bias: Literal["never", "qkv", "config"] = "config"
    """Biases of q, k, v and o: none; q, k and v always; or all four as `attention_bias` in config.json says."""
    mlp_bias: bool = False
    """Whether config.json's `mlp_bias` is heeded."""
    tied: bool = False
    """`tie_word_embeddings` when config.json does not say."""
    key_value_heads: int | None = None
    """`num_key_value_heads` when config.json does not say; None: as many as query heads."""
    head_dim: int | None = None
    """`head_dim` when config.json does not say; None: hidden_size // num_attention_heads."""

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Quantised linear layers of one decoder layer, e.g. `self_attn.q_proj`."""
        return tuple(name for group in self.fused_groups for name in group)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Last components of `linear_names`, as PEFT's target_modules wants them."""
        return tuple(name.rpartition(".")[2] for name in self.linear_names)

    def groups(self, layers: int) -> Iterator[tuple[str, ...]]:
        """Every fused group of a model with `layers` layers, as full module names."""
        for i in range(layers):
            for group in self.fused_groups:
                yield tuple(f"{self.layers_prefix}.{i}.{name}" for name in group)

    def noisy_norms(self, layers: int) -> list[str]:
        """Full module names of the norms that carry noise, two a layer, in order of depth."""
        return [
            f"{self.layers_prefix}.{i}.{norm}"
            for i in range(layers)
            for norm in (self.pre_attention_norm, self.pre_mlp_norm)
        ]


# Gemma normalises before *and* after each block; its post_attention_layernorm feeds the residual, not the MLP.
_GEMMA: dict[str, Any] = {
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "norm_unit_offset": True,
    "other_norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "tied": True,
    "key_value_heads": 4,
    "head_dim": 256,
}
_ROWS = (
    Architecture("LlamaForCausalLM", "llama", mlp_bias=True),
    Architecture("MistralForCausalLM", "mistral", attention_bias="never", key_value_heads=8),
    Architecture("Qwen2ForCausalLM", "qwen2", attention_bias="qkv", key_value_heads=32),
    Architecture("Qwen3ForCausalLM", "qwen3", head_norms=True, key_value_heads=32, head_dim=128),
    Architecture("GraniteForCausalLM", "granite", mlp_bias=True),
    Architecture("GemmaForCausalLM", "gemma", norm_unit_offset=True, tied=True, key_value_heads=16, head_dim=256),
    Architecture("Gemma2ForCausalLM", "gemma2", **_GEMMA),
    Architecture("Gemma3ForCausalLM", "gemma3_text", head_norms=True, **_GEMMA),
)

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row for a Hugging Face config.json.

    Raises:
        UnsupportedArchitectureError: `architectures` is missing or names no known family.
    """
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise UnsupportedArchitectureError(
        f"architectures: {names or 'missing'} is not supported; known are {', '.join(sorted(ARCHITECTURES))}; "
        "a new family needs a row in qerld_kernels/architectures.py"
    )


def layer_count(config: Mapping[str, Any]) -> int:
    """`num_hidden_layers` of a config.json.

    Raises:
        UnsupportedArchitectureError: it is missing or not a positive integer.
    """
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise UnsupportedArchitectureError(f"num_hidden_layers: must be an integer of at least 1, got {layers!r}")
    return layers


def noisy_norm_names(config: Mapping[str, Any]) -> list[str]:
    """Canonical names of the norms that carry noise, e.g. `model.layers.0.input_layernorm`; 2 × layers of them."""
    return architecture_of(config).noisy_norms(layer_count(config))
