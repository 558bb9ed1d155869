"""4-bit weights in vLLM: compressed-tensors' weights-only schemes, dequantised at load on the CPU; on a GPU, NVFP4 by
our kernels.

Stock vLLM has no FP4 kernel for the CPU and refuses such checkpoints there; on a GPU it takes Marlin for weights alone,
so that another kernel needs another scheme. MXFP4 is served by Marlin there. Weights are those the trainer sees, after
the same rules for fused groups (`qerld_kernels`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from qerld_kernels import mxfp4, nvfp4
from qerld_kernels.formats import MXFP4, NVFP4, Format
from qerld_kernels.fused_product import can_fuse
from qerld_kernels.matmul import matmul, remember_scale
from qerld_kernels.mxfp4 import Mxfp4Tensor
from qerld_kernels.nvfp4 import Nvfp4Tensor, flush_scales
from qerld_kernels.tiles import tile
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

__all__ = ["DequantisedMxfp4", "DequantisedNvfp4", "TiledNvfp4", "register_fp4", "register_tiled_nvfp4"]

logger = logging.getLogger(__name__)


class _Fp4(CompressedTensorsScheme):  # type: ignore[misc]
    """Loads packed 4-bit tensors."""

    format: Format

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
        """Register weight_packed [out, in / 2], weight_scale [out, in / block]; NVFP4: a global scale a fused part."""
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = output_partition_sizes  # type: ignore[assignment]
        layer.params_dtype = params_dtype  # type: ignore[assignment]
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        scale = torch.empty(rows, columns // self.format.block, dtype=self.format.scale)
        layout = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        layer.register_parameter("weight_packed", ModelWeightParameter(data=packed, **layout))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scale, **layout))
        if self.format is NVFP4:
            divisors = torch.empty(len(output_partition_sizes), dtype=torch.float32)
            layer.register_parameter(
                "weight_global_scale", PerTensorScaleParameter(data=divisors, weight_loader=weight_loader)
            )


class _Nvfp4(_Fp4):
    format = NVFP4

    @staticmethod
    def take(layer: Any) -> Nvfp4Tensor:
        """The loaded tensors, which leave the layer; the largest divisor serves the whole fused layer, as in Marlin."""
        scales, flushed = flush_scales([layer.weight_scale.data])
        if flushed:
            logger.warning("%d block scales below 2^-6 are served as zero, as Marlin does", flushed)
        tensor = Nvfp4Tensor(layer.weight_packed.data, scales[0], 1.0 / layer.weight_global_scale.data.max())
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        return tensor


class _OnCpu:
    """Mixin: keeps the dequantised weight in the model's dtype, packed for oneDNN."""

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        result: torch.Tensor = layer.cpu_linear(x, layer.weight, bias)  # type: ignore[operator]
        return result

    @staticmethod
    def keep(layer: Any, weight: torch.Tensor) -> None:
        """As vLLM treats its own unquantised layers: in oneDNN's blocked layout, 1.5 times as fast for 8 tokens."""
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


class DequantisedNvfp4(_OnCpu, _Nvfp4):
    """NVFP4 on the CPU."""

    def __init__(self, use_a16: bool = False) -> None:
        if not use_a16:
            raise ValueError("NVFP4 with quantised activations cannot be served on the CPU; use a W4A16 checkpoint")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed tensors by the weight."""
        self.keep(layer, nvfp4.dequantize(self.take(layer), layer.params_dtype))


class DequantisedMxfp4(_OnCpu, _Fp4):
    """MXFP4 on the CPU."""

    format = MXFP4

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed tensors by the weight."""
        tensor = Mxfp4Tensor(layer.weight_packed.data, layer.weight_scale.data)
        del layer.weight_packed, layer.weight_scale
        self.keep(layer, mxfp4.dequantize(tensor, layer.params_dtype))


class TiledNvfp4(_Nvfp4):
    """On a GPU: keeps the weight in tiles, of which there is no other copy, and multiplies by our kernels."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """The names under which vLLM's LoRA looks for a layer's device stay."""
        tensor = self.take(layer)
        _say_where_it_is_slow(tensor.packed.device)
        tiles = tile(tensor.packed, tensor.scale)
        layer.weight_packed = torch.nn.Parameter(tiles.words, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(tiles.scale, requires_grad=False)
        layer.weight_global_scale = torch.nn.Parameter(tensor.global_scale, requires_grad=False)
        layer.outputs = tensor.shape[0]
        remember_scale(layer.weight_global_scale.data)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = matmul(
            rows, layer.weight_packed, layer.weight_scale, layer.weight_global_scale, layer.outputs
        )
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias


@cache
def _say_where_it_is_slow(device: torch.device) -> None:
    if not can_fuse(torch.empty(0, device=device)):
        logger.warning(
            "nvfp4_kernel: qerld's kernel needs a Hopper GPU and a Triton with Gluon, which %s has not; every product "
            "dequantises its weight first, which is slow for few tokens: set nvfp4_kernel to marlin",
            device,
        )


def register_tiled_nvfp4() -> None:
    """Multiply by our kernels on a GPU, in this process; checkpoints with quantised activations stay with vLLM."""
    stock = compressed_tensors.CompressedTensorsW4A4Fp4

    def scheme(use_a16: bool = False) -> CompressedTensorsScheme:
        return TiledNvfp4() if use_a16 else stock(use_a16=False)

    compressed_tensors.CompressedTensorsW4A4Fp4 = scheme


def register_fp4() -> None:
    """Dequantise at load wherever compressed-tensors would pick vLLM's 4-bit float schemes, in this process."""
    compressed_tensors.CompressedTensorsW4A4Fp4 = DequantisedNvfp4
    compressed_tensors.CompressedTensorsW4A4Mxfp4 = DequantisedMxfp4
