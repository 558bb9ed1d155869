"""Reads model folders: plain Hugging Face safetensors, and the 4-bit ones that vLLM serves.

| layout                     | packed          | block scale    | per tensor                       |
| compressed-tensors, NVFP4  | `weight_packed` | `weight_scale` | `weight_global_scale`, a divisor |
| compressed-tensors, MXFP4  | `weight_packed` | `weight_scale` |                                  |
| NVIDIA ModelOpt, NVFP4     | `weight` uint8  | `weight_scale` | `weight_scale_2`, a multiplier   |
| bitsandbytes, NF4          | `weight` uint8  | `nf4.py`       |                                  |

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

from qerld_kernels import nf4
from qerld_kernels.architectures import Architecture, architecture_of, layer_count
from qerld_kernels.errors import CheckpointError
from qerld_kernels.formats import MXFP4, NF4, NVFP4, Format, PackedWeight
from qerld_kernels.mxfp4 import Mxfp4Tensor
from qerld_kernels.nvfp4 import Nvfp4Tensor, flush_scales
from qerld_kernels.parameters import parameter_shapes
from qerld_kernels.safetensors_io import TensorInfo, read_header, read_tensor

__all__ = ["CheckpointError", "CheckpointReader", "Layout", "read_json"]

logger = logging.getLogger(__name__)

Layout = Literal["plain", "compressed-tensors", "modelopt", "bitsandbytes"]

_SUFFIXES: dict[Layout, tuple[str, str, str]] = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "bitsandbytes": ("weight", "weight.absmax", f"weight.{nf4.STATE}"),
}
_INDEX = "model.safetensors.index.json"
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WAY_OUT = "copy or download the model again, or make its 4-bit copy again with `qerld quantize`"


class CheckpointReader:
    """A model folder whose headers are read and checked at once and whose tensors are read when asked for.

    Raises:
        CheckpointError: no such folder, no or broken config.json, truncated safetensors, a tensor that is missing or of
            another dtype or shape than config.json implies, a quantisation other than NVFP4, MXFP4 and NF4.
        UnsupportedArchitectureError: a model family without a row in `architectures`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give the path of a local Hugging Face model folder")
        self.config: dict[str, Any] = read_json(folder / "config.json")
        self._shapes = _read_config(folder / "config.json", self.config)
        self.architecture: Architecture = architecture_of(self.config)
        self.layers: int = layer_count(self.config)
        self.layout, self.format = _layout(folder, self.config)
        self.shards: dict[Path, dict[str, TensorInfo]] = {path: read_header(path) for path in _shard_paths(folder)}
        self.infos: dict[str, TensorInfo] = {k: v for infos in self.shards.values() for k, v in infos.items()}
        self.flushed_scales = 0
        """Block scales set to zero by Marlin's rule in the layers read so far."""
        self._groups = {name: group for group in self.architecture.groups(self.layers) for name in group}
        self._scales: tuple[tuple[str, ...], list[torch.Tensor], torch.Tensor] | None = None
        for name, shape in self._shapes.items():
            self._check_parameter(name, shape)
        for group in {self._groups[name]: None for name in self._groups}:
            self._check_group(group)

    @property
    def names(self) -> list[str]:
        """All tensors, in file order."""
        return list(self.infos)

    @property
    def quantizes_activations(self) -> bool:
        """Whether the checkpoint asks for quantised activations, too (W4A4)."""
        quantization = self.config.get("quantization_config") or {}
        groups = quantization.get("config_groups") or {}
        return any(group.get("input_activations") for group in groups.values())

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
            raise CheckpointError(f"{self.folder}: tensor {name} is missing from its safetensors files; {_WAY_OUT}")
        return self.infos[name]

    def is_quantized(self, linear: str) -> bool:
        """Whether the linear layer (a module name, without `.weight`) is stored in the folder's 4-bit format."""
        if self.layout == "plain":
            return False
        packed, scale, _ = _SUFFIXES[self.layout]
        return f"{linear}.{scale}" in self.infos or (packed != "weight" and f"{linear}.{packed}" in self.infos)

    def linear(self, name: str) -> PackedWeight:
        """The 4-bit weight of a linear layer as it is served, on the CPU; see the module's docstring.

        Raises:
            CheckpointError: the layer is not 4-bit; NaN, negative or non-finite scales.
        """
        if not self.is_quantized(name):
            raise CheckpointError(
                f"{self.folder}: {name} is not stored in 4 bits; `qerld quantize` makes such a folder"
            )
        if self.format is NF4:
            return self._nf4(name)
        if self.format is MXFP4:
            return Mxfp4Tensor(self.tensor(f"{name}.weight_packed"), self._block_scales(name))
        group = self._groups.get(name, (name,))
        if self._scales is None or self._scales[0] != group:
            self._scales = (group, *self._read_scales(group))
        _, scales, global_scale = self._scales
        packed = self.tensor(f"{name}.{_SUFFIXES[self.layout][0]}")
        return Nvfp4Tensor(packed, scales[group.index(name)], global_scale)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(out, in) of a linear layer, 4-bit or plain."""
        out, features = self._shapes[f"{name}.weight"]
        return out, features

    def check_scales(self) -> None:
        """Read every scale, a ninth of an NVFP4 model, a seventeenth of an MXFP4 one.

        Raises:
            CheckpointError: one is NaN, negative or, of those a tensor, not finite and positive.
        """
        for name in filter(self.is_quantized, self.linear_names):
            if self.format is NF4:
                self._nf4(name)
                continue
            self._block_scales(name)
            if self.format is NVFP4:
                self._global_scale(name)

    def _nf4(self, name: str) -> nf4.Nf4Tensor:
        prefix = f"{name}.weight"
        stored = {key[len(prefix) + 1 :]: self.tensor(key) for key in self.names if key.startswith(prefix)}
        tensor = nf4.read(name, stored, *self.linear_shape(name))
        if not (torch.isfinite(tensor.scale).all() and (tensor.scale >= 0).all()):
            raise _wrong(self.info(f"{prefix}.absmax"), name, "weight.absmax", "holds NaN, infinite or negative scales")
        return tensor

    def _read_scales(self, group: tuple[str, ...]) -> tuple[list[torch.Tensor], torch.Tensor]:
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
        info = self.info(f"{name}.{_SUFFIXES[self.layout][2]}")
        value = read_tensor(info).reshape(())
        if not (torch.isfinite(value) and torch.isfinite(1.0 / value) and value > 0):
            raise _wrong(info, name, _SUFFIXES[self.layout][2], f"must be finite and positive, got {value.item()}")
        return value

    def _block_scales(self, name: str) -> torch.Tensor:
        suffix = _SUFFIXES[self.layout][1]
        info = self.info(f"{name}.{suffix}")
        codes = read_tensor(info).view(torch.uint8)
        # One pass over what may be gigabytes: comparisons took 20 times as long.
        counts = torch.bincount(codes.flatten(), minlength=256)
        if self.format is MXFP4:
            if nan := int(counts[0xFF]):
                raise _wrong(info, name, suffix, f"holds NaN in {nan} of {codes.numel()} block scales")
            return codes
        if nan := int(counts[0x7F] + counts[0xFF]):
            raise _wrong(info, name, suffix, f"holds NaN in {nan} of {codes.numel()} block scales")
        if negative := int(counts[0x81:0xFF].sum()):
            problem = f"holds negative scales, whose sign FP4 kernels drop: {negative} of {codes.numel()}"
            raise _wrong(info, name, suffix, problem)
        return codes.masked_fill_(codes == 0x80, 0).view(torch.float8_e4m3fn)

    def _check_parameter(self, name: str, shape: tuple[int, ...]) -> None:
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and module in self._groups and self.is_quantized(module):
            self._check_packed(module, *shape)
            return
        if name not in self.infos and f"{module}.weight_packed" in self.infos:
            raise CheckpointError(
                f"{self.folder}: {module} is packed ({module}.weight_packed), which config.json does not say: its "
                f"quantization_config is missing or another; {_WAY_OUT}"
            )
        self._check_header(name, _PLAIN_DTYPES, shape)

    def _check_packed(self, name: str, out: int, features: int) -> None:
        packed, scale, global_scale = (f"{name}.{suffix}" for suffix in _SUFFIXES[self.layout])
        form = self.format
        assert form is not None
        if features % form.block:
            raise CheckpointError(
                f"{self.folder}: {name} has {features} inputs, {form.name} needs a multiple of {form.block}"
            )
        if form is NF4:
            self._check_header(packed, (torch.uint8,), (out * features // 2, 1))
            self._check_header(scale, (torch.uint8, torch.float32), (out * features // form.block,))
            self.info(global_scale)
            return
        self._check_header(packed, (torch.uint8,), (out, features // 2))
        self._check_header(scale, (form.scale,), (out, features // form.block))
        if form is NVFP4:
            self._check_header(global_scale, (torch.float32,), (), (1,))

    def _check_header(self, name: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> None:
        info = self.info(name)
        if info.dtype not in dtypes or info.shape not in shapes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = str(info.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{info.path}: {name} must be {wanted} {list(shapes[-1])}, got {found} {list(info.shape)}; {_WAY_OUT}"
            )

    def _check_group(self, group: tuple[str, ...]) -> None:
        plain = [member for member in group if not self.is_quantized(member)]
        if 0 < len(plain) < len(group):
            raise CheckpointError(
                f"{self.folder}: {plain[0]} is not 4-bit but its fused group {', '.join(group)} is; {_WAY_OUT}"
            )


def _wrong(info: TensorInfo, name: str, suffix: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{info.path}: {name}.{suffix} {problem}; {_WAY_OUT}")


def _read_config(path: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    try:
        return parameter_shapes(config)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; is this a Hugging Face model folder?") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}); copy or download it again") from error
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


def _layout(folder: Path, config: Mapping[str, Any]) -> tuple[Layout, Format | None]:
    quantization = config.get("quantization_config")
    if quantization is None and (folder / "hf_quant_config.json").is_file():
        theirs = read_json(folder / "hf_quant_config.json").get("quantization")
        quantization = {"quant_method": "modelopt", **_object(folder / "hf_quant_config.json: quantization", theirs)}
    if quantization is None:
        return "plain", None
    method = _object(folder / "config.json: quantization_config", quantization).get("quant_method")
    if method == "compressed-tensors":
        return "compressed-tensors", _compressed_tensors(folder, quantization)
    if method in ("modelopt", "modelopt_fp4"):
        nested = _object(folder / "config.json: quantization", quantization.get("quantization", {}))
        algorithm = quantization.get("quant_algo") or nested.get("quant_algo")
        if algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise CheckpointError(f"{folder}: ModelOpt quant_algo must be NVFP4 or W4A16_NVFP4, got {algorithm}")
        return "modelopt", NVFP4
    if method == "bitsandbytes":
        found = {key: quantization.get(key) for key in ("load_in_4bit", "bnb_4bit_quant_type")}
        if found != {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}:
            raise CheckpointError(f"{folder}: bitsandbytes must be 4-bit nf4, got {found}; make it by `qerld quantize`")
        return "bitsandbytes", NF4
    raise CheckpointError(
        f"{folder}: quant_method {method!r} is not read; known are compressed-tensors (nvfp4-pack-quantized, "
        "mxfp4-pack-quantized), modelopt (NVFP4) and bitsandbytes (nf4)"
    )


def _compressed_tensors(folder: Path, quantization: Mapping[str, Any]) -> Format:
    """The format of all groups, told by the length of their blocks."""
    place = folder / "config.json: quantization_config.config_groups"
    by_block = {form.block: form for form in (NVFP4, MXFP4)}
    forms = set()
    for name, group in _object(place, quantization.get("config_groups") or {}).items():
        weights = _object(place, _object(place, group).get("weights") or {})
        found = {key: weights.get(key) for key in ("num_bits", "type", "group_size")}
        if (found["num_bits"], found["type"]) != (4, "float") or found["group_size"] not in by_block:
            raise CheckpointError(
                f"{folder}: {name} must be NVFP4 or MXFP4 (4 bits, float, groups of 16 or 32), got {found}"
            )
        forms.add(by_block[found["group_size"]])
        if group.get("input_activations"):
            logger.warning("%s: %s also quantises activations; only its weights are read", folder, name)
    if len(forms) != 1:
        what = "mixes NVFP4 and MXFP4" if forms else "has no config_groups"
        raise CheckpointError(f"{folder}: quantization_config {what}")
    return forms.pop()


def _object(place: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{place}: must be a JSON object, got {type(value).__name__}")
    return value
