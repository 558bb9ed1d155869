"""Durable version folders.

    OUT/adapter/adapter_config.json, adapter_model.safetensors   plain PEFT folder, bf16: what is served
    OUT/state.safetensors                                        fp32 master LoRA and the optimiser's moments
    OUT/state.json                                               step, seed, configuration's digest, sha256 of each file

A folder is written aside, each file fsynced, then renamed, then the parent folder fsynced: it is there whole or
not at all.
Every digest is checked on reading. A step draws its random numbers from the request's seed, which is recorded, so there
is no generator state to keep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from qerld_kernels.folders import sha256_of
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .messages import INDEX_FILE, LoraShape, TrainerConfig

FORMAT = 1
ADAPTER_FILE = "adapter/adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter/adapter_config.json"
STATE_FILE = "state.safetensors"
# Tensors of a state, by field.
PARTS = ("weights", "first_moments", "second_moments", "absmax")
PEFT_PREFIX = "base_model.model."


class VersionFolderError(RuntimeError):
    """A version folder is missing, half-written, corrupted, of another shape, or in the way."""


@dataclass(frozen=True)
class AdapterState:
    """Everything that a further step depends on. Tensors are fp32, keyed by PEFT name without `base_model.model.`.

    An 8-bit optimiser's moments are uint8, and `absmax` has the scales of their blocks by `first/NAME`, `second/NAME`.

    `updates` counts optimiser updates (Adam's bias correction), `step` the learner's steps, skipped ones too.
    """

    weights: dict[str, Tensor]
    first_moments: dict[str, Tensor]
    second_moments: dict[str, Tensor]
    updates: int
    step: int
    absmax: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class VersionFiles:
    """Digest (hex) and size of the adapter file, and the text of state.json, which identifies the whole folder."""

    adapter_sha256: str
    adapter_bytes: int
    index: str


def config_digest(config: TrainerConfig) -> str:
    """Return the hex sha256 of the whole configuration."""
    return hashlib.sha256(msgspec.json.encode(config)).hexdigest()


def write_version(out_dir: Path, state: AdapterState, config: TrainerConfig, seed: int) -> VersionFiles:
    """Write a version folder so that a crash at any moment leaves either nothing or all of it under `out_dir`.

    Raises `VersionFolderError` when `out_dir` exists, `OSError` when the disk is full (nothing is left behind).
    """
    refuse_existing(out_dir)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _aside(out_dir) as folder:
        (folder / "adapter").mkdir()
        _write_text(folder / ADAPTER_CONFIG_FILE, json.dumps(_peft_config(config), indent=2, sort_keys=True))
        published = {PEFT_PREFIX + name: tensor.bfloat16().cpu().contiguous() for name, tensor in state.weights.items()}
        _save(published, folder / ADAPTER_FILE)
        _save(_flatten(state), folder / STATE_FILE)
        files = {name: _describe(folder / name) for name in (ADAPTER_CONFIG_FILE, ADAPTER_FILE, STATE_FILE)}
        index = json.dumps(_index(state, config, seed, files), indent=2, sort_keys=True)
        _write_text(folder / INDEX_FILE, index)
        _sync(folder / "adapter")
        _sync(folder)
        os.rename(folder, out_dir)
    _sync(out_dir.parent)
    return VersionFiles(files[ADAPTER_FILE]["sha256"], files[ADAPTER_FILE]["bytes"], index)


def read_version(folder: Path, config: TrainerConfig, device: torch.device) -> tuple[AdapterState, str]:
    """Return the state in a version folder and the text of its state.json.

    Raises `VersionFolderError` when a file is missing, its size or digest differs, or the LoRA shape is another one.
    """
    text = read_index(folder, config)
    index = json.loads(text)
    if index.get("format") != FORMAT:
        raise VersionFolderError(
            f"{folder}: format must be {FORMAT}, got {index.get('format')}; use the matching release"
        )
    for name, expected in index["files"].items():
        _verify(folder / name, expected)
    tensors = _load(folder / STATE_FILE, device)
    parts = {part: _strip(tensors, part) for part in PARTS}
    return AdapterState(**parts, updates=index["updates"], step=index["step"]), text


def read_index(folder: Path, config: TrainerConfig) -> str:
    """Return the text of state.json.

    Raises `VersionFolderError` when the folder is not a finished version, or one of another format or LoRA shape.
    """
    path = folder / INDEX_FILE
    try:
        text = path.read_text()
        index = json.loads(text)
        found = msgspec.convert(index["lora"], LoraShape)
    except FileNotFoundError as error:
        raise VersionFolderError(f"{path} is missing: not a finished version; use the last committed one") from error
    except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
        raise VersionFolderError(f"{path} cannot be read ({error}); use the last committed version") from error
    if index.get("format") != FORMAT:
        raise VersionFolderError(
            f"{folder}: format must be {FORMAT}, got {index.get('format')}; use the matching release"
        )
    _same_shape(folder, found, config.lora)
    return text


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Return a PEFT folder's weights, fp32 on the CPU, without the `base_model.model.` prefix."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise VersionFolderError(
            f"{folder} holds no adapter_model.safetensors; give a PEFT folder saved as safetensors"
        )
    tensors = _load(path, torch.device("cpu"))
    return {name.removeprefix(PEFT_PREFIX): tensor.float() for name, tensor in tensors.items()}


def refuse_existing(out_dir: Path) -> None:
    """Raise `VersionFolderError` when `out_dir` exists: a version is never overwritten."""
    if out_dir.exists():
        raise VersionFolderError(
            f"{out_dir} exists already; versions are never overwritten: sweep it or choose another"
        )


@contextlib.contextmanager
def _aside(out_dir: Path) -> Iterator[Path]:
    """Yield a fresh folder beside `out_dir`, removed unless renamed by then; first remove what a crash left."""
    prefix = f".writing-{out_dir.name}-"
    for leftover in out_dir.parent.glob(prefix + "*"):
        shutil.rmtree(leftover)
    folder = out_dir.parent / f"{prefix}{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flatten(state: AdapterState) -> dict[str, Tensor]:
    return {f"{part}/{name}": t.cpu().contiguous() for part in PARTS for name, t in getattr(state, part).items()}


def _strip(tensors: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(part + "/"): t for name, t in tensors.items() if name.startswith(part + "/")}


def _index(state: AdapterState, config: TrainerConfig, seed: int, files: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": state.step,
        "updates": state.updates,
        "seed": seed,
        "config_sha256": config_digest(config),
        "lora": msgspec.to_builtins(config.lora),
        "files": files,
    }


def _peft_config(config: TrainerConfig) -> dict[str, Any]:
    """Return the adapter_config.json that PEFT and vLLM read; the base is named, not located."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(config.base).name,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(config.lora.target_modules),
        "inference_mode": True,
        "use_rslora": config.lora.rslora,
        "use_dora": False,
    }


