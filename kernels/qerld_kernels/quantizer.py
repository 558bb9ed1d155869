"""Quantises a Hugging Face model folder to 4 bits, tensor by tensor, into a folder that stock vLLM loads.

Written is compressed-tensors' `nvfp4-pack-quantized` or `mxfp4-pack-quantized`, weights only (W4A16), or bitsandbytes'
nf4. Linear layers of the decoder are quantised; embeddings, norms, biases and lm_head are copied. Memory is bounded by
the largest linear layer, not by a shard.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qerld_kernels import mxfp4, nf4
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.errors import QuantizationError
from qerld_kernels.folders import appearing_folder
from qerld_kernels.formats import MXFP4, NF4, NVFP4, Format
from qerld_kernels.model_folder import open_model
from qerld_kernels.nvfp4 import Search, global_scale_for
from qerld_kernels.quantize import quantize
from qerld_kernels.safetensors_io import ShardWriter, nbytes_of, read_bytes

__all__ = ["Progress", "quantization_config", "quantize_checkpoint"]

Progress = Callable[[int, int, str], None]
"""Called with (bytes of the source done, bytes in all, tensor name) after each tensor."""

_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".md")
_NOT_COPIED = ("config.json", "model.safetensors.index.json")

_Entries = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def quantization_config(form: Format = NVFP4) -> dict[str, Any]:
    """The `quantization_config` of config.json: 4-bit weights, activations untouched."""
    if form is NF4:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
        }
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if form is NVFP4 else "group",
        "group_size": form.block,
        "symmetric": True,
        "dynamic": False,
    }
    name = form.checkpoint
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": name,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def quantize_checkpoint(
    model: Path,
    out: Path,
    *,
    form: Format = NVFP4,
    search: Search = "absmax",
    device: str = "cpu",
    progress: Progress | None = None,
) -> None:
    """Quantise the folder `model` into the new or empty folder `out`, which appears complete or not at all.

    Every device makes the same bytes. `search` is of NVFP4; MXFP4 has one rule for its scales.

    Raises:
        CheckpointError: `model` is broken, or lacks a tokenizer, without which the copy could not be used.
        QuantizationError: `out` is in use, the model is already quantised, a layer's inputs are no multiple of the
            block, a weight is not finite, the disk is too small, or the device's memory is.
        OSError: writing failed; `out` is left as it was.
    """
    reader = open_model(model)
    _check_source(reader, form)
    _check_target(out)
    plans = {path: _entries(reader, list(infos), form) for path, infos in reader.shards.items()}
    _check_disk(out, sum(nbytes_of(*entry) for plan in plans.values() for entry in plan.values()))
    with appearing_folder(out) as folder:
        _copy_files(reader, folder, form)
        try:
            _write_shards(reader, folder, plans, form, search, device, progress)
        except torch.OutOfMemoryError as error:
            raise QuantizationError(
                f"{device}: its memory is full; stop what else runs there, or take the CPU"
            ) from error
        _write_index(folder, plans)


def _check_source(reader: CheckpointReader, form: Format) -> None:
    if reader.layout != "plain":
        raise QuantizationError(f"{reader.folder}: is already quantised ({reader.layout}); give the unquantised model")
    for name in reader.linear_names:
        shape = reader.info(f"{name}.weight").shape
        if shape[1] % form.block:
            raise QuantizationError(
                f"{name}.weight: must be [out, in] with in a multiple of {form.block} for {form.name}, "
                f"got {list(shape)}"
            )


def _check_target(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise QuantizationError(f"{out}: is not a folder; give a new or an empty one")
    if out.is_dir() and any(out.iterdir()):
        count = sum(1 for _ in out.iterdir())
        raise QuantizationError(f"{out}: is not empty ({count} entries); give a new or an empty folder, or remove them")


def _check_disk(out: Path, needed: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise QuantizationError(
            f"{out}: needs {needed / 1e9:.2f} GB, its disk has {free / 1e9:.2f} GB free; "
            "free some or give a folder on another disk"
        )


def _entries(reader: CheckpointReader, names: list[str], form: Format) -> _Entries:
    """What one source shard becomes: name → (dtype, shape), in writing order."""
    linears = set(reader.linear_names)
    entries: _Entries = {}
    for name in names:
        info, module = reader.info(name), name.removesuffix(".weight")
        if module not in linears or not name.endswith(".weight"):
            entries[name] = (info.dtype, info.shape)
            continue
        out, features = info.shape
        if form is NF4:
            stored = nf4.stored_shapes(out, features)
            entries |= {f"{name}.{part}".rstrip("."): entry for part, entry in stored.items()}
            continue
        entries[f"{module}.weight_packed"] = (torch.uint8, (out, features // 2))
        entries[f"{module}.weight_scale"] = (form.scale, (out, features // form.block))
        if form is NVFP4:
            entries[f"{module}.weight_global_scale"] = (torch.float32, (1,))
    return entries


def _write_shards(
    reader: CheckpointReader,
    folder: Path,
    plans: dict[Path, _Entries],
    form: Format,
    search: Search,
    device: str,
    progress: Progress | None,
) -> None:
    groups = {name: group for group in reader.architecture.groups(reader.layers) for name in group}
    shared: dict[tuple[str, ...], torch.Tensor] = {}
    total = sum(info.end - info.start for info in reader.infos.values())
    done = 0
    for path, entries in plans.items():
        with ShardWriter(folder / path.name, entries) as writer:
            for name, info in reader.shards[path].items():
                module = name.removesuffix(".weight")
                if module == name or module not in groups:
                    writer.write(name, read_bytes(info))
                elif form is not NVFP4:
                    _write_ungrouped(writer, module, reader.tensor(name).to(device), form)
                else:
                    group = groups[module]
                    if group not in shared:
                        shared[group] = _group_scale(reader, group)
                    _write_linear(writer, module, reader.tensor(name).to(device), shared[group], search)
                done += info.end - info.start
                if progress is not None:
                    progress(done, total, name)


def _group_scale(reader: CheckpointReader, group: tuple[str, ...]) -> torch.Tensor:
    """The global scale of a fused group, holding one member at a time."""
    return global_scale_for(reader.tensor(f"{name}.weight") for name in group)


def _write_linear(writer: ShardWriter, module: str, weight: torch.Tensor, g: torch.Tensor, search: Search) -> None:
    try:
        quantised = quantize(weight, global_scale=g, search=search)
    except QuantizationError as error:
        raise QuantizationError(f"{module}.{error}") from error
    writer.write(f"{module}.weight_packed", quantised.packed.cpu())
    writer.write(f"{module}.weight_scale", quantised.scale.cpu())
    writer.write(f"{module}.weight_global_scale", (1.0 / quantised.global_scale).reshape(1).cpu())


def _write_ungrouped(writer: ShardWriter, module: str, weight: torch.Tensor, form: Format) -> None:
    """In a format without a scale that fused layers share."""
    try:
        if form is MXFP4:
            made = mxfp4.quantize(weight)
            stored = {f"{module}.weight_packed": made.packed, f"{module}.weight_scale": made.scale}
        else:
            stored = {f"{module}.weight.{part}".rstrip("."): value for part, value in nf4.quantize(weight).items()}
    except QuantizationError as error:
        raise QuantizationError(f"{module}.{error}") from error
    for name, value in stored.items():
        writer.write(name, value.cpu())


def _copy_files(reader: CheckpointReader, folder: Path, form: Format) -> None:
    """Tokenizer, generation settings, chat template, licence; and config.json with the quantisation added."""
    for path in sorted(reader.folder.iterdir()):
        wanted = path.suffix in _COPIED_SUFFIXES or path.name.startswith(("LICENSE", "NOTICE"))
        if path.is_file() and wanted and path.name not in _NOT_COPIED:
            shutil.copyfile(path, folder / path.name)
    _write_json(folder / "config.json", {**reader.config, "quantization_config": quantization_config(form)})


def _write_index(folder: Path, plans: dict[Path, _Entries]) -> None:
    if len(plans) == 1 and next(iter(plans)).name == "model.safetensors":
        return
    weight_map = {name: path.name for path, entries in plans.items() for name in entries}
    size = sum(nbytes_of(*entry) for entries in plans.values() for entry in entries.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
