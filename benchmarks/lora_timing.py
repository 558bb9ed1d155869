"""Sections `lora` and `lora_tune` of kernels.py: LoRA of a linear layer by our kernels, by vLLM's and by cuBLAS.

Adapters lie in many copies in turn, so that none is in the cache, as with the layers of a model; x and y are one each,
as just written by the layer before. Three batches: one adapter, two in halves, and two in turn at random, as when a
version takes over from another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from gpu_timing import copies, library, microseconds
from qerld_kernels.jit import can_launch
from qerld_kernels.lora import Plan, add_lora, lora_reference, plan, planned_lora
from torch import Tensor

LORA_TOKENS = [8, 64, 256, 1024]
RANK, SLOTS = 32, 4
BATCHES: dict[str, Callable[[int], Tensor]] = {
    "one": lambda tokens: torch.full((tokens,), 1),
    "two in halves": lambda tokens: 1 + 2 * (torch.arange(tokens) >= tokens // 2),
    "two mixed": lambda tokens: 1 + 2 * torch.randint(0, 2, (tokens,), generator=torch.Generator().manual_seed(0)),
}
Weights = tuple[list[Tensor], list[Tensor]]


@dataclass
class Layer:
    """A fused linear layer: inputs and the widths of its pieces."""

    inputs: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(name: str, outputs: int, inputs: int, dtype: torch.dtype, device: str) -> Layer:
        width = (outputs - inputs) // 2
        pieces = {"qkv": (inputs, width, width), "gate_up": (outputs // 2, outputs // 2)}
        return Layer(inputs, pieces.get(name, (outputs,)), dtype, device)

    def bytes(self, tokens: int, adapters: int) -> int:
        """Moved at least: live adapters and x read, y read and written."""
        outputs = sum(self.widths)
        weights = RANK * (len(self.widths) * self.inputs + outputs)
        return 2 * (adapters * weights + tokens * self.inputs + 2 * tokens * outputs)

    def operations(self, tokens: int) -> int:
        return 2 * tokens * RANK * (len(self.widths) * self.inputs + sum(self.widths))

    def adapters(self, live: int) -> list[Weights]:
        """Enough stacks of slots that those in use exceed the cache."""
        count = copies(self.bytes(0, live), most=512)
        draw = {"dtype": self.dtype, "device": self.device}
        return [
            (
                [torch.randn(SLOTS, 1, RANK, self.inputs, **draw) / self.inputs**0.5 for _ in self.widths],
                [torch.randn(SLOTS, 1, width, RANK, **draw) / RANK**0.5 for width in self.widths],
            )
            for _ in range(count)
        ]

    def batch(self, tokens: int) -> tuple[Tensor, Tensor]:
        """y and x."""
        draw = {"dtype": self.dtype, "device": self.device}
        return torch.randn(tokens, sum(self.widths), **draw), torch.randn(tokens, self.inputs, **draw)


def lora_rows(
    layers: list[tuple[str, tuple[str, tuple[int, int]]]],
    tokens: list[int],
    limits: dict[str, float],
    dtype: torch.dtype,
    device: str,
) -> Iterator[dict[str, Any]]:
    """A layer's LoRA for each M and batch."""
    none = torch.tensor([False])
    for (model, (name, (outputs, inputs))), (batch, make) in product(layers, BATCHES.items()):
        layer = Layer.of(name, outputs, inputs, dtype, device)
        live = 1 if batch == "one" else 2
        stacks = layer.adapters(live)
        for count in tokens:
            (y, x), slots = layer.batch(count), make(count).to(device)
            start = y.clone()
            floor = max(
                layer.bytes(count, live) / limits["copy_bytes_per_s"],
                layer.operations(count) / limits["product_flops"],
            )
            row: dict[str, Any] = {"model": model, "layer": name, "tokens": count, "batch": batch}
            row["floor_us"] = 1e6 * floor
            wanted = lora_reference(y, x, *stacks[0], slots)
            largest = float((wanted - y).abs().max())
            for kind, calls in (
                ("ours", [lambda y, a=a, b=b: add_lora(y, x, a, b, slots, none) for a, b in stacks]),
                ("vllm", vllm_calls(x, stacks, slots, layer.widths)),
                ("cublas", cublas_calls(x, stacks) if batch == "one" else None),
            ):
                if calls is not None:
                    calls[0](found := start.clone())
                    row[f"{kind}_difference"] = float((found - wanted).abs().max()) / largest
                    row[f"{kind}_us"] = microseconds([lambda call=call: call(y) for call in calls])
            yield row