def _same_shape(folder: Path, found: LoraShape, wanted: LoraShape) -> None:
    for field in ("rank", "alpha", "target_modules", "rslora"):
        before, now = getattr(found, field), getattr(wanted, field)
        if before != now:
            raise VersionFolderError(
                f"{folder}: lora.{field} is {before}, the run's is {now}; a run keeps its LoRA shape"
            )


def _describe(path: Path) -> dict[str, Any]:
    """Fsync a file and return its digest and size."""
    _sync(path)
    return {"sha256": sha256_of(path), "bytes": path.stat().st_size}


def _verify(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise VersionFolderError(f"{path} is missing: the version is half-written; use the last committed one")
    if path.stat().st_size != expected["bytes"]:
        raise VersionFolderError(
            f"{path} has {path.stat().st_size} bytes, {expected['bytes']} were committed; use another version"
        )
    digest = sha256_of(path)
    if digest != expected["sha256"]:
        raise VersionFolderError(
            f"{path} has sha256 {digest}, {expected['sha256']} was committed; the file was altered: use another version"
        )


def _load(path: Path, device: torch.device) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path, device=str(device))
        return tensors
    except SafetensorError as error:
        raise VersionFolderError(f"{path} cannot be read ({error}); use the last committed version") from error


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # which is no OSError, also when the disk is full
        raise OSError(f"{path} cannot be written ({error}); free space on its disk") from error


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
