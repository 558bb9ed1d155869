"""The base: a Hugging Face architecture whose linear layers may hold 4-bit weights; its forward over prefix trees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from qerld_kernels.architectures import architecture_of, noisy_norm_names
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.linear_logprob import Head, pair_logprobs
from qerld_kernels.noise import Noise, scaled_noise
from qerld_kernels.rmsnorm import rmsnorm
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from .messages import NoiseSpec, TrainerConfig
from .packed_linear import PackedLinear, Scratch
from .packing import PrefixTree, tree_mask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ValueError):
    """The model folder does not fit the architecture that its config.json names."""


class PolicyNorm(nn.Module):
    """An RMSNorm in front of q/k/v or gate/up, in fp32 as the server computes it; `noise` fp32 [d] or None."""

    def __init__(self, weight: nn.Parameter, eps: float, unit_offset: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.unit_offset = weight, eps, unit_offset
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., d] in x's dtype."""
        return rmsnorm(x, self.weight, self.eps, self.noise, unit_offset=self.unit_offset)


class BaseModel:
    """A loaded base. `causal` is the Hugging Face module; it is frozen, and LoRA is attached to it in place."""

    def __init__(self, config: TrainerConfig) -> None:
        self.device, self.dtype = torch.device(config.device), DTYPES[config.dtype]
        reader = CheckpointReader(Path(config.base))
        self._norm_names = noisy_norm_names(reader.config)
        self._unit_offset = architecture_of(reader.config).norm_unit_offset
        self.causal = _skeleton(Path(config.base), self.dtype, self.device)
        self._fill(reader, config)
        self._replace_norms()
        self.causal.requires_grad_(False).train(config.activation_checkpointing)
        if config.activation_checkpointing:
            self.causal.gradient_checkpointing_enable({"use_reentrant": False})
            self.causal.enable_input_require_grads()
        text = self.causal.config
        self.vocab_size = int(text.vocab_size)
        self._window = (
            text.sliding_window if "sliding_attention" in (getattr(text, "layer_types", None) or ()) else None
        )
        self._softcap = getattr(text, "final_logit_softcapping", None)

    def hidden_states(self, tree: PrefixTree) -> Tensor:
        """Return the final hidden states [N, d] of the rows that score something."""
        body = self.causal.get_decoder()
        out = body(
            input_ids=tree.input_ids[None],
            position_ids=tree.positions[None],
            attention_mask=self._masks(tree),
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden.index_select(0, tree.rows)

    def pair_logprobs(
        self, tree: PrefixTree, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities fp32 [P] of the tree's pairs and the entropy fp32 [N] of its scored rows.

        The entropy carries a gradient only when asked to.
        """
        head = Head(self.causal.lm_head.weight, temperature * self._logit_divisor, self._softcap)
        hidden = self.hidden_states(tree)
        return pair_logprobs(hidden, head, tree.pair_row, tree.pair_target, entropy_gradient=entropy_gradient)

    @contextlib.contextmanager
    def noise(self, spec: NoiseSpec | None) -> Iterator[None]:
        """Give the norms a version's noise inside the block."""
        norms = {name: self.causal.get_submodule(name) for name in self._norm_names}
        if spec is not None and spec.sigma:
            noise = Noise(spec.sigma, spec.seed, spec.relative, spec.dtype)
            for name, norm in norms.items():
                norm.noise = scaled_noise(noise, name, norm.weight, unit_offset=self._unit_offset).to(self.device)
        try:
            yield
        finally:
            for norm in norms.values():
                norm.noise = None

    @property
    def _logit_divisor(self) -> float:
        """Granite divides its logits by a constant."""
        return float(getattr(self.causal.config, "logits_scaling", 1.0))

    def _masks(self, tree: PrefixTree) -> Any:
        full = self._additive(tree_mask(tree))
        if self._window is None:
            return full
        return {"full_attention": full, "sliding_attention": self._additive(tree_mask(tree, window=self._window))}

    def _additive(self, mask: Tensor) -> Tensor:
        """Return 0 where a row attends and −∞ elsewhere, made once: each layer would convert a boolean mask again."""
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)

    def _fill(self, reader: CheckpointReader, config: TrainerConfig) -> None:
        """Replace 4-bit layers and read every other parameter, one tensor at a time."""
        scratch = Scratch(self.dtype, self.device)
        for name in filter(reader.is_quantized, reader.linear_names):
            parent, _, leaf = name.rpartition(".")
            bias = reader.tensor(f"{name}.bias") if f"{name}.bias" in reader.names else None
            layer = PackedLinear(reader.linear(name), bias, scratch, cache=config.cache_dequantized)
            setattr(self.causal.get_submodule(parent), leaf, layer)
        for name, parameter in list(self.causal.named_parameters()):  # tied ones are listed once
            if parameter.is_meta:
                self._set(name, reader.tensor(name), parameter.shape)
        self.causal.tie_weights()

    def _set(self, name: str, tensor: Tensor, shape: torch.Size) -> None:
        if tensor.shape != shape:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}, config.json implies {list(shape)}; files do not match"
            )
        parent, _, leaf = name.rpartition(".")
        value = nn.Parameter(tensor.to(self.device, self.dtype), requires_grad=False)
        setattr(self.causal.get_submodule(parent), leaf, value)

    def _replace_norms(self) -> None:
        for name in self._norm_names:
            parent, _, leaf = name.rpartition(".")
            old = self.causal.get_submodule(name)
            eps = old.eps if hasattr(old, "eps") else old.variance_epsilon
            setattr(self.causal.get_submodule(parent), leaf, PolicyNorm(old.weight, eps, self._unit_offset))


def _skeleton(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the architecture with its parameters on the meta device and the buffers that no checkpoint holds real."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Torch's fused attention has no softcap, and transformers leaves Gemma 2's out there without a word.
    attention = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for name, module in list(model.named_modules()):
        buffers = set(module._buffers)
        if "embed_scale" in buffers:  # Gemma multiplies its embeddings by √d
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
        elif any(buffer.endswith("inv_freq") for buffer in buffers):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, type(module)(config).to(device))
        elif buffers:
            raise ModelError(f"{name}: buffers {sorted(buffers)} are unknown; this transformers release needs support")
    return model
