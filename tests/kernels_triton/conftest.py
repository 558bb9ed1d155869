"""Kernels under Triton's interpreter on the CPU (`make test-kernels`), or compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels.jit import INTERPRETED, triton

# The rest of the suite runs without Triton, which vLLM's CPU build must not find.
collect_ignore_glob = [] if triton is not None and (INTERPRETED or torch.cuda.is_available()) else ["test_*.py"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
