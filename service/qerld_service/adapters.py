"""Adapters as the policy server sees them: names, checks before vLLM may look at one, and the accounting of slots.

vLLM's engine dies from a request for an adapter that is not loaded, and evicts adapters by itself when slots run out.
So this module refuses such requests first and never hands out more slots than there are. It does not import vLLM.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.errors import CheckpointError
from qerld_kernels.safetensors_io import TensorInfo, read_header, read_tensor

__all__ = [
    "AdapterError",
    "AdapterInfo",
    "AdapterKey",
    "AdapterNotLoadedError",
    "Slot",
    "SlotTable",
    "SlotsFullError",
    "check_adapter",
    "linear_shapes",
]

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN_FIELDS: dict[str, tuple[Any, ...]] = {
    # PEFT fields under which the adapter is more than W + (alpha / r)·B·A on linear layers, and their plain values.
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
}
_FIRST_ID = 1_001  # vLLM's warm-up uses small ids for its dummy adapters; ours never meet them


class AdapterError(ValueError):
    """An adapter folder that cannot be served: broken, of another model or shape, or refused by vLLM."""


class SlotsFullError(RuntimeError):
    """All adapter slots are in use."""


class AdapterNotLoadedError(LookupError):
    """No adapter is loaded under this key, or it is being unloaded."""


@dataclass(frozen=True, order=True)
class AdapterKey:
    """One immutable instance of a policy version: with its noise (`noisy`), or clean (σ = 0) for canary and evaluation.

    A version whose σ is 0 needs only the clean instance.
    """

    run: str
    version: int
    noisy: bool

    @property
    def name(self) -> str:
        """`run@version`, clean instances `run@version~clean`."""
        return f"{self.run}@{self.version}" + ("" if self.noisy else "~clean")


@dataclass(frozen=True)
class AdapterInfo:
    """What `check_adapter` found: the LoRA rank, the number of adapted layers and the bytes of its tensors."""

    rank: int
    modules: int
    nbytes: int


def linear_shapes(model: CheckpointReader) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer an adapter may change, by module name `model.layers.0.self_attn.q_proj`."""
    return {name: model.linear_shape(name) for name in model.linear_names}


def check_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int) -> AdapterInfo:
    """Check a plain PEFT LoRA folder against the model's layers before vLLM sees it.

    Raises:
        AdapterError: not a plain LoRA, files missing or broken, rank above `max_rank`, a layer the model lacks,
            a shape that does not fit, one half of a pair, or a value that is not finite.
    """
    config = _read_config(folder / "adapter_config.json")
    rank = _check_config(folder, config, max_rank)
    try:
        infos = read_header(folder / "adapter_model.safetensors")
        pairs = _pairs(folder, infos)
        for module, pair in pairs.items():
            _check_pair(folder, module, pair, shapes, rank)
        for name, info in infos.items():
            if not torch.isfinite(read_tensor(info)).all():
                raise AdapterError(f"{folder}: {name} holds NaN or infinity")
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    return AdapterInfo(rank, len(pairs), sum(info.end - info.start for info in infos.values()))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read ({error.strerror}); an adapter is a PEFT folder") from error
    except ValueError as error:
        raise AdapterError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type must be LORA; other adapter types are not served")
    return config


def _check_config(folder: Path, config: Mapping[str, Any], max_rank: int) -> int:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= max_rank:
        raise AdapterError(f"{folder}: r must be from 1 to max_lora_rank = {max_rank}, got {rank!r}; raise the setting")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError(f"{folder}: lora_alpha must be a finite number, got {alpha!r}")
    for field, plain in _PLAIN_FIELDS.items():
        if config.get(field) not in plain:
            raise AdapterError(f"{folder}: {field} = {config[field]!r} is not served; only plain LoRA on linear layers")
    return rank


def _pairs(folder: Path, infos: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for name, info in infos.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"{folder}: unknown tensor {name}; expected base_model.model.<layer>.lora_A|B.weight")
        pairs.setdefault(match["module"], {})[match["side"]] = info
    if not pairs:
        raise AdapterError(f"{folder}: adapter_model.safetensors holds no tensors")
    return pairs


def _check_pair(
    folder: Path, module: str, pair: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, int]], rank: int
) -> None:
    if module not in shapes:
        raise AdapterError(f"{folder}: the served model has no linear layer {module}; is it another model's adapter?")
    out, features = shapes[module]
    for side, wanted in (("A", (rank, features)), ("B", (out, rank))):
        if side not in pair:
            raise AdapterError(f"{folder}: {module} has no lora_{side}")
        if pair[side].shape != wanted:
            raise AdapterError(
                f"{folder}: {module}.lora_{side} must be {list(wanted)} for this model, got {list(pair[side].shape)}"
            )


@dataclass
class Slot:
    """One loaded adapter. `adapter_id` is fresh for each load: a reload under a used id serves stale caches."""

    key: AdapterKey
    adapter_id: int
    folder: Path
    in_flight: int = 0
    loaded: bool = False
    draining: bool = False

    @property
    def name(self) -> str:
        """The name vLLM knows and the salt of its prefix cache: as fresh as the id."""
        return f"{self.key.name}#{self.adapter_id}"


class SlotTable:
    """Who holds which slot, and how many requests run on it. Belongs to one event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: dict[AdapterKey, Slot] = {}
        self._next_id = _FIRST_ID
        self._changed = asyncio.Condition()

    @property
    def loaded(self) -> frozenset[AdapterKey]:
        """Keys that accept requests."""
        return frozenset(key for key, slot in self._slots.items() if slot.loaded and not slot.draining)

    @property
    def in_flight(self) -> dict[AdapterKey, int]:
        """Running requests by key, also of keys that are draining."""
        return {key: slot.in_flight for key, slot in self._slots.items()}

    def reserve(self, key: AdapterKey, folder: Path) -> Slot:
        """Take a free slot for an adapter about to be loaded.

        Raises:
            AdapterError: the key already has a slot.
            SlotsFullError: no slot is free.
        """
        if key in self._slots:
            raise AdapterError(f"{key.name}: is already loaded; versions are immutable, load a new one instead")
        if len(self._slots) >= self.capacity:
            held = ", ".join(sorted(other.name for other in self._slots))
            raise SlotsFullError(f"{key.name}: all {self.capacity} slots (max_loras) are in use by {held}; unload one")
        slot = self._slots[key] = Slot(key, self._next_id, folder)
        self._next_id += 1
        return slot

    def acquire(self, key: AdapterKey) -> Slot:
        """Count a request in.

        Raises:
            AdapterNotLoadedError: the adapter is not loaded, or is being unloaded.
        """
        slot = self._slots.get(key)
        if slot is None or not slot.loaded or slot.draining:
            loaded = ", ".join(sorted(other.name for other in self.loaded)) or "none"
            raise AdapterNotLoadedError(f"{key.name}: is not loaded; loaded are {loaded}")
        slot.in_flight += 1
        return slot

    async def release(self, slot: Slot) -> None:
        """Count a request out."""
        slot.in_flight -= 1
        await self._notify()

    async def drain(self, key: AdapterKey) -> Slot:
        """Refuse new requests on the adapter and wait until the running ones have ended.

        Cancelling the wait lets it accept requests again.

        Raises:
            AdapterNotLoadedError: as `acquire`.
        """
        slot = self.acquire(key)
        slot.in_flight -= 1
        slot.draining = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: slot.in_flight == 0)
        except asyncio.CancelledError:
            slot.draining = False
            raise
        return slot

    def free(self, slot: Slot) -> None:
        """Give the slot back."""
        del self._slots[slot.key]

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
