"""NF4 in a vLLM that has no bitsandbytes (0.32, and any on the CPU): dequantised at load, and served as plain weights.

Weights are those that the trainer sees, rounded once to the model's dtype; the memory is that of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from qerld_kernels import nf4
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.nf4 import Nf4Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

__all__ = ["LOAD_FORMAT", "register_nf4_loader", "stock_vllm_serves_nf4"]

LOAD_FORMAT = "qerld_nf4"


def stock_vllm_serves_nf4(on_cpu: bool) -> bool:
    """Whether this vLLM multiplies by NF4 weights itself."""
    return not on_cpu and find_spec("vllm.model_executor.layers.quantization.bitsandbytes") is not None


def register_nf4_loader() -> None:
    """Make the load format known in this process."""
    register_model_loader(LOAD_FORMAT)(_Nf4Loader)


class _Nf4Loader(DefaultModelLoader):  # type: ignore[misc]
    def download_model(self, model_config: Any) -> None:
        """It is here."""

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors as an unquantised checkpoint has them."""
        reader = CheckpointReader(Path(model_config.model))
        quantised = list(filter(reader.is_quantized, reader.linear_names))
        parts = tuple(f"{name}.weight" for name in quantised)  # and what belongs to them, behind another dot
        for name in quantised:
            weight = reader.linear(name)
            assert isinstance(weight, Nf4Tensor)
            yield f"{name}.weight", nf4.dequantize(weight, model_config.dtype)
        for name in reader.names:
            if not name.startswith(parts):
                yield name, reader.tensor(name)
