"""`quantize_checkpoint`: what it writes, how little memory it takes, and that failures leave nothing behind."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from qerld_kernels import mxfp4, safetensors_io
from qerld_kernels.checkpoint import CheckpointError, CheckpointReader
from qerld_kernels.errors import QuantizationError
from qerld_kernels.formats import MXFP4
from qerld_kernels.nvfp4 import dequantize, global_scale_for, quantize
from qerld_kernels.quantizer import quantize_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_llama import LAYERS, MakeModel


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_every_layer_is_quantised_with_its_groups_scale(
    make_model: MakeModel, tensors: dict[str, torch.Tensor], tmp_path: Path, shards: int, search: Any
) -> None:
    quantize_checkpoint(make_model(shards=shards), tmp_path / "out", search=search)
    reader = CheckpointReader(tmp_path / "out")
    for group in reader.architecture.groups(LAYERS):
        shared = global_scale_for([tensors[f"{name}.weight"] for name in group])
        for name in group:
            expected = quantize(tensors[f"{name}.weight"], global_scale=shared, search=search)
            assert torch.equal(dequantize(reader.linear(name)), dequantize(expected))
            assert torch.equal(reader.linear(name).global_scale, shared), "1 / g must be stored so that g comes back"
    assert reader.flushed_scales == 0


def test_other_tensors_and_files_are_copied_unchanged(
    make_model: MakeModel, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model = make_model(shards=3)
    (model / "pytorch_model.bin").write_bytes(b"stale")
    quantize_checkpoint(model, tmp_path / "out")
    reader = CheckpointReader(tmp_path / "out")
    for name, tensor in tensors.items():
        if "proj" not in name:
            assert torch.equal(reader.tensor(name), tensor)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_the_safetensors_library_and_compressed_tensors_read_what_is_written(
    make_model: MakeModel, tmp_path: Path
) -> None:
    quantize_checkpoint(make_model(shards=2), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, framework="pt") as file:
            assert name in file.keys()  # noqa: SIM118 - not a dict
            assert file.metadata() == {"format": "pt"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.config_groups["group_0"].weights.strategy == "tensor_group"
    assert parsed.config_groups["group_0"].input_activations is None


def test_progress_ends_at_the_whole(make_model: MakeModel, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    quantize_checkpoint(make_model(), tmp_path / "out", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert (
        calls[-1][0] == calls[-1][1] == sum(t.nbytes for t in load_file(tmp_path / "model/model.safetensors").values())
    )


def test_an_empty_folder_is_filled_and_a_used_one_refused(make_model: MakeModel, tmp_path: Path) -> None:
    model, out = make_model(), tmp_path / "out"
    out.mkdir()
    quantize_checkpoint(model, out)
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(QuantizationError, match="is not empty"):
        quantize_checkpoint(model, out)
    assert sorted(path.name for path in out.iterdir()) == before
    with pytest.raises(QuantizationError, match="is not a folder"):
        quantize_checkpoint(model, out / "config.json")


def test_a_quantised_model_is_not_quantised_again(make_model: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_model(), tmp_path / "out")
    with pytest.raises(QuantizationError, match="already quantised"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "twice")


def only_the_model_is_left(tmp_path: Path) -> bool:
    return [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((96, 64), float("nan"), dtype=torch.bfloat16), "finite"),
        (torch.full((96, 64), float("inf")), "finite"),
    ],
)
def test_bad_weights_leave_no_folder(
    make_model: MakeModel, tensors: dict[str, torch.Tensor], tmp_path: Path, weight: torch.Tensor, message: str
) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = weight
    with pytest.raises(QuantizationError, match=message):
        quantize_checkpoint(make_model(weights=tensors), tmp_path / "out")
    assert only_the_model_is_left(tmp_path)


def test_inputs_that_are_no_multiple_of_a_block_are_refused(
    make_model: MakeModel, tensors: dict[str, torch.Tensor], tmp_path: Path, llama_config: dict[str, Any]
) -> None:
    for name in [name for name in tensors if ".mlp." in name]:
        tensors[name] = torch.zeros((64, 40) if "down" in name else (40, 64))
    with pytest.raises(QuantizationError, match=r"mlp.down_proj.weight: .* multiple of 16 for NVFP4, got \[64, 40\]"):
        quantize_checkpoint(make_model(config={**llama_config, "intermediate_size": 40}), tmp_path / "out")
    assert only_the_model_is_left(tmp_path)


def test_a_disk_that_fills_up_leaves_no_folder(make_model: MakeModel, tmp_path: Path) -> None:
    """The file size limit of a child process stands for the disk: the kernel refuses the write either way."""
    model = make_model()
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from qerld_kernels.quantizer import quantize_checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "try: quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except OSError as error: sys.exit(error.errno)"
    )
    result = subprocess.run([sys.executable, "-c", code, model, tmp_path / "out"], check=False)
    assert result.returncode == errno.EFBIG
    assert only_the_model_is_left(tmp_path)


def test_a_disk_too_small_is_refused_before_writing(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("qerld_kernels.quantizer.shutil.disk_usage", lambda _: usage)
    with pytest.raises(QuantizationError, match="GB free"):
        quantize_checkpoint(make_model(), tmp_path / "out")
    assert only_the_model_is_left(tmp_path)


def test_a_model_cut_while_it_is_read_leaves_no_folder(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model()

    def cut(done: int, total: int, name: str) -> None:
        with (model / "model.safetensors").open("r+b") as file:
            file.truncate(20_000)

    with pytest.raises(CheckpointError, match="cut while being read"):
        quantize_checkpoint(model, tmp_path / "out", progress=cut)
    assert only_the_model_is_left(tmp_path)


MEMORY_CODE = """
import re, resource, sys
from pathlib import Path
import torch
from qerld_kernels.quantizer import quantize_checkpoint
torch.set_num_threads(1)
quantize_checkpoint(Path(sys.argv[1]), Path(sys.argv[3]))  # imports and allocator warmed up on the small model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_checkpoint(Path(sys.argv[2]), Path(sys.argv[4]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_is_bounded_by_the_largest_layer_not_by_the_model(
    make_model: MakeModel, tmp_path: Path, llama_config: dict[str, Any]
) -> None:
    layers, width = 12, 1024
    big: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.zeros(8, width, dtype=torch.bfloat16)}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            big[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = torch.randn(width, width).bfloat16()
        for name in ("gate", "up", "down"):
            big[f"model.layers.{layer}.mlp.{name}_proj.weight"] = torch.randn(width, width).bfloat16()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            big[f"model.layers.{layer}.{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    big["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": width // 4, "vocab_size": 8}
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers}
    config = {**llama_config, **sizes, **heads}
    small, large = make_model(), make_model("large", big, shards=3, config=config)
    megabytes = sum(tensor.nbytes for tensor in big.values()) / 2**20
    arguments = [small, large, tmp_path / "small-out", tmp_path / "large-out"]
    result = subprocess.run([sys.executable, "-c", MEMORY_CODE, *arguments], check=True, capture_output=True, text=True)
    grown = int(result.stdout) / 1024
    # One layer is 2 MB and the temporaries of a chunk of 2**20 weights some 30 MB; the model has 168 MB, a shard 56.
    assert megabytes > 160
    assert grown < 45, f"peak memory grew by {grown:.0f} MB on a model of {megabytes:.0f} MB"


def test_shard_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    entries = {"a": (torch.float32, (2,)), "b": (torch.float32, (1,))}
    with (
        pytest.raises(ValueError, match="expected 8 bytes of a"),
        safetensors_io.ShardWriter(tmp_path / "x", entries) as w,
    ):
        w.write("a", torch.zeros(3))
    with (
        pytest.raises(ValueError, match="1 tensors were not written"),
        safetensors_io.ShardWriter(tmp_path / "y", entries) as w,
    ):
        w.write("a", torch.zeros(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from qerld_service.quantize import main

    assert main([str(tmp_path), str(tmp_path / "out"), "--device", "cuda"]) == 2
    assert "no GPU here; use cpu or auto" in capsys.readouterr().err


def test_mxfp4_is_written_and_read(make_model: MakeModel, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    quantize_checkpoint(make_model(shards=2), tmp_path / "out", form=MXFP4)
    reader = CheckpointReader(tmp_path / "out")
    assert (reader.layout, reader.format) == ("compressed-tensors", MXFP4)
    reader.check_scales()
    for name in reader.linear_names:
        read, expected = reader.linear(name), mxfp4.quantize(tensors[f"{name}.weight"])
        assert read.format is MXFP4
        assert torch.equal(read.packed, expected.packed)
        assert torch.equal(read.scale, expected.scale)
    assert not any(name.endswith("global_scale") for name in reader.names)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    assert (scheme.weights.num_bits, scheme.weights.group_size) == (4, 32)


def test_mxfp4_scales_that_are_nan_are_refused(make_model: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_model(), tmp_path / "out", form=MXFP4)
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    stored["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = 255
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=r"mlp.up_proj.weight_scale holds NaN in 1 of"):
        CheckpointReader(tmp_path / "out").check_scales()


def test_a_folder_of_two_formats_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_model(), tmp_path / "out", form=MXFP4)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mixes NVFP4 and MXFP4"):
        CheckpointReader(tmp_path / "out")
