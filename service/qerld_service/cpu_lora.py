"""LoRA products on the CPU, one matrix product an adapter instead of a copy of its weights for every token.

vLLM's CPU path gathers [tokens, rank, width] copies of A and B for each layer: for 2,048 tokens of SmolLM2 16 GB are
copied, and the adapter takes many times longer than the model. A batch holds few adapters: tokens are grouped by slot.
Legend: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import importlib

import torch

__all__ = ["lora_product", "register_cpu_lora"]


def lora_product(inputs_TI: torch.Tensor, weights: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
    """Row t is weights[slots_T[t]] · inputs_TI[t], [T, O]; zero where the slot is −1 (no adapter).

    `weights` is [slots, O, I], or [slots, 1, O, I] as vLLM stores it.
    """
    weights = weights.squeeze(1) if weights.dim() == 4 else weights
    slots = torch.unique(slots_T).tolist()
    if len(slots) == 1 and slots[0] >= 0:
        return inputs_TI @ weights[slots[0]].T
    outputs_TO = inputs_TI.new_zeros(inputs_TI.shape[0], weights.shape[1])
    for slot in slots:
        if slot >= 0:
            rows = (slots_T == slot).nonzero().squeeze(1)
            outputs_TO[rows] = inputs_TI[rows] @ weights[slot].T
    return outputs_TO


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    outputs = lora_product(inputs.to(output_tensor.dtype), lora_b_weights.to(output_tensor.dtype), lora_indices_tensor)
    output_tensor[:, : outputs.shape[1]] = scaling * outputs


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    # vLLM may pad the adapter's outputs and the layer's differently.
    width = min(lora_b_weights.shape[-2], output_tensor.shape[1])
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, width, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    outputs = lora_product(inputs.to(output_tensor.dtype), lora_b_weights.to(output_tensor.dtype), lora_indices_tensor)
    target = output_tensor[: outputs.shape[0], slice_offset : slice_offset + slice_size]
    if add_inputs:
        target += outputs[:, :slice_size]
    else:
        target.copy_(outputs[:, :slice_size])


def register_cpu_lora() -> None:
    """Put these in the place of vLLM's functions of the same names and signatures."""
    for module in ("vllm.lora.ops.torch_ops.lora_ops", "vllm.lora.punica_wrapper.punica_cpu"):
        for function in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
            setattr(importlib.import_module(module), function.__name__, function)
