"""Reads model folders: plain Hugging Face safetensors, and NVFP4 in the two layouts that vLLM serves.

| layout             | packed          | block scale    | per tensor                       |
| compressed-tensors | `weight_packed` | `weight_scale` | `weight_global_scale`, a divisor |
| NVIDIA ModelOpt    | `weight` uint8  | `weight_scale` | `weight_scale_2`, a multiplier   |

`linear` gives the values that are *served*: for the members of a fused group vLLM takes the maximum of the stored
numbers (so the smallest multiplier in one layout and the largest in the other), and Marlin flushes small block scales.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from qerld_kernels.architectures import Architecture, architecture_of, layer_count
from qerld_kernels.errors import CheckpointError
from qerld_kernels.nvfp4 import BLOCK, Nvfp4Tensor, flush_scales
from qerld_kernels.safetensors_io import TensorInfo, read_header, read_tensor

__all__ = ["CheckpointError", "CheckpointReader", "Layout", "read_json"]

logger = logging.getLogger(__name__)

Layout = Literal["plain", "compressed-tensors", "modelopt"]

_SUFFIXES: dict[Layout, tuple[str, str, str]] = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
_INDEX = "model.safetensors.index.json"


class CheckpointReader:
    """A model folder whose headers are read and checked at once and whose tensors are read when asked for.

    Raises:
        CheckpointError: no such folder, no or broken config.json, truncated safetensors, a missing tensor,
            a quantisation other than NVFP4.
        UnsupportedArchitectureError: a model family without a row in `architectures`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give the path of a local Hugging Face model folder")
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self.architecture: Architecture = architecture_of(self.config)
        self.layers: int = layer_count(self.config)
        self.layout: Layout = _layout(folder, self.config)
        self.shards: dict[Path, dict[str, TensorInfo]] = {path: read_header(path) for path in _shard_paths(folder)}
        self.infos: dict[str, TensorInfo] = {k: v for infos in self.shards.values() for k, v in infos.items()}
        self.flushed_scales = 0
        """Block scales set to zero by Marlin's rule in the layers read so far."""
        self._groups = {name: group for group in self.architecture.groups(self.layers) for name in group}
        self._scales: tuple[tuple[str, ...], list[torch.Tensor], torch.Tensor] | None = None
        self._check_complete()

    @property
    def names(self) -> list[str]:
        """All tensors, in file order."""
        return list(self.infos)

    @property
    def linear_names(self) -> list[str]:
        """The decoder's linear layers that the architecture quantises, e.g. `model.layers.0.mlp.up_proj`."""
        return list(self._groups)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it is stored, on the CPU.

        Raises:
            CheckpointError: the folder has no such tensor.
        """
        return read_tensor(self.info(name))

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor; raises like `tensor`."""
        if name not in self.infos:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing from its safetensors files")
        return self.infos[name]

    def is_quantized(self, linear: str) -> bool:
        """Whether the linear layer (a module name, without `.weight`) is stored as NVFP4."""
        return self.layout != "plain" and f"{linear}.weight_scale" in self.infos

    def linear(self, name: str) -> Nvfp4Tensor:
        """The NVFP4 weight of a linear layer as it is served, on the CPU; see the module's docstring.

        Raises:
            CheckpointError: the layer is not NVFP4; a wrong dtype or shape; NaN, negative or non-finite scales.
        """
        if not self.is_quantized(name):
            raise CheckpointError(f"{self.folder}: {name} is not stored as NVFP4; `qerld quantize` makes such a folder")
        group = self._groups.get(name, (name,))
        if self._scales is None or self._scales[0] != group:
            self._scales = (group, *self._read_scales(group))
        _, scales, global_scale = self._scales
        packed = self.tensor(f"{name}.{_SUFFIXES[self.layout][0]}")
        return Nvfp4Tensor(packed, scales[group.index(name)], global_scale)

    def _read_scales(self, group: tuple[str, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
        plain = [member for member in group if not self.is_quantized(member)]
        if plain:
            raise CheckpointError(f"{self.folder}: {plain[0]} is not NVFP4 but its fused group {group} is")
        stored = torch.stack([self._global_scale(member) for member in group])
        if (stored != stored[0]).any():
            logger.warning("%s: global scales differ; as vLLM does, the largest is used for all", ", ".join(group))
        scales, flushed = flush_scales([self._block_scales(member) for member in group])
        if flushed:
            self.flushed_scales += flushed
            logger.warning("%s: %d block scales below 2^-6 are served as zero", ", ".join(group), flushed)
        largest = stored.max()
        return scales, 1.0 / largest if self.layout == "compressed-tensors" else largest

    def _global_scale(self, name: str) -> torch.Tensor:
        tensor_name = f"{name}.{_SUFFIXES[self.layout][2]}"
        info = self.info(tensor_name)
        if info.dtype != torch.float32 or info.shape not in ((), (1,)):
            raise CheckpointError(f"{tensor_name}: must be one float32, got {info.dtype} {list(info.shape)}")
        value = read_tensor(info).reshape(())
        if not (torch.isfinite(value) and torch.isfinite(1.0 / value) and value > 0):
            raise CheckpointError(f"{tensor_name}: must be finite and positive, got {value.item()}")
        return value

    def _block_scales(self, name: str) -> torch.Tensor:
        packed_suffix, scale_suffix, _ = _SUFFIXES[self.layout]
        packed, scale = self.info(f"{name}.{packed_suffix}"), self.info(f"{name}.{scale_suffix}")
        if packed.dtype != torch.uint8 or len(packed.shape) != 2 or packed.shape[1] * 2 % BLOCK:
            raise CheckpointError(
                f"{name}.{packed_suffix}: must be uint8 [out, in / 2], got {packed.dtype} {list(packed.shape)}"
            )
        wanted = (packed.shape[0], packed.shape[1] * 2 // BLOCK)
        if scale.dtype != torch.float8_e4m3fn or scale.shape != wanted:
            raise CheckpointError(
                f"{name}.{scale_suffix}: must be float8_e4m3fn {list(wanted)}, got {scale.dtype} {list(scale.shape)}"
            )
        codes = read_tensor(scale).view(torch.uint8)
        if ((codes & 0x7F) == 0x7F).any():
            raise CheckpointError(f"{name}.{scale_suffix}: holds NaN; the checkpoint is damaged, quantise it again")
        if (codes > 0x80).any():
            raise CheckpointError(f"{name}.{scale_suffix}: holds negative scales, whose sign FP4 kernels drop")
        return torch.where(codes == 0x80, 0, codes).view(torch.float8_e4m3fn)

    def _check_complete(self) -> None:
        packed = _SUFFIXES[self.layout][0] if self.layout != "plain" else "weight"
        for name in self._groups:
            if f"{name}.weight" not in self.infos:
                self.info(f"{name}.{packed}")
        others = ("model.embed_tokens", "model.norm", *self.architecture.noisy_norms(self.layers))
        for name in others:
            self.info(f"{name}.weight")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; is this a Hugging Face model folder?") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def _shard_paths(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{folder}: holds neither model.safetensors nor {_INDEX}; other formats are not read")
        return [single]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise CheckpointError(f"{index}: weight_map must name files of its own folder, got {name!r}")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _layout(folder: Path, config: Mapping[str, Any]) -> Layout:
    quantization = config.get("quantization_config")
    if quantization is None and (folder / "hf_quant_config.json").is_file():
        quantization = {
            "quant_method": "modelopt",
            **read_json(folder / "hf_quant_config.json").get("quantization", {}),
        }
    if quantization is None:
        return "plain"
    method = quantization.get("quant_method")
    if method == "compressed-tensors":
        _check_compressed_tensors(folder, quantization)
        return "compressed-tensors"
    if method in ("modelopt", "modelopt_fp4"):
        algorithm = quantization.get("quant_algo") or quantization.get("quantization", {}).get("quant_algo")
        if algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise CheckpointError(f"{folder}: ModelOpt quant_algo must be NVFP4 or W4A16_NVFP4, got {algorithm}")
        return "modelopt"
    raise CheckpointError(
        f"{folder}: quant_method {method!r} is not read; "
        "known are compressed-tensors (nvfp4-pack-quantized) and modelopt (NVFP4)"
    )


def _check_compressed_tensors(folder: Path, quantization: Mapping[str, Any]) -> None:
    groups = quantization.get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        found = {key: weights.get(key) for key in ("num_bits", "type", "group_size")}
        if found != {"num_bits": 4, "type": "float", "group_size": BLOCK}:
            raise CheckpointError(f"{folder}: {name} must be NVFP4 (4 bits, float, groups of {BLOCK}), got {found}")
        if group.get("input_activations"):
            logger.warning("%s: %s also quantises activations; only its weights are read", folder, name)
    if not groups:
        raise CheckpointError(f"{folder}: quantization_config has no config_groups")
