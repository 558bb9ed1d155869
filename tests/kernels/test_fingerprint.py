"""Fingerprints: equal for the same model however it is stored, different for any change that matters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from qerld_kernels.errors import CheckpointError
from qerld_kernels.fingerprint import base_fingerprint, chat_template_fingerprint, tokenizer_fingerprint
from tiny_llama import CONFIG, MakeModel

Tensors = dict[str, torch.Tensor]


def test_sharding_and_volatile_keys_do_not_matter(make_model: MakeModel) -> None:
    other = {**CONFIG, "transformers_version": "9.9", "_name_or_path": "elsewhere"}
    assert base_fingerprint(make_model("a")) == base_fingerprint(make_model("b", shards=3, config=other))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_changed_weight_changes_the_base(make_model: MakeModel, tensors: Tensors, name: str) -> None:
    before = base_fingerprint(make_model("a"))
    tensors[name] = tensors[name] + 1
    assert base_fingerprint(make_model("b", tensors)) != before


def test_a_changed_config_or_dtype_changes_the_base(make_model: MakeModel, tensors: Tensors) -> None:
    prints = {
        base_fingerprint(make_model("a")),
        base_fingerprint(make_model("b", config={**CONFIG, "rms_norm_eps": 1e-6})),
        base_fingerprint(make_model("c", {name: tensor.half() for name, tensor in tensors.items()})),
    }
    assert len(prints) == 3


def test_the_tokenizer_is_compared_by_content(make_model: MakeModel) -> None:
    folder = make_model()
    before = tokenizer_fingerprint(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert tokenizer_fingerprint(folder) == before
    path.write_text('{"version": "1.0", "model": {"type": "WordPiece"}}')
    assert tokenizer_fingerprint(folder) != before


def test_older_vocabulary_files_count_where_there_is_no_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "merges.txt").write_text("a b")
    assert tokenizer_fingerprint(tmp_path) != before


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        tokenizer_fingerprint(tmp_path)


def test_the_chat_template_is_the_same_in_both_places(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model()
    in_config = chat_template_fingerprint(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_template_fingerprint(folder) == in_config
    (folder / "chat_template.jinja").write_text("{{ other }}")
    assert chat_template_fingerprint(folder) != in_config
    assert chat_template_fingerprint(tmp_path) not in (in_config, chat_template_fingerprint(folder))
