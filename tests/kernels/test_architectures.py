"""The table of model families against the models of the transformers library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from qerld_kernels.architectures import (
    ARCHITECTURES,
    UnsupportedArchitectureError,
    architecture_of,
    noisy_norm_names,
)

LAYERS = 2


def tiny_model(name: str) -> Any:
    model_class = getattr(transformers, name)
    config = model_class.config_class(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device("meta"):
        return model_class(config)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_row_names_what_the_model_has(name: str) -> None:
    model, row = tiny_model(name), ARCHITECTURES[name]
    modules = dict(model.named_modules())
    linears = {path for path, module in modules.items() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    assert {linear for group in row.groups(LAYERS) for linear in group} == linears
    for norm in row.noisy_norms(LAYERS):
        assert modules[norm].weight.shape == (32,)
    assert {norm.rpartition(".")[2] for norm in row.noisy_norms(LAYERS)} == {row.pre_attention_norm, row.pre_mlp_norm}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_noisy_norms_are_those_in_front_of_q_and_gate(name: str) -> None:
    """Zeroing a norm's scale must silence the input of the layers behind it, and unit_offset must say how."""
    row = ARCHITECTURES[name]
    model = tiny_model(name).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    modules, seen = dict(model.named_modules()), {}
    for norm, linear in ((row.pre_attention_norm, "self_attn.q_proj"), (row.pre_mlp_norm, "mlp.gate_proj")):
        layer = f"{row.layers_prefix}.1"
        torch.nn.init.constant_(modules[f"{layer}.{norm}"].weight, -1.0 if row.norm_unit_offset else 0.0)
        modules[f"{layer}.{linear}"].register_forward_pre_hook(
            lambda _, arguments, linear=linear: seen.update({linear: arguments[0]})
        )
    x = torch.randn(1, 3, 32)
    for norm in (row.pre_attention_norm, row.pre_mlp_norm):
        assert not modules[f"{row.layers_prefix}.1.{norm}"](x).any()
    layer = modules[f"{row.layers_prefix}.1"]
    ones = torch.ones(1, 3, 16)
    layer(x, position_embeddings=(ones, ones), attention_mask=None)
    assert len(seen) == 2
    assert not any(value.any() for value in seen.values())


def test_norm_names_are_two_a_layer() -> None:
    names = noisy_norm_names({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 3})
    assert len(names) == 6
    assert names[:2] == ["model.layers.0.input_layernorm", "model.layers.0.pre_feedforward_layernorm"]


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": ["MixtralForCausalLM"]}])
def test_an_unknown_family_is_refused_naming_the_known(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"known are .*Qwen2ForCausalLM"):
        architecture_of(config)


@pytest.mark.parametrize("layers", [None, 0, -1, "2", True])
def test_a_layer_count_that_is_none_is_refused(layers: object) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="num_hidden_layers"):
        noisy_norm_names({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers})
