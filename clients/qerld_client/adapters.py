"""Downloaded adapters: a plain PEFT folder, written aside, resumed where it broke, checked by its SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qerld.v1 import common_pb2

from qerld_client.errors import AdapterError
from qerld_client.resume import DownloadResume

FILES = ("adapter_config.json", "adapter_model.safetensors")


class PartialFile:
    """One file of an adapter while it is downloaded; what is there of the same version is kept.

    Args:
        folder: The PEFT folder.
        policy: Run and version.
        name: One of `FILES`.
    """

    def __init__(self, folder: Path, policy: common_pb2.Policy, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._target = folder / name
        self._part = folder / f".{name}.{policy.run}@{policy.version}.part"
        self._part.touch()
        self.resume = DownloadResume(policy, name, self._part.stat().st_size)

    def write(self, data: bytes) -> None:
        with self._part.open("ab") as file:
            file.write(data)

    def finish(self) -> None:
        """Check the whole file and put it in place.

        Raises:
            AdapterError: It is not what the service announced; the partial file is removed.
        """
        with self._part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.resume.sha256:
            self._part.unlink()
            raise AdapterError(
                f"{self._target.name} has SHA-256 {found}, the service announced {self.resume.sha256}; "
                "what was downloaded is removed, download it again"
            )
        self._part.replace(self._target)