def vllm_calls(
    x: Tensor, stacks: list[Weights], slots: Tensor, widths: tuple[int, ...]
) -> list[Callable[[Tensor], None]] | None:
    """vLLM's own wrapper as its layers call it; what it prepares once a batch is not in the time."""
    punica = library("vllm.lora.punica_wrapper.punica_gpu")
    if punica is None:
        return None
    from vllm.config import LoRAConfig
    from vllm.lora.layers import LoRAMapping

    # vLLM keeps strides by the addresses of adapters, which of ours come and go.
    kept = library("vllm.lora.ops.triton_ops.utils")
    kept._LORA_A_PTR_DICT.clear()
    kept._LORA_B_PTR_DICT.clear()
    config = LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK, lora_dtype=x.dtype)
    wrapper = punica.PunicaWrapperGPU(len(x), len(x), x.device, max_loras=SLOTS, lora_config=config)
    ids = tuple((slots + 1).tolist())
    wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, SLOTS + 1)), SLOTS + 1, 1 << 17)
    return [lambda y, a=a, b=b: wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 1.0, widths) for a, b in stacks]


def cublas_calls(x: Tensor, stacks: list[Weights]) -> list[Callable[[Tensor], None]]:
    """Two products a piece, for slot 1 alone."""

    def call(y: Tensor, a: list[Tensor], b: list[Tensor]) -> None:
        begin = 0
        for down, up in zip(a, b, strict=True):
            y[:, begin : begin + up.shape[2]].addmm_(x @ down[1, 0].T, up[1, 0].T)
            begin += up.shape[2]

    return [lambda y, a=a, b=b: call(y, a, b) for a, b in stacks]


def plans(tokens: int, inputs: int) -> tuple[list[Plan], list[Plan]]:
    """Plans worth trying: other tiles of the first kernel, and of the second."""
    usual = plan(tokens, RANK, inputs)
    rows = [rows for rows in (16, 32, 64) if rows <= max(16, 1 << (tokens - 1).bit_length())]
    first = [
        replace(usual, shrink_rows=tile, inputs=deep, split=split, stages=stages)
        for tile, deep, split, stages in product(rows, (128, 256), (2, 4, 8, 16, 32), (3, 4))
    ]
    second = [
        replace(usual, expand_rows=tile, outputs=outputs, programs=programs, expand_warps=warps)
        for tile, outputs, programs, warps in product(rows, (64, 128), (132, 264, 528, 1056), (4, 8))
        if tile * outputs >= 32 * 32 * warps // 4
    ]
    return first, second


def lora_tune_rows(
    layers: list[tuple[str, tuple[str, tuple[int, int]]]], tokens: list[int], dtype: torch.dtype, device: str
) -> Iterator[dict[str, Any]]:
    """The eight fastest plans of each kernel for each layer and M, one adapter; the second with the best first."""
    if not can_launch(torch.empty(0, device=device)):
        return
    for model, (name, (outputs, inputs)) in layers:
        layer = Layer.of(name, outputs, inputs, dtype, device)
        stacks = layer.adapters(1)
        for count in tokens:
            (y, x), slots = layer.batch(count), BATCHES["one"](count).to(device)

            def took(chosen: Plan) -> float:
                return microseconds([lambda a=a, b=b: planned_lora(y, x, a, b, slots, chosen) for a, b in stacks])

            first, second = plans(count, inputs)
            row: dict[str, Any] = {"model": model, "layer": name, "tokens": count}
            row["usual_us"] = took(plan(count, RANK, inputs))
            shrink = sorted(((took(chosen), chosen) for chosen in first), key=lambda pair: pair[0])
            best = shrink[0][1]
            from_best = [replace(chosen, **_first_kernel(best)) for chosen in second]
            expand = sorted(((took(chosen), chosen) for chosen in from_best), key=lambda pair: pair[0])
            for kind, found in (("shrink", shrink), ("expand", expand)):
                row[kind] = [[us, asdict(chosen)] for us, chosen in found[:8]]
            yield row


def _first_kernel(chosen: Plan) -> dict[str, int]:
    return {name: getattr(chosen, name) for name in ("shrink_rows", "inputs", "split", "shrink_warps", "stages")}
