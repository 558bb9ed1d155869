"""Adaptive quantisation noise: what is added to a norm's weight, the same on every rank, replica and trainer.

QeRL (arXiv 2510.11696): w' = w + Z, Z ~ N(0, σ²), one value a channel. Z depends on (seed, norm name) only.
The sum is taken in fp32, or rounded as the paper's code does: in bf16 a weight near 1 swallows σ ≤ 1e-3 nearly whole.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["DTYPES", "Noise", "noise_vector", "scaled_noise"]

DTYPES = ("float32", "bfloat16")

_DOMAIN = b"qerld/aqn/1\0"
_SEED_LIMIT = 2**64


@dataclass(frozen=True)
class Noise:
    """The noise of one policy version.

    `sigma` is absolute, or in units of each norm's mean |w| when `relative`. `seed` is an unsigned 64-bit integer.
    `dtype`: of the sum w + Z, one of `DTYPES`.
    """

    sigma: float
    seed: int
    relative: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not math.isfinite(self.sigma) or self.sigma < 0:
            raise ValueError(f"sigma: must be finite and at least 0, got {self.sigma}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        _check_seed(self.seed)


def noise_vector(seed: int, name: str, size: int) -> torch.Tensor:
    """Standard normal float32 [size] on the CPU, drawn by counter from (seed, name).

    Philox4x64-10 raw words (a stream that NumPy keeps stable across releases) through Box–Muller in float64, so
    torch's and NumPy's own normal generators, which may change, play no part. Vectors of two sizes share their prefix.
    Rounded from float64: two machines' math libraries can differ in the last bit of one value in about 10⁸.

    Raises:
        ValueError: the seed is no unsigned 64-bit integer or size is negative.
    """
    _check_seed(seed)
    if size < 0:
        raise ValueError(f"size: must be at least 0, got {size}")
    key = hashlib.sha256(_DOMAIN + seed.to_bytes(8, "little") + name.encode()).digest()[:16]
    pairs = (size + 1) // 2
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(2 * pairs).reshape(pairs, 2)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]: the logarithm is finite
    radius = np.sqrt(-2.0 * np.log(uniform[:, 0]))
    angle = 2.0 * np.pi * uniform[:, 1]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:size]
    return torch.from_numpy(normal.astype(np.float32))


def scaled_noise(noise: Noise, name: str, weight: torch.Tensor, *, unit_offset: bool = False) -> torch.Tensor:
    """The float32 [d] vector on the CPU to add to the norm `name` of weight [d]: σ·z, times mean |w| when relative.

    With `unit_offset` the norm multiplies by 1 + w (Gemma), and the mean is that of |1 + w|. In bfloat16 it is what the
    paper's code adds to a bf16 w: both Z and the sum w + Z rounded to bf16, so that w + the result is that sum exactly.
    """
    sigma = noise.sigma
    if noise.relative:
        # float64 on the CPU: server and trainer hold w in different dtypes and devices and must agree on the mean.
        effective = weight.detach().to("cpu", torch.float64) + (1.0 if unit_offset else 0.0)
        sigma *= effective.abs().mean().item()
    added = noise_vector(noise.seed, name, weight.numel()) * sigma
    if noise.dtype == "float32":
        return added
    before = weight.detach().to("cpu", torch.bfloat16)
    return (before + added.bfloat16()).float() - before.float()


def _check_seed(seed: int) -> None:
    if not 0 <= seed < _SEED_LIMIT:
        raise ValueError(f"seed: must be at least 0 and below 2**64, got {seed}")
