"""Adapter folders on this machine: downloaded from the learner, checked, resumed, deleted when no slot needs them."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import grpc
from qerld.v1 import common_pb2, policy_pb2, policy_pb2_grpc
from qerld_kernels.exclusive import FolderLock
from qerld_kernels.folders import sha256_of

from qerld_service.desired import DesiredAdapter

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_BAD_OFFSET = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INVALID_ARGUMENT)
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DownloadError(RuntimeError):
    """The files could not be had, or are not what the learner announced; another try may help."""


class AdapterFolders:
    """Folders under `root`, one for each version and content; held by one process at a time.

    Raises:
        FolderError: another process holds `root`, or it cannot be made.
    """

    def __init__(self, root: Path, deadline: float, on_bytes: Callable[[int], None]) -> None:
        self._root, self._deadline, self._on_bytes = root, deadline, on_bytes
        self._lock = FolderLock(root, "cache_dir", "qerld policy")

    def close(self) -> None:
        self._lock.release()

    def path(self, adapter: DesiredAdapter) -> Path:
        """Folder of a version; the run's name is escaped, it comes over the network."""
        return self._root / f"{quote(adapter.run, safe='')}@{adapter.version}-{adapter.sha256[:16]}"

    async def fetch(self, stub: policy_pb2_grpc.PolicyServiceAsyncStub, adapter: DesiredAdapter) -> Path:
        """Return the folder of the version with both files, downloading what is missing.

        Raises:
            DownloadError: the learner cannot be reached, or a checksum does not fit.
        """
        if not _SHA256.fullmatch(adapter.sha256):
            raise DownloadError(f"adapter_sha256: must be 64 hexadecimal digits, got {adapter.sha256!r}")
        folder = self.path(adapter)
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise _no_room(folder, error) from error
        await self._fetch_file(stub, adapter, folder / CONFIG, None)
        await self._fetch_file(stub, adapter, folder / WEIGHTS, adapter.sha256)
        return folder

    def remove(self, adapter: DesiredAdapter) -> None:
        """Delete the folder of a version; nothing happens when there is none."""
        shutil.rmtree(self.path(adapter), ignore_errors=True)

    def sweep(self, keep: Iterable[DesiredAdapter]) -> None:
        """Delete every folder but those of the given versions: what an earlier process left behind."""
        kept = {self.path(adapter) for adapter in keep}
        for folder in self._root.iterdir():
            if folder.is_dir() and "@" in folder.name and folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    async def _fetch_file(
        self, stub: policy_pb2_grpc.PolicyServiceAsyncStub, adapter: DesiredAdapter, path: Path, sha256: str | None
    ) -> None:
        """Fetch one file; `sha256` None takes the checksum that comes with the download (the config has no other)."""
        if sha256 is not None and await asyncio.to_thread(_sha256_if_there, path) == sha256:
            return
        part = path.with_name(f"{path.name}.part")
        if sha256 is None:
            remove(part)
        announced = await self._stream(stub, adapter, path.name, part)
        found = await asyncio.to_thread(_sha256_if_there, part)
        if found != (sha256 or announced):
            remove(part)
            raise DownloadError(
                f"{path.name} of {adapter.run}@{adapter.version}: sha256 must be {sha256 or announced}, got {found}: "
                "damaged on the way or in the learner's version folder"
            )
        part.replace(path)

    async def _stream(
        self, stub: policy_pb2_grpc.PolicyServiceAsyncStub, adapter: DesiredAdapter, name: str, part: Path
    ) -> str:
        """Append the rest of the file to `part`; returns the announced checksum."""
        announced = ""
        try:
            with part.open("ab") as file:
                request = policy_pb2.DownloadAdapterRequest(
                    policy=common_pb2.Policy(run=adapter.run, version=adapter.version), file=name, offset=file.tell()
                )
                async for chunk in stub.DownloadAdapter(request, timeout=self._deadline):
                    announced = announced or chunk.sha256
                    _append(file, chunk, name)
                    self._on_bytes(len(chunk.data))
        except grpc.aio.AioRpcError as error:
            if error.code() in _BAD_OFFSET:  # the part is longer than the file: start anew
                remove(part)
            what = f"{name} of {adapter.run}@{adapter.version}"
            raise DownloadError(f"{what}: {error.code().name}: {error.details()}") from error
        except OSError as error:
            raise _no_room(part, error) from error
        return announced


def _no_room(path: Path, error: OSError) -> DownloadError:
    return DownloadError(f"{path}: {error.strerror}; free space or set cache_dir to another disk")


def remove(path: Path) -> None:
    """Delete a file if it is there."""
    path.unlink(missing_ok=True)


def _sha256_if_there(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None


def _append(file: BinaryIO, chunk: policy_pb2.DownloadAdapterResponse, name: str) -> None:
    if chunk.offset != file.tell():
        raise DownloadError(f"{name}: chunk offset must be {file.tell()}, got {chunk.offset}")
    file.write(chunk.data)
