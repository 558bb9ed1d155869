"""vLLM's RMSNorm with noise by adapter slot.

    y_t = rms(x_t) · (w + Z[slot(t) + 1])

Each noisy norm holds Z [max_loras + 1, d] in fp32 (row 0 = 0, for tokens without an adapter). The slot of a token comes
from the LoRA kernels' own persistent index buffer, so compiled code and CUDA graphs see every change. The rows are
written by `lora_manager`, wherever an adapter gets a slot.

Runs inside vLLM's worker process; loaded by `vllm_plugin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from qerld_kernels.architectures import architecture_of, noisy_norm_names
from qerld_kernels.noise import Noise, scaled_noise
from qerld_kernels.rmsnorm import rmsnorm_slots
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

__all__ = ["NoiseSlots", "SlotGemmaRMSNorm", "SlotRMSNorm", "find_noisy_norms", "register_norms"]

NormOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class _SlotNorm(torch.nn.Module):
    """Mixin in front of a vLLM norm: stock until `install` gives it a table, then rows by slot."""

    unit_offset = False
    weight: torch.Tensor
    variance_epsilon: float
    noise_table: torch.Tensor | None
    slots: torch.Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("noise_table", None, persistent=False)
        self.register_buffer("slots", None, persistent=False)

    def install(self, rows: int, slots: torch.Tensor) -> None:
        """Give the norm a zero table of `rows` rows and the buffer int64 [max tokens] of each token's slot."""
        channels = self.weight.shape[0]
        self.noise_table = torch.zeros(rows, channels, dtype=torch.float32, device=self.weight.device)
        self.slots = slots

    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """x and residual [tokens, d] → the norm, and the sum x + residual when there is a residual."""
        if self.noise_table is None or self.slots is None:
            return super().forward_native(x, residual)  # type: ignore[misc,no-any-return]
        return self._with_noise(x, residual, self.noise_table, self.slots)

    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> NormOutput:
        """As `forward_native`; without a table vLLM's own kernel."""
        if self.noise_table is None or self.slots is None:
            return super().forward_cuda(x, residual)  # type: ignore[misc,no-any-return]
        return self._with_noise(x, residual, self.noise_table, self.slots)

    def _with_noise(
        self, x: torch.Tensor, residual: torch.Tensor | None, table: torch.Tensor, slots: torch.Tensor
    ) -> NormOutput:
        # Rounded to x's dtype before the norm, as transformers (the trainer) and vLLM's CUDA kernel do.
        total = x if residual is None else x + residual
        y = rmsnorm_slots(total, self.weight.data, table, slots, self.variance_epsilon, self.unit_offset)
        return y if residual is None else (y, total)


class SlotRMSNorm(_SlotNorm, RMSNorm):  # type: ignore[misc]
    """y = rms(x) · (w + Z[slot + 1])"""


class SlotGemmaRMSNorm(_SlotNorm, GemmaRMSNorm):  # type: ignore[misc]
    """y = rms(x) · (1 + w + Z[slot + 1])"""

    unit_offset = True


class NoiseSlots:
    """The noise of each adapter id, and the rows of each norm's table that carry it."""

    def __init__(self, norms: Mapping[str, _SlotNorm], max_loras: int, slots: torch.Tensor) -> None:
        self._norms = dict(norms)
        self._noise: dict[int, Noise] = {}
        slots.fill_(-1)  # vLLM leaves it uninitialised, and padded CUDA graph batches read beyond what it has written
        for norm in self._norms.values():
            norm.install(max_loras + 1, slots)

    def register(self, adapter_id: int, noise: Noise) -> None:
        """Set the noise an adapter will carry, before it gets a slot."""
        self._noise[adapter_id] = noise

    def forget(self, adapter_id: int) -> None:
        """Drop an adapter's noise; ids without an entry are clean and need no call."""
        self._noise.pop(adapter_id, None)

    def write(self, slot: int, adapter_id: int) -> None:
        """Write the adapter's rows, zeros when it is clean, after it got the slot."""
        noise = self._noise.get(adapter_id)
        for name, norm in self._norms.items():
            assert norm.noise_table is not None
            row = norm.noise_table[slot + 1]
            if noise is None or noise.sigma == 0:
                row.zero_()
            else:
                row.copy_(scaled_noise(noise, name, norm.weight, unit_offset=norm.unit_offset))

    def realised_share(self, slot: int, adapter_id: int) -> float:
        """Realised σ / intended σ of the adapter in the slot: how much of the noise the fp32 sum w + Z keeps.

        Near 1; at σ = 0 it is 1 by definition. Root mean square over all channels of all noisy norms.
        """
        noise = self._noise.get(adapter_id)
        if noise is None or noise.sigma == 0:
            return 1.0
        realised = intended = 0.0
        for norm in self._norms.values():
            assert norm.noise_table is not None
            scale = norm.weight.detach().float() + (1.0 if norm.unit_offset else 0.0)
            sigma = noise.sigma * (scale.double().abs().mean().item() if noise.relative else 1.0)
            kept = (scale + norm.noise_table[slot + 1]) - scale
            realised += kept.double().square().sum().item()
            intended += sigma**2 * kept.numel()
        return float((realised / intended) ** 0.5)


def find_noisy_norms(model: torch.nn.Module) -> dict[str, _SlotNorm]:
    """The norms of a loaded vLLM model that carry noise, 2 × layers, in order of depth.

    Raises:
        UnsupportedArchitectureError: the architecture is not in the table.
        RuntimeError: a norm is missing or was not replaced by ours.
    """
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    architecture_of(config)
    modules = dict(model.named_modules())
    norms = {}
    for name in noisy_norm_names(config):
        norm = modules.get(name)
        if not isinstance(norm, _SlotNorm):
            raise RuntimeError(f"{name}: expected a norm with noise slots, found {type(norm).__name__}")
        norms[name] = norm
    return norms


def register_norms() -> None:
    """Replace vLLM's norms in this process; models built afterwards use ours."""
    CustomOp.register_oot(SlotRMSNorm, name="RMSNorm")
    CustomOp.register_oot(SlotGemmaRMSNorm, name="GemmaRMSNorm")
