"""Reading NVFP4 folders of both layouts, and refusing broken ones with the tensor or file that is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from qerld_kernels.architectures import UnsupportedArchitectureError
from qerld_kernels.checkpoint import CheckpointError, CheckpointReader
from qerld_kernels.nvfp4 import MIN_SCALE, dequantize
from qerld_kernels.quantizer import quantization_config, quantize_checkpoint
from safetensors.torch import load_file, save_file
from tiny_llama import CONFIG, LAYERS, SHAPES, MakeModel

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def quantised(make_model: MakeModel, tmp_path: Path) -> Path:
    quantize_checkpoint(make_model(), tmp_path / "nvfp4")
    return tmp_path / "nvfp4"


def edit(folder: Path, **changes: torch.Tensor | None) -> Path:
    """Replace (or with None remove) the tensors of q in layer 0."""
    tensors = load_file(folder / "model.safetensors")
    for suffix, value in changes.items():
        tensors.pop(f"{Q}.{suffix}", None)
        if value is not None:
            tensors[f"{Q}.{suffix}"] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def modelopt_folder(make_model: MakeModel, tensors: dict[str, torch.Tensor]) -> tuple[Path, dict[str, torch.Tensor]]:
    """NVIDIA's layout written by hand: weight uint8, weight_scale e4m3, weight_scale_2 a multiplier, one each."""
    expected, stored = {}, dict(tensors)
    for layer in range(LAYERS):
        for name, (out, features) in SHAPES.items():
            module = f"model.layers.{layer}.{name}"
            weight = stored.pop(f"{module}.weight").float()
            multiplier = weight.abs().max() / 2688
            scale = (weight.reshape(out, -1, 16).abs().amax(2) / 6 / multiplier).to(torch.float8_e4m3fn)
            levels = weight.reshape(out, -1, 16) / (scale.float() * multiplier).unsqueeze(2)
            stored[f"{module}.weight"] = pack_fp4_to_uint8(levels.reshape(out, features))
            stored[f"{module}.weight_scale"] = scale
            stored[f"{module}.weight_scale_2"] = multiplier
            stored[f"{module}.input_scale"] = torch.tensor(1.0)
            expected[module] = multiplier
    folder = make_model("modelopt", stored)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    return folder, expected


def test_modelopt_layout_is_read_with_the_largest_multiplier_of_a_fused_group(
    make_model: MakeModel, tensors: dict[str, torch.Tensor]
) -> None:
    folder, multipliers = modelopt_folder(make_model, tensors)
    reader = CheckpointReader(folder)
    assert reader.layout == "modelopt"
    for group in reader.architecture.groups(LAYERS):
        for name in group:
            assert torch.equal(reader.linear(name).global_scale, max(multipliers[member] for member in group))
    down = "model.layers.1.mlp.down_proj"
    original = tensors[f"{down}.weight"].float()
    error = (dequantize(reader.linear(down)) - original).norm() / original.norm()
    assert 0.01 < error < 0.12


def test_a_folder_of_the_compressed_tensors_library_is_read_as_vllm_serves_it(
    make_model: MakeModel, tensors: dict[str, torch.Tensor]
) -> None:
    scheme, stored, divisors = preset_name_to_scheme("NVFP4A16", ["Linear"]), dict(tensors), {}
    for layer in range(LAYERS):
        for name, (out, _) in SHAPES.items():
            module = f"model.layers.{layer}.{name}"
            weight = stored.pop(f"{module}.weight").float()
            divisors[module] = (2688 / weight.abs().max()).reshape(1)
            scale = (weight.reshape(out, -1, 16).abs().amax(2) / 6 * divisors[module]).to(torch.float8_e4m3fn).float()
            state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisors[module]}
            stored |= {f"{module}.{k}": v for k, v in NVFP4PackedCompressor.compress(state, scheme).items()}
    folder = make_model("theirs", stored, config={**CONFIG, "quantization_config": quantization_config()})
    reader = CheckpointReader(folder)
    for group in reader.architecture.groups(LAYERS):
        largest = torch.stack([divisors[name] for name in group]).max()
        for name in group:
            assert torch.equal(reader.linear(name).global_scale, 1.0 / largest)
            assert torch.equal(reader.linear(name).packed, stored[f"{name}.weight_packed"])


def test_shapes_are_known_without_the_tensors(
    make_model: MakeModel, tensors: dict[str, torch.Tensor], quantised: Path
) -> None:
    plain, (modelopt, _) = make_model("unquantised"), modelopt_folder(make_model, tensors)
    for folder in (plain, modelopt, quantised):
        reader = CheckpointReader(folder)
        shapes = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
        assert {name: reader.linear_shape(name) for name in reader.linear_names} == shapes


def test_small_foreign_scales_are_flushed_once_and_counted(quantised: Path) -> None:
    scale = load_file(quantised / "model.safetensors")[f"{Q}.weight_scale"].float()
    scale[0, :3] = torch.tensor([2.0**-9, 2.0**-7, 2.0**-6])
    reader = CheckpointReader(edit(quantised, weight_scale=scale.to(torch.float8_e4m3fn)))
    read = [reader.linear(f"model.layers.0.self_attn.{name}_proj") for name in "qkv"]
    assert reader.flushed_scales == 2
    assert read[0].scale.float()[0, :3].tolist() == [0.0, 0.0, MIN_SCALE]


