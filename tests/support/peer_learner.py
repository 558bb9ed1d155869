"""The learner's end of the replica protocol, for tests of the policy server alone.

A real grpc.aio server with ReplicaService and PolicyService over adapter folders; the tests say which versions are
desired, and how a download goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from qerld.v1 import common_pb2, policy_pb2, policy_pb2_grpc, replica_pb2, replica_pb2_grpc

CHUNK = 1024


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class PeerLearner:
    """Desired versions, what the policy server said, and which downloads it asked for (file, offset)."""

    hellos: list[replica_pb2.Hello] = field(default_factory=list)
    reports: list[replica_pb2.ReplicaState] = field(default_factory=list)
    downloads: list[tuple[str, int]] = field(default_factory=list)
    # Changes the bytes of one chunk, or raises to break the stream off.
    tamper: Callable[[str, int, bytes], bytes] | None = None
    refuse_attach: str = ""

    def __post_init__(self) -> None:
        self._versions: dict[tuple[str, int], tuple[Path, replica_pb2.DesiredVersion]] = {}
        self._generation = 0
        self._changed = asyncio.Condition()

    async def desire(
        self, run: str, version: int, folder: Path, *, sigma: float = 0.0, seed: int = 0, live: bool = True
    ) -> None:
        """Add or replace a desired version; a live one takes the place of the run's former."""
        digest = sha256((folder / "adapter_model.safetensors").read_bytes())
        wanted = replica_pb2.DesiredVersion(
            policy=common_pb2.Policy(run=run, version=version),
            adapter_sha256=digest,
            noise=common_pb2.Noise(sigma=sigma, seed=seed),
            live=live,
        )
        for (other, _), (_, former) in self._versions.items():
            if live and other == run:
                former.live = False
        self._versions[run, version] = (folder, wanted)
        await self._announce()

    async def drop(self, run: str, version: int) -> None:
        """Desire the version no longer."""
        del self._versions[run, version]
        await self._announce()

    async def report(self, when: Callable[[replica_pb2.ReplicaState], bool], seconds: float = 120) -> Any:
        """The first report of the newest desired state for which `when` holds."""

        def found() -> bool:
            return bool(self.reports) and self.reports[-1].generation == self._generation and when(self.reports[-1])

        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(found)
            return self.reports[-1]

    async def attached(self, count: int = 1, seconds: float = 120) -> None:
        """Wait until `count` hellos have come."""
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: len(self.hellos) >= count)

    async def _announce(self) -> None:
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def desired(self) -> replica_pb2.DesiredState:
        newest_first = sorted(self._versions.items(), key=lambda item: -item[0][1])
        return replica_pb2.DesiredState(
            generation=self._generation, versions=[wanted for _, (_, wanted) in newest_first]
        )

    def file(self, request: policy_pb2.DownloadAdapterRequest) -> bytes:
        folder, _ = self._versions[request.policy.run, request.policy.version]
        return (folder / request.file).read_bytes()

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[int]:
        """Serve on loopback; yields the port."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        replica_pb2_grpc.add_ReplicaServiceServicer_to_server(_Replicas(self), server)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(_Downloads(self), server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)


class _Replicas(replica_pb2_grpc.ReplicaServiceServicer):
    def __init__(self, peer: PeerLearner) -> None:
        self._peer = peer

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[replica_pb2.AttachResponse]:
        peer = self._peer
        first = await anext(aiter(request_iterator))
        async with peer._changed:
            peer.hellos.append(first.hello)
            peer._changed.notify_all()
        if peer.refuse_attach:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, peer.refuse_attach)
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            sent = None
            while True:
                async with peer._changed:
                    await peer._changed.wait_for(lambda: peer._generation != sent)  # noqa: B023
                    desired = peer.desired()
                sent = desired.generation
                yield replica_pb2.AttachResponse(desired=desired)
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for request in requests:
            async with self._peer._changed:
                self._peer.reports.append(request.state)
                self._peer._changed.notify_all()


class _Downloads(policy_pb2_grpc.PolicyServiceServicer):
    def __init__(self, peer: PeerLearner) -> None:
        self._peer = peer

    async def DownloadAdapter(self, request: Any, context: Any) -> AsyncIterator[policy_pb2.DownloadAdapterResponse]:
        data = self._peer.file(request)
        self._peer.downloads.append((request.file, request.offset))
        for offset in range(request.offset, max(len(data), request.offset + 1), CHUNK):
            chunk = data[offset : offset + CHUNK]
            if self._peer.tamper is not None:
                try:
                    chunk = self._peer.tamper(request.file, offset, chunk)
                except ConnectionError as error:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            first = offset == request.offset
            yield policy_pb2.DownloadAdapterResponse(
                offset=offset,
                data=chunk,
                total_bytes=len(data) if first else 0,
                sha256=sha256(data) if first else "",
            )
