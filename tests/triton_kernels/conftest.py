"""Kernels under Triton's interpreter on the CPU, or compiled on a GPU: `TRITON_INTERPRET=1 pytest tests/triton_kernels`."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels.jit import INTERPRETED, triton


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if triton is None or not (INTERPRETED or torch.cuda.is_available()):
        reason = "kernels need a GPU, or Triton with TRITON_INTERPRET=1"
        for item in items:
            if "tests/triton_kernels" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
