"""A checkpoint quantised on a GPU is, byte for byte, the one that the CPU makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from qerld_kernels.quantizer import quantize_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_the_same_bytes(tiny_model: tuple[Path, Path], tmp_path: Path, search: Any) -> None:
    for device in ("cpu", "cuda"):
        quantize_checkpoint(tiny_model[0], tmp_path / device, search=search, device=device)
    names = {path.name for path in (tmp_path / "cpu").iterdir()}
    assert names == {path.name for path in (tmp_path / "cuda").iterdir()}
    for name in names:
        assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "cuda" / name).read_bytes(), name