def test_a_negative_zero_scale_is_a_zero(quantised: Path) -> None:
    scale = load_file(quantised / "model.safetensors")[f"{Q}.weight_scale"]
    scale.view(torch.uint8)[0, 0] = 0x80
    read = CheckpointReader(edit(quantised, weight_scale=scale)).linear(Q)
    assert read.scale.view(torch.uint8)[0, 0] == 0


def broken(kind: str, folder: Path) -> None:
    scale = load_file(folder / "model.safetensors")[f"{Q}.weight_scale"].clone()
    if kind == "nan":
        scale.view(torch.uint8)[1, 1] = 0x7F
    elif kind == "negative":
        scale = (-scale.float()).to(torch.float8_e4m3fn)
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        "nan": {"weight_scale": scale},
        "negative": {"weight_scale": scale},
        "scale dtype": {"weight_scale": scale.float()},
        "scale shape": {"weight_scale": scale[:, :2].contiguous()},
        "packed dtype": {"weight_packed": torch.zeros(64, 32)},
        "global nan": {"weight_global_scale": torch.tensor([float("nan")])},
        "global zero": {"weight_global_scale": torch.tensor([0.0])},
        "global dtype": {"weight_global_scale": torch.ones(1, dtype=torch.bfloat16)},
        "global missing": {"weight_global_scale": None},
        "half a group": {"weight_packed": None, "weight_scale": None, "weight": torch.zeros(64, 64)},
    }
    edit(folder, **changes[kind])


HEADERS = {
    "scale dtype": r"q_proj.weight_scale must be float8_e4m3fn \[64, 4\], got float32 \[64, 4\]",
    "scale shape": r"q_proj.weight_scale must be float8_e4m3fn \[64, 4\], got float8_e4m3fn \[64, 2\]",
    "packed dtype": r"q_proj.weight_packed must be uint8 \[64, 32\], got float32 \[64, 32\]",
    "global dtype": r"q_proj.weight_global_scale must be float32 \[1\], got bfloat16 \[1\]",
    "global missing": "q_proj.weight_global_scale is missing",
    "half a group": "q_proj is not 4-bit but its fused group",
}
VALUES = {
    "nan": "q_proj.weight_scale holds NaN in 1 of 256 block scales",
    "negative": "q_proj.weight_scale holds negative scales",
    "global nan": "q_proj.weight_global_scale must be finite and positive, got nan",
    "global zero": "q_proj.weight_global_scale must be finite and positive, got 0",
}


@pytest.mark.parametrize("kind", HEADERS)
def test_broken_headers_are_named_on_opening(quantised: Path, kind: str) -> None:
    broken(kind, quantised)
    with pytest.raises(CheckpointError, match=HEADERS[kind]):
        CheckpointReader(quantised)


@pytest.mark.parametrize("kind", VALUES)
def test_broken_scales_are_named_whichever_member_is_asked_for(quantised: Path, kind: str) -> None:
    broken(kind, quantised)
    reader = CheckpointReader(quantised)
    with pytest.raises(CheckpointError, match=VALUES[kind]):
        reader.linear("model.layers.0.self_attn.v_proj")
    with pytest.raises(CheckpointError, match=VALUES[kind]):
        reader.check_scales()


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named_on_opening(
    make_model: MakeModel, tensors: dict[str, torch.Tensor], missing: str
) -> None:
    del tensors[missing]
    with pytest.raises(CheckpointError, match=f"tensor {missing} is missing"):
        CheckpointReader(make_model(weights=tensors))


def test_a_plain_folder_has_no_nvfp4_layers(make_model: MakeModel, tensors: dict[str, torch.Tensor]) -> None:
    reader = CheckpointReader(make_model())
    assert reader.layout == "plain"
    assert torch.equal(reader.tensor(f"{Q}.weight"), tensors[f"{Q}.weight"])
    with pytest.raises(CheckpointError, match="qerld quantize"):
        reader.linear(Q)


def test_an_unknown_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_safetensors_are_refused(make_model: MakeModel, keep: int) -> None:
    folder = make_model()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated"):
        CheckpointReader(folder)


def test_a_missing_shard_is_named(make_model: MakeModel) -> None:
    folder = make_model(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: no such file"):
        CheckpointReader(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "", 7])
def test_shards_outside_the_folder_are_refused(make_model: MakeModel, name: object) -> None:
    folder = make_model(shards=3)
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())
    weights["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(weights))
    with pytest.raises(CheckpointError, match="must name files of its own folder"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    "header",
    [b"not json", b"[]", b'{"a": {"dtype": "F32"}}', b'{"a": {"dtype": "F4", "shape": [], "data_offsets": []}}'],
)
def test_a_damaged_header_is_refused(make_model: MakeModel, header: bytes) -> None:
    folder = make_model()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, UnsupportedArchitectureError, "known are .*LlamaForCausalLM"),
        ({"architectures": None}, UnsupportedArchitectureError, "missing"),
        ({"num_hidden_layers": 0}, UnsupportedArchitectureError, "num_hidden_layers"),
        ({"quantization_config": {"quant_method": "awq"}}, CheckpointError, "quant_method 'awq'"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            CheckpointError,
            "quant_algo must be NVFP4",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}}},
            CheckpointError,
            "must be NVFP4",
        ),
    ],
)
def test_configs_that_are_not_served_are_refused(
    make_model: MakeModel, llama_config: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CheckpointReader(make_model(config={**llama_config, **change}))
