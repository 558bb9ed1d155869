"""The check of a model folder: every known damage is named, whatever `CheckpointReader` alone lets pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from qerld_kernels.architectures import ARCHITECTURES
from qerld_kernels.checkpoint import CheckpointError
from qerld_kernels.model_folder import open_model
from qerld_kernels.parameters import parameter_shapes
from support.bad_models import BAD_MODELS, assert_one_clear_line, make_bad_model


def test_a_good_folder_is_opened(tiny_model: tuple[Path, Path]) -> None:
    assert [open_model(folder).layout for folder in tiny_model] == ["plain", "compressed-tensors"]


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_folder_is_refused_in_one_line(kind: str, tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    model = make_bad_model(kind, tiny_model[1], tmp_path)
    with pytest.raises(CheckpointError) as caught:
        open_model(model)
    assert len(str(caught.value).splitlines()) == 1
    assert_one_clear_line(str(caught.value), kind)


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_implied_parameters_are_those_of_transformers(name: str, options: dict[str, Any]) -> None:
    """Also where config.json leaves sizes to the family's defaults: head_dim, key/value heads, tied embeddings."""
    model_class = getattr(transformers, name)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 32}
    given = {**sizes, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options}
    with torch.device("meta"):
        model = model_class(model_class.config_class(**given))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    file = {**given, "architectures": [name], "model_type": model.config.model_type}
    assert parameter_shapes(file) == expected
    assert parameter_shapes({**model.config.to_dict(), "architectures": [name]}) == expected
