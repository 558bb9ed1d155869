"""Fixtures around the tiny Llama folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import CONFIG, MakeModel, random_tensors, write_model


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return random_tensors()


@pytest.fixture
def make_model(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> MakeModel:
    """make_model(name="model", tensors=…, shards=1, config=…) → folder."""

    def make(name: str = "model", weights: dict[str, torch.Tensor] | None = None, **options: Any) -> Path:
        return write_model(tmp_path / name, tensors if weights is None else weights, **options)

    return make


@pytest.fixture
def llama_config() -> dict[str, Any]:
    return dict(CONFIG)
