"""A frozen linear layer that holds 4-bit weights: y = (x·W̃ᵀ)·g + b with W̃ = e2m1 · block scale, exact in bf16.

W̃ lives only while a product needs it, in one scratch shared by all layers; the backward dequantises again. The scale
multiplies the product in fp32, before its one rounding to the activations' dtype, which is what Marlin computes.
"""

from __future__ import annotations

from typing import Any

import torch
from qerld_kernels.dequantize import dequantize_unscaled
from qerld_kernels.formats import PackedWeight
from torch import Tensor, nn


class Scratch:
    """One buffer, as large as the largest weight that was asked of it, reused by every layer of a model."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def view(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised [rows, columns] view; valid until the next call."""
        if self._buffer.numel() < rows * columns:
            self._buffer = torch.empty(rows * columns, dtype=self.dtype, device=self.device)
        return self._buffer[: rows * columns].view(rows, columns)


class PackedLinear(nn.Module):
    """Frozen; x [..., in] in the scratch's dtype → [..., out]. `cache` keeps W̃ in that dtype."""

    qweight: Tensor  # the packed bytes; PEFT looks for the layer's device under this name
    scale: Tensor
    product_scale: float

    def __init__(self, weight: PackedWeight, bias: Tensor | None, scratch: Scratch, *, cache: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.packed.shape[0], weight.packed.shape[1] * 2
        self.register_buffer("qweight", weight.packed.to(scratch.device))
        self.register_buffer("scale", weight.scale.to(scratch.device))
        self.product_scale = float(weight.global_scale)
        self.format = weight.format
        self.bias = None if bias is None else nn.Parameter(bias.to(scratch.device, scratch.dtype), requires_grad=False)
        self._scratch = scratch
        self._cached = None
        if cache:
            self._cached = dequantize_unscaled(self.qweight, self.scale, format=self.format, dtype=scratch.dtype)

    def unscaled_weight(self) -> Tensor:
        """Return W̃ [out, in]; without a cache it is valid until another layer asks for its own."""
        if self._cached is not None:
            return self._cached
        out = self._scratch.view(self.out_features, self.in_features)
        return dequantize_unscaled(self.qweight, self.scale, format=self.format, dtype=out.dtype, out=out)

    def forward(self, x: Tensor) -> Tensor:
        """Return (x·W̃ᵀ)·g + bias; the gradient flows to x alone."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return scaled_product(x, layer.unscaled_weight().T, layer.product_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        return scaled_product(grads[0], layer.unscaled_weight(), layer.product_scale), None


def scaled_product(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return scale · (x @ weight) for x [..., k] and weight [k, n], rounded to x's dtype once."""
    rows = x.reshape(-1, x.shape[-1])
    nothing = rows.new_empty(1)  # not read: its factor beta is 0
    return torch.addmm(nothing, rows, weight, beta=0, alpha=scale).view(*x.shape[:-1], weight.shape[1])
