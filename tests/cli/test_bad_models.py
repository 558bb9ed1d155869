"""Bad model folders against the commands that are given one: status 2 and one clear line, before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from qerld_learner import fingerprints
from qerld_service import policy, quantize
from safetensors.torch import load_file, save_file
from support.bad_models import BAD_MODELS, assert_one_clear_line, make_bad_model

PLAIN = [kind for kind, bad in BAD_MODELS.items() if not bad.packed]
# Importing their libraries takes these processes most of the time.
PROCESSES = (
    "unknown folder",
    "truncated safetensors",
    "missing tensor",
    "wrong dtype",
    "NaN scales",
    "unsupported architecture",
)


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_the_policy_server_refuses(
    kind: str, tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, cache = make_bad_model(kind, tiny_model[1], tmp_path), tmp_path / "cache"
    assert policy.main(["--model", str(model), "--cache-dir", str(cache), "--metrics-port", "0"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("qerld policy: model: ")
    assert_one_clear_line(text, kind)
    assert not cache.exists()


def with_quantised_activations(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    group = content["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    (folder / "config.json").write_text(json.dumps(content))


def in_the_layout_of_modelopt(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        module = name.removesuffix("_packed")
        tensors[module] = tensors.pop(name)
        tensors[f"{module}_scale_2"] = 1 / tensors.pop(f"{module}_global_scale")
    save_file(tensors, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU serves these")
@pytest.mark.parametrize("change", [with_quantised_activations, in_the_layout_of_modelopt])
def test_the_policy_server_refuses_what_only_a_gpu_serves(
    change: Callable[[Path], None], tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model[1], tmp_path / "model"))
    change(model)
    assert policy.main(["--model", str(model), "--cache-dir", str(tmp_path / "cache"), "--metrics-port", "0"]) == 2
    assert "is served on a GPU only, and there is none; give the unquantised model to" in capsys.readouterr().err
    assert fingerprints.main([str(model)]) == 0  # the trainer reads them


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_the_learner_refuses(
    kind: str, tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the child that it starts first, whose import of torch would take most of the time of this test."""
    assert fingerprints.main([str(make_bad_model(kind, tiny_model[1], tmp_path))]) == fingerprints.BAD_FOLDER
    assert_one_clear_line(capsys.readouterr().err, kind)


@pytest.mark.parametrize("kind", PLAIN)
def test_the_quantiser_refuses(
    kind: str, tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize.main([str(make_bad_model(kind, tiny_model[0], tmp_path)), str(tmp_path / "out")]) == 2
    assert_one_clear_line(capsys.readouterr().err, kind)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", PROCESSES)
def test_the_commands_end_with_status_2(kind: str, tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    model = make_bad_model(kind, tiny_model[1], tmp_path)
    folders = {"policy": "--cache-dir", "learner": "--state-dir"}
    started = {
        role: subprocess.Popen(
            [sys.executable, "-m", "qerld_service.cli", role, "--model", str(model), flag, str(tmp_path / role)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for role, flag in folders.items()
    }
    for role, process in started.items():
        text, _ = process.communicate(timeout=120)
        assert process.returncode == 2, text
        assert text.startswith(f"qerld {role}: model: ")
        assert len(text.splitlines()) == 1
        assert_one_clear_line(text, kind)
    assert not any((tmp_path / role).exists() for role in folders)
