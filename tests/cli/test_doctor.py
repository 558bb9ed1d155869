"""`qerld doctor` on good and broken model folders."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from qerld_service import doctor
from qerld_service.checks import Check
from qerld_service.model_checks import check_model
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"weight": torch.ones(64, 64)}, str(folder / "model.safetensors"))
    return folder


def by_name(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in check_model(folder)}


def test_a_good_model_has_no_findings(model: Path) -> None:
    assert [check for check in check_model(model) if check.status != "ok"] == []
    assert by_name(model)["weights"].found == "NVFP4"


def test_exit_status_follows_the_worst_finding(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = str(model.parent / "state")
    assert doctor.main(["--model", str(model), "--port", "0", "--state-dir", state]) == 0
    (model / "config.json").unlink()
    assert doctor.main(["--model", str(model), "--port", "0", "--state-dir", state]) == 1
    assert "FAIL" in capsys.readouterr().out


def rewrite(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


def test_unsupported_architecture_names_the_known_ones(model: Path) -> None:
    rewrite(model, architectures=["MambaForCausalLM"])
    check = by_name(model)["architecture"]
    assert check.status == "fail"
    assert "LlamaForCausalLM" in check.advice


def test_other_quantisation_is_refused_and_none_is_a_warning(model: Path) -> None:
    rewrite(model, quantization_config={"quant_method": "gptq"})
    assert by_name(model)["weights"].status == "fail"
    rewrite(model, quantization_config=None)
    assert by_name(model)["weights"].status == "warn"
    assert "qerld quantize" in by_name(model)["weights"].advice


def test_modelopt_layout_is_known(model: Path) -> None:
    rewrite(model, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert by_name(model)["weights"].found == "NVFP4"


def test_truncated_safetensors(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    check = by_name(model)["safetensors"]
    assert check.status == "fail"
    assert "100 bytes are missing" in check.found
    file.write_bytes(whole[:20])
    assert by_name(model)["safetensors"].status == "fail"
    file.unlink()
    assert by_name(model)["safetensors"].status == "fail"


def test_config_that_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert [check.status for check in check_model(model)] == ["fail"]


def test_tokenizer_and_chat_template(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "chat_template.jinja").unlink()
    found = by_name(model)
    assert found["tokenizer"].status == "fail"
    assert found["chat template"].status == "warn"


def test_taken_port_is_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert doctor.check_port(taken.getsockname()[1]).status == "fail"


def test_package_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"vllm": "0.25.0"}
    monkeypatch.setattr(doctor, "version", found.__getitem__)
    assert doctor.check_package("vllm").status == "fail"
    for good in ("0.25.1", "0.32.0+cpu", "0.33.0"):
        found["vllm"] = good
        assert doctor.check_package("vllm").status == "ok"
    found["vllm"] = "0.34.0"
    check = doctor.check_package("vllm")
    assert (check.status, check.advice) == ("fail", "pip install 'vllm>=0.25.1,<0.34'")


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert doctor.check_disk(tmp_path / "a" / "b").status == "ok"
