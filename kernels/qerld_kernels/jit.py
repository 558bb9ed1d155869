"""Triton where it is installed. Elsewhere kernels can be read, and launching one is an error.

`TRITON_INTERPRET=1`, set before the first import, runs kernels on the CPU, operation by operation: for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of vLLM comes without it
    triton = tl = None
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
except ImportError:  # no Triton, or one before Gluon knew Hopper
    gluon = gl = hopper = None
copy_tile: Any = None
"""A TMA copy into shared memory."""
if hopper is not None:  # named so since Triton 3.9
    copy_tile = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared

__all__ = [
    "INTERPRETED", "can_launch", "compute_capability", "constant", "copy_tile", "gl", "gluon", "gluon_jit", "hopper",
    "jit", "next_power_of_2", "tl", "triton",
]  # fmt: skip

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def jit(kernel: Callable[..., Any], **options: Any) -> Any:
    """`triton.jit` with its options, or the plain function where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel, **options)


def gluon_jit(kernel: Callable[..., Any], **options: Any) -> Any:
    """`gluon.jit` with its options, or the plain function where there is no Gluon."""
    return kernel if gluon is None else gluon.jit(kernel, **options)


def constant(value: Any) -> Any:
    """A global that kernels may read."""
    return value if triton is None else tl.constexpr(value)


def can_launch(tensor: torch.Tensor) -> bool:
    """Whether kernels run on the tensor's device; the torch references take over where they do not."""
    return INTERPRETED or (triton is not None and tensor.is_cuda)


@lru_cache
def compute_capability(device: torch.device) -> int:
    """The major number of a GPU's: 9 for Hopper."""
    return torch.cuda.get_device_capability(device)[0]


def next_power_of_2(number: int) -> int:
    """The least power of two ≥ number, for number ≥ 1."""
    return 1 << (number - 1).bit_length()
