"""What has to be known of a model family: which norms carry noise and which linear layers are quantised.

A family without a row is refused: a norm that is silently left without noise, or a layer left out of a fused
group, would give served weights that differ from the trained ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    pre_attention_norm: str = "input_layernorm"
    """The norm whose output feeds q, k and v."""
    pre_mlp_norm: str = "post_attention_layernorm"
    """The norm whose output feeds gate and up."""
    norm_unit_offset: bool = False
    """The norm multiplies by 1 + w instead of w (Gemma)."""
    fused_groups: tuple[tuple[str, ...], ...] = (_QKV, ("self_attn.o_proj",), _GATE_UP, ("mlp.down_proj",))
    """Linear layers of a decoder layer; those of one group are one matrix in vLLM and share one global scale."""
    layers_prefix: str = "model.layers"

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


_PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM")
# Gemma normalises before *and* after each block; its post_attention_layernorm feeds the residual, not the MLP.
_GEMMA = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")

ARCHITECTURES: dict[str, Architecture] = {
    **{name: Architecture(name) for name in _PLAIN},
    "GemmaForCausalLM": Architecture("GemmaForCausalLM", norm_unit_offset=True),
    **{name: Architecture(name, pre_mlp_norm="pre_feedforward_layernorm", norm_unit_offset=True) for name in _GEMMA},
}


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
        f"architectures: {names or 'missing'} is not supported; known are {', '.join(sorted(ARCHITECTURES))}. "
        "A new family needs a row in qerld_kernels/architectures.py"
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
