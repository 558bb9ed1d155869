"""NVFP4 weights in vLLM on the CPU: the compressed-tensors W4A16 scheme, dequantised once at load.

Stock vLLM has no FP4 kernel for the CPU and refuses such checkpoints there. On a GPU this module is not used.
Weights are those the trainer sees: w = e2m1 · scale · g, after the same rules for fused groups (`qerld_kernels`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from qerld_kernels.nvfp4 import BLOCK, Nvfp4Tensor, dequantize, flush_scales
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

__all__ = ["DequantisedNvfp4", "register_nvfp4"]

logger = logging.getLogger(__name__)


class DequantisedNvfp4(CompressedTensorsScheme):  # type: ignore[misc]
    """Loads packed NVFP4 tensors and keeps the dequantised weight in the model's dtype, packed for oneDNN."""

    def __init__(self, use_a16: bool = False) -> None:
        if not use_a16:
            raise ValueError("NVFP4 with quantised activations cannot be served on the CPU; use a W4A16 checkpoint")

    @classmethod
    def get_min_capability(cls) -> int:
        """A CUDA notion; any device will do."""
        return 0

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., Any],
        **_: Any,
    ) -> None:
        """Register weight_packed [out, in / 2], weight_scale [out, in / 16] and one global scale a fused part."""
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = output_partition_sizes  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scale = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn)
        divisors = torch.empty(len(output_partition_sizes), dtype=torch.float32)
        layout = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        layer.register_parameter("weight_packed", ModelWeightParameter(data=packed, **layout))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scale, **layout))
        layer.register_parameter(
            "weight_global_scale", PerTensorScaleParameter(data=divisors, weight_loader=weight_loader)
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed tensors by the weight; the largest divisor serves the whole fused layer, as on a GPU."""
        scales, flushed = flush_scales([layer.weight_scale.data])
        if flushed:
            logger.warning("%d block scales below 2^-6 are served as zero, as Marlin does", flushed)
        tensor = Nvfp4Tensor(layer.weight_packed.data, scales[0], 1.0 / layer.weight_global_scale.data.max())
        weight = dequantize(tensor, layer.params_dtype)
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        # As vLLM treats its own unquantised layers: oneDNN's blocked layout, 1.5 times as fast for a batch of 8 tokens.
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        result: torch.Tensor = layer.cpu_linear(x, layer.weight, bias)  # type: ignore[operator]
        return result


def register_nvfp4() -> None:
    """Use this scheme wherever compressed-tensors would pick vLLM's NVFP4 scheme, in this process."""
    compressed_tensors.CompressedTensorsW4A4Fp4 = DequantisedNvfp4
