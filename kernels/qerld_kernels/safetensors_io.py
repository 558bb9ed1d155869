"""Safetensors files read and written tensor by tensor, so that memory is bounded by one tensor.

The `safetensors` library maps whole files on reading and wants all tensors of a file at once on writing. The format:
eight bytes of little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from qerld_kernels.errors import CheckpointError

__all__ = ["ShardWriter", "TensorInfo", "nbytes_of", "read_bytes", "read_header", "read_tensor"]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100 << 20  # the safetensors library's own limit
_COPY_CHUNK = 8 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: dtype, shape, and the half-open range of bytes `start`–`end` in the file `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def nbytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this dtype and shape."""
    return prod(shape) * dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in file order; checks the header and the file's length, reads no tensor.

    Raises:
        CheckpointError: the file is missing, truncated, or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_HEADER_LIMIT, size - 8):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: {size} bytes, header of {length} announced; "
                    "copy or download it again"
                )
            header = json.loads(file.read(length))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        infos = {name: _info(path, name, entry, 8 + length) for name, entry in entries}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; copy or download the model again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: its safetensors header cannot be read ({error}); copy or download it again"
        ) from error
    end = max((info.end for info in infos.values()), default=8 + length)
    if end != size:
        raise CheckpointError(
            f"{path}: truncated or damaged: its header needs {end} bytes, the file has {size}; "
            "copy or download it again"
        )
    return dict(sorted(infos.items(), key=lambda item: item[1].start))


def _info(path: Path, name: str, entry: Mapping[str, Any], base: int) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {entry['dtype']}; known are {', '.join(DTYPES)}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if end - start != nbytes_of(dtype, shape) or start < 0:
        raise CheckpointError(f"{path}: {name} {shape} of {dtype} does not fill its bytes {start}–{end}")
    return TensorInfo(path, dtype, shape, base + start, base + end)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """One tensor, in memory of its own.

    Raises:
        CheckpointError: the file ends before the tensor does.
    """
    raw = torch.empty(info.end - info.start, dtype=torch.uint8)
    with info.path.open("rb") as file:
        file.seek(info.start)
        if file.readinto(raw.numpy().data) != raw.numel():
            raise CheckpointError(f"{info.path}: ends before byte {info.end}; it was cut while being read")
    return raw.view(info.dtype).reshape(info.shape)


def read_bytes(info: TensorInfo) -> Iterator[bytes]:
    """A tensor's bytes in pieces, for copying without holding it."""
    with info.path.open("rb") as file:
        file.seek(info.start)
        left = info.end - info.start
        while left:
            piece = file.read(min(left, _COPY_CHUNK))
            if not piece:
                raise CheckpointError(f"{info.path}: ends before byte {info.end}; it was cut while being read")
            left -= len(piece)
            yield piece


class ShardWriter:
    """Writes one safetensors file whose tensors' dtypes and shapes are known before their values.

    `write` must be called once for each entry, in the order of `entries`.
    """

    def __init__(self, path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (dtype, shape) in entries.items():
            end = offset + nbytes_of(dtype, shape)
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % 8)  # the library aligns the first tensor to eight bytes
        self._pending = [(name, nbytes_of(*entry)) for name, entry in entries.items()][::-1]
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> ShardWriter:
        self._file = self._path.open("xb")
        self._file.write(len(self._header).to_bytes(8, "little") + self._header)
        return self

    def write(self, name: str, data: torch.Tensor | Iterator[bytes]) -> None:
        """Append the next tensor, as a tensor or as its bytes."""
        assert self._file is not None, "use ShardWriter in a with statement"
        expected, size = self._pending.pop()
        pieces = [data.contiguous().view(-1).view(torch.uint8).numpy().data] if isinstance(data, torch.Tensor) else data
        written = sum(self._file.write(piece) for piece in pieces)
        if name != expected or written != size:
            raise ValueError(f"expected {size} bytes of {expected}, got {written} of {name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()
        if kind is None and self._pending:
            raise ValueError(f"{len(self._pending)} tensors were not written, among them {self._pending[-1][0]}")
