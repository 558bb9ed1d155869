"""NF4 as bitsandbytes stores it: what is written is the library's, what is read is what it makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from qerld_kernels import nf4
from qerld_kernels.checkpoint import CheckpointError, CheckpointReader
from qerld_kernels.errors import QuantizationError
from qerld_kernels.formats import NF4
from qerld_kernels.quantizer import quantize_checkpoint
from safetensors.torch import load_file, save_file

library = pytest.importorskip("bitsandbytes.functional")
SHAPES = [(1, 64), (5, 192), (192, 576), (300, 1024)]
UP = "model.layers.0.mlp.up_proj"


def gaussian(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_that_the_library_makes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = gaussian(shape)
    stored = nf4.quantize(weight)
    packed, state = library.quantize_4bit(weight.bfloat16(), quant_type="nf4", compress_statistics=True)
    state.dtype = dtype
    made = nf4.dequantize(nf4.read("w", stored, *shape), dtype)
    assert torch.equal(made, library.dequantize_4bit(packed, state))
    assert (made.float() - weight).norm() / weight.norm() < 0.12


@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_reads_what_is_written(shape: tuple[int, int]) -> None:
    stored = nf4.quantize(gaussian(shape))
    assert {key: (value.dtype, tuple(value.shape)) for key, value in stored.items()} == nf4.stored_shapes(*shape)
    packed = stored.pop("")
    state = library.QuantState.from_dict(dict(stored), device=torch.device("cpu"))
    theirs = library.dequantize_4bit(packed, state)
    assert torch.equal(nf4.dequantize(nf4.read("w", {"": packed, **stored}, *shape), torch.bfloat16), theirs)


def test_scales_that_are_not_nested_are_read() -> None:
    weight = gaussian((8, 128))
    packed, state = library.quantize_4bit(weight.bfloat16(), quant_type="nf4", compress_statistics=False)
    made = nf4.read("w", {"": packed, **state.as_dict(packed=True)}, 8, 128)
    assert torch.equal(nf4.dequantize(made, torch.bfloat16), library.dequantize_4bit(packed, state))


@pytest.fixture
def folder(tiny_model: tuple[Path, Path], tmp_path: Path) -> Path:
    quantize_checkpoint(tiny_model[0], tmp_path / "out", form=NF4)
    return tmp_path / "out"


def test_a_model_is_written_and_read(tiny_model: tuple[Path, Path], folder: Path) -> None:
    source, reader = CheckpointReader(tiny_model[0]), CheckpointReader(folder)
    assert (reader.layout, reader.format) == ("bitsandbytes", NF4)
    reader.check_scales()
    for name in reader.linear_names:
        weight, read = source.tensor(f"{name}.weight"), reader.linear(name)
        assert reader.linear_shape(name) == tuple(weight.shape)
        expected = nf4.read(name, nf4.quantize(weight), *weight.shape)
        assert torch.equal(read.packed, expected.packed)
        assert torch.equal(read.scale, expected.scale)
    for name in source.names:
        if "proj" not in name:
            assert torch.equal(reader.tensor(name), source.tensor(name))


def json_bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clone()


STATE = f"{UP}.weight.{nf4.STATE}"
BAD = {
    "json": (STATE, json_bytes(b"{"), "is not JSON"),
    "object": (STATE, json_bytes(b"[]"), "JSON object, got list"),
    "fp4": (STATE, json_bytes(b'{"quant_type": "fp4", "blocksize": 64}'), "must be nf4 in blocks of 64"),
    "nan": (f"{UP}.weight.nested_absmax", torch.tensor([torch.nan]), "holds NaN, infinite or negative scales"),
}


@pytest.mark.parametrize("kind", BAD)
def test_broken_states_are_named(kind: str, folder: Path) -> None:
    file, (name, value, message) = folder / "model.safetensors", BAD[kind]
    stored = load_file(file)
    stored[name] = value
    save_file(stored, file)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(folder).check_scales()


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(64), r"must be \[out, in\] with in a multiple of 64, got \(64,\)"),
        (torch.zeros(2, 96), r"got \(2, 96\)"),
        (torch.full((1, 64), torch.inf), "must be finite"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        nf4.quantize(weight)
