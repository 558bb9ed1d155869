"""The NVFP4 base against plain torch and transformers on the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
from qerld_kernels import mxfp4, nvfp4
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.linear_logprob import Head, pair_logprobs
from qerld_kernels.noise import Noise, scaled_noise
from qerld_kernels.nvfp4 import dequantize, quantize
from qerld_learner.trainer import lora
from qerld_learner.trainer.messages import LoraShape, NoiseSpec, TrainerConfig
from qerld_learner.trainer.model import BaseModel
from qerld_learner.trainer.packed_linear import PackedLinear, Scratch, scaled_product
from qerld_learner.trainer.packing import TokenSequence, build_tree
from qerld_learner.trainer.step import load_weights, token_logprobs
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from .conftest import make_groups


def plain_model(base: Path) -> nn.Module:
    """transformers' own model with every weight dequantised to fp32."""
    reader, config = CheckpointReader(base), AutoConfig.from_pretrained(base)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    quantized = {f"{name}.weight": dequantize(reader.linear(name)) for name in reader.linear_names}
    others = {name: reader.tensor(name).float() for name in reader.names if name in model.state_dict()}
    missing, unexpected = model.load_state_dict({**others, **quantized}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


def plain_logprobs(model: nn.Module, sequence: TokenSequence, temperature: float = 1.0) -> Tensor:
    whole = torch.tensor([[*sequence.prompt_ids, *sequence.completion_ids]])
    logprobs = torch.log_softmax(model(whole).logits[0, :-1] / temperature, dim=-1)
    return logprobs.gather(1, whole[0, 1:, None])[len(sequence.prompt_ids) - 1 :, 0]


def some_sequences() -> list[TokenSequence]:
    return [TokenSequence(g.prompt_ids, r.completion_ids) for g in make_groups() for r in g.rollouts]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(
    ("form", "rows", "columns"), [(nvfp4, 48, 32), (nvfp4, 5, 16), (nvfp4, 64, 176), (mxfp4, 5, 96)]
)
def test_packed_linear_equals_the_dequantised_layer(form: Any, rows: int, columns: int, cache: bool) -> None:
    torch.manual_seed(rows)
    weight, bias = form.quantize(torch.randn(rows, columns)), torch.randn(rows)
    scratch = Scratch(torch.float32, torch.device("cpu"))
    layer = PackedLinear(weight, bias, scratch, cache=cache)
    other = PackedLinear(quantize(torch.randn(256, 256)), None, scratch)
    reference = nn.Linear(columns, rows)
    reference.weight.data, reference.bias.data = form.dequantize(weight), bias
    x, again = (
        torch.randn(3, 7, columns, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in "12"
    )
    loss = layer(x).square().mean()
    other(torch.randn(1, 256))  # overwrites the scratch between the passes
    loss.backward()
    reference(again).square().mean().backward()
    torch.testing.assert_close(layer(x), reference(again), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-5, atol=1e-5)
    assert layer.qweight.numel() == rows * columns // 2


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_pair_logprobs_equal_autograd(
    temperature: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerld_kernels.linear_logprob.CHUNK_BYTES", {"cpu": 4 * 31 * 3})  # three rows a chunk
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 12, dtype=torch.float64, requires_grad=True), torch.randn(31, 12).double()
    rows, targets = torch.tensor([7, 0, 3, 3, 1, 5, 6]), torch.randint(0, 31, (7,))
    logits = hidden @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    full = torch.log_softmax(logits / temperature, dim=-1)
    expected, upstream = full[rows, targets], torch.randn(7).double()
    (wanted,) = torch.autograd.grad((expected * upstream).sum(), hidden, retain_graph=True)
    found, entropy = pair_logprobs(hidden, Head(weight, temperature, softcap), rows, targets)
    (gradient,) = torch.autograd.grad((found * upstream).sum(), hidden)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1).detach(), rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    again, entropy = pair_logprobs(hidden, Head(weight, temperature, softcap), rows, targets, entropy_gradient=True)
    both, shares = torch.randn(8).double(), -(full.exp() * full).sum(-1)
    (wanted,) = torch.autograd.grad((expected * upstream).sum() + (shares * both).sum(), hidden)
    (gradient,) = torch.autograd.grad((again * upstream).sum() + (entropy * both).sum(), hidden)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_logprobs_equal_transformers_plain_forward(config: TrainerConfig, tiny_base: Path, temperature: float) -> None:
    reference, sequences = plain_model(tiny_base), some_sequences()
    found = token_logprobs(BaseModel(config), sequences, 64, temperature, lambda *_: None)
    for sequence, logprobs in zip(sequences, found, strict=True):
        expected = plain_logprobs(reference, sequence, temperature).detach()
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=1e-4, atol=1e-4)


