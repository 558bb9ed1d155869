"""Fetches a version's adapter over gRPC into a PEFT folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
from qerld.v1 import common_pb2, policy_pb2, policy_pb2_grpc

from qerld_service.quickstart.session import QuickstartError

FILES = ("adapter_config.json", "adapter_model.safetensors")
DEADLINE = 120.0


def download_adapter(channel: grpc.Channel, run: str, version: int, folder: Path) -> str:
    """Write both files of the adapter; returns the SHA-256 of the weights. Raises QuickstartError, grpc.RpcError."""
    stub = policy_pb2_grpc.PolicyServiceStub(channel)
    folder.mkdir(parents=True, exist_ok=True)
    digest = ""
    for name in FILES:
        request = policy_pb2.DownloadAdapterRequest(policy=common_pb2.Policy(run=run, version=version), file=name)
        chunks = list(stub.DownloadAdapter(request, timeout=DEADLINE))
        content = b"".join(chunk.data for chunk in chunks)
        digest = hashlib.sha256(content).hexdigest()
        if digest != chunks[0].sha256:
            raise QuickstartError(
                f"{name} of version {version} arrived damaged: SHA-256 {digest}, not {chunks[0].sha256}"
            )
        (folder / name).write_bytes(content)
    return digest
