"""vLLM's arguments name what our plugin changes, so that its cache of compiled code tells them apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from qerld_kernels.checkpoint import CheckpointReader
from qerld_service import vllm_plugin
from qerld_service.engine_types import EngineConfig
from qerld_service.vllm_plugin import LORA_KERNEL, NVFP4_KERNEL, PARENT, TRACED, set_environment, traced_choices
from qerld_service.vllm_start import engine_arguments

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def without_plugin() -> Iterator[None]:
    """The environment as it is where no policy engine was started; put back afterwards."""
    with mock.patch.dict(os.environ):
        for name in (PARENT, NVFP4_KERNEL, LORA_KERNEL):
            os.environ.pop(name, None)
        yield


def arguments(model: Path) -> Any:
    return engine_arguments(EngineConfig(model, max_model_len=64), CheckpointReader(model), True)


def key_with(model: Path, nvfp4: Literal["marlin", "qerld"], lora: Literal["vllm", "qerld"]) -> str:
    """What vLLM's cache of compiled code goes by, but for its environment variables and code."""
    set_environment(True, 1, nvfp4, lora)
    return str(arguments(model).create_engine_config().compute_hash())


def test_the_choices_reach_vllm(tiny_model: tuple[Path, Path]) -> None:
    set_environment(True, 1, "marlin", "qerld")
    found = arguments(tiny_model[0]).additional_config
    assert found == {"qerld": traced_choices()}
    assert (found["qerld"][NVFP4_KERNEL], found["qerld"][LORA_KERNEL]) == ("marlin", "qerld")
    assert len(found["qerld"]["code"]) == 64


def test_each_choice_has_a_key_of_its_own(tiny_model: tuple[Path, Path]) -> None:
    model = tiny_model[0]
    stock = arguments(model).create_engine_config().compute_hash()
    keys = [key_with(model, "marlin", "vllm"), key_with(model, "marlin", "qerld"), key_with(model, "qerld", "qerld")]
    assert len({stock, *keys}) == 4
    assert key_with(model, "marlin", "vllm") == keys[0]


def test_stock_vllm_gets_nothing_of_ours(tiny_model: tuple[Path, Path]) -> None:
    assert traced_choices() == {}
    assert arguments(tiny_model[0]).additional_config == {}


def test_changed_code_is_another_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(True, 1, "marlin", "qerld")
    (tmp_path / "traced_probe.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = (*TRACED, "traced_probe")
    before = traced_choices(modules)
    (tmp_path / "traced_probe.py").write_text("one = 2\n")
    assert before["code"] != traced_choices(modules)["code"]


def test_all_that_the_plugin_puts_into_compiled_code_is_read() -> None:
    """A module of ours that replaces a layer's method is in the list, or the list is out of date."""
    folder = Path(vllm_plugin.__file__).parent
    traced = {"qerld_service." + file.stem for file in folder.glob("*.py") if "\ndef register_" in file.read_text()}
    # None is compiled: one manages adapters, one reads weights, one runs where nothing is (TORCHDYNAMO_DISABLE).
    traced -= {"qerld_service.lora_manager", "qerld_service.nf4_loader", "qerld_service.cpu_lora"}
    assert traced == {name for name in TRACED if name.startswith("qerld_service.")}