def test_noise_is_added_to_the_norms_and_taken_off_again(config: TrainerConfig, tiny_base: Path) -> None:
    model, sequences = BaseModel(config), some_sequences()[:2]
    clean = token_logprobs(model, sequences, 64, 1.0, lambda *_: None)
    with model.noise(NoiseSpec(0.2, 5, relative=True)):
        noisy = token_logprobs(model, sequences, 64, 1.0, lambda *_: None)
    assert token_logprobs(model, sequences, 64, 1.0, lambda *_: None) == clean
    reference = plain_model(tiny_base)
    for index in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{index}.{norm}"
            weight = reference.get_submodule(name).weight
            weight.data += scaled_noise(Noise(0.2, 5, relative=True), name, weight.data)
    expected = plain_logprobs(reference, sequences[0]).detach()
    torch.testing.assert_close(torch.tensor(noisy[0]), expected, rtol=1e-4, atol=1e-4)


def test_lora_forward_uses_bf16_rounded_weights_with_straight_through_gradient(config: TrainerConfig) -> None:
    model = BaseModel(config)
    layer_before = model.causal.get_submodule("model.layers.0.mlp.up_proj")
    masters = lora.attach(model.causal, config.lora)
    layer = model.causal.get_submodule("model.layers.0.mlp.up_proj")
    torch.manual_seed(3)
    weights = {name: torch.randn(master.shape) for name, master in masters.items()}
    load_weights(masters, weights)
    down, up = (weights[f"model.layers.0.mlp.up_proj.lora_{side}.weight"].bfloat16().float() for side in "AB")
    x = torch.randn(5, 64)
    torch.testing.assert_close(layer(x), layer_before(x) + 2.0 * x @ down.T @ up.T, rtol=1e-5, atol=1e-5)
    layer(x).sum().backward()
    wanted = 2.0 * torch.ones(5, up.shape[0]).T @ (x @ down.T)
    torch.testing.assert_close(masters["model.layers.0.mlp.up_proj.lora_B.weight"].grad, wanted, rtol=1e-5, atol=1e-5)
    with lora.bypassed(model.causal):
        assert torch.equal(layer(x), layer_before(x))
    lora.detach(model.causal)
    assert not any("lora" in name for name, _ in model.causal.named_parameters())


def test_only_adapter_parameters_need_a_gradient(config: TrainerConfig) -> None:
    model = BaseModel(config)
    masters = lora.attach(model.causal, config.lora)
    trainable = [name for name, p in model.causal.named_parameters() if p.requires_grad]
    assert len(trainable) == len(masters) == 2 * 7 * 2
    assert all("lora_" in name for name in trainable)
    assert all(master.dtype == torch.float32 for master in masters.values())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (LoraShape(rank=0), "lora.rank must be ≥ 1"),
        (LoraShape(target_modules=("qkv",)), r"lora.target_modules: \['qkv'\] are not .* choose from"),
        (LoraShape(target_modules=()), "lora.target_modules is empty"),
    ],
)
def test_lora_shapes_that_do_not_fit_are_refused(config: TrainerConfig, shape: LoraShape, message: str) -> None:
    with pytest.raises(lora.LoraError, match=message):
        lora.attach(BaseModel(config).causal, shape)


def test_activation_checkpointing_gives_the_same_gradient(config: TrainerConfig) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = BaseModel(msgspec.structs.replace(config, activation_checkpointing=checkpointing))
        masters = lora.attach(model.causal, config.lora)
        torch.manual_seed(3)
        load_weights(masters, {name: torch.randn(master.shape) / 8 for name, master in masters.items()})
        model.pair_logprobs(build_tree(some_sequences()), 1.0)[0].sum().backward()
        gradients.append([master.grad for master in masters.values()])
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 0.1), ("float16", 0.1 / 8)])
def test_half_precision_agrees_with_float32_within_its_own(
    config: TrainerConfig, dtype: Literal["bfloat16", "float16"], largest: float
) -> None:
    sequences = some_sequences()
    exact, rough = (
        token_logprobs(BaseModel(each), sequences, 64, 1.0, lambda *_: None)
        for each in (config, msgspec.structs.replace(config, dtype=dtype))
    )
    differences = [
        abs(a - b) for left, right in zip(exact, rough, strict=True) for a, b in zip(left, right, strict=True)
    ]
    assert 0 < sum(differences) / len(differences) < largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_multiplies_before_the_one_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.randn(64, 48).to(dtype)
    once = ((x.double() @ weight.double()) * 0.3).to(dtype)
    twice = ((x.double() @ weight.double()).to(dtype) * torch.tensor(0.3).to(dtype)).to(dtype)
    product = scaled_product(x, weight, 0.3)
    assert product.dtype == dtype
    assert (product != once).float().mean() < 0.02  # accumulated in fp32, not in fp64
    assert (product != twice).float().mean() > 0.2
