"""The connection to the learner: says hello, receives what to serve, reports; comes back for as long as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Never

import grpc
from qerld.v1 import common_pb2, replica_pb2, replica_pb2_grpc
from qerld_kernels.noise import Noise

from qerld_service.desired import DesiredAdapter, VersionId
from qerld_service.metrics import PolicyMetrics
from qerld_service.reconciler import Reconciler

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.25
MESSAGE_BYTES = 64 << 20


def learner_channel(target: str, reconnect_seconds: float) -> grpc.aio.Channel:
    """A channel whose own reconnection is as eager as ours; gRPC's default waits up to two minutes."""
    return grpc.aio.insecure_channel(
        target,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.min_reconnect_backoff_ms", int(1000 * FIRST_WAIT_SECONDS)),
            ("grpc.initial_reconnect_backoff_ms", int(1000 * FIRST_WAIT_SECONDS)),
            ("grpc.max_reconnect_backoff_ms", int(1000 * reconnect_seconds)),
        ],
    )


class Attachment:
    """Keeps this server attached to the learner. The engine goes on serving while the learner is away."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        hello: replica_pb2.Hello,
        reconciler: Reconciler,
        metrics: PolicyMetrics,
        *,
        report_seconds: float,
        reconnect_seconds: float,
    ) -> None:
        self._stub = replica_pb2_grpc.ReplicaServiceStub(channel)
        self._hello, self._reconciler, self._metrics = hello, reconciler, metrics
        self._report_seconds, self._reconnect_seconds = report_seconds, reconnect_seconds
        self._changed = reconciler.watch()

    async def run(self) -> Never:
        """Attach again and again, with growing waits; never returns."""
        wait = FIRST_WAIT_SECONDS
        while True:
            attached, why = False, "the learner ended the attachment"
            try:
                async for _ in self._session():
                    attached = True
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
            self._metrics.attached.set(0)
            self._metrics.attach_failures.inc()
            wait = FIRST_WAIT_SECONDS if attached else min(2 * wait, self._reconnect_seconds)
            log.warning("not attached to the learner (%s); next try in %.1f s", why, wait)
            # Spread out, so that many servers do not come back in the same instant.
            await asyncio.sleep(wait * random.uniform(0.5, 1))  # noqa: S311

    async def _session(self) -> AsyncGenerator[None, None]:
        """One attachment; yields after each desired state, ends or raises AioRpcError with the stream."""
        call = self._stub.Attach()
        await call.write(replica_pb2.AttachRequest(hello=self._hello))
        reports = asyncio.create_task(self._report(call))
        first = True
        try:
            async for response in call:
                self._reconciler.want(response.desired.generation, *desired_adapters(response.desired.versions))
                if first:
                    self._metrics.attached.set(1)
                    log.info("attached to the learner")
                    self._reconciler.retry_failed()
                    first = False
                yield
        finally:
            call.cancel()
            reports.cancel()
            # It may have met the end of the stream before the reading side did.
            await asyncio.gather(reports, return_exceptions=True)

    async def _report(self, call: Any) -> None:
        """Report at each change and at least every `report_seconds`, until the stream ends."""
        while True:
            self._changed.clear()
            await call.write(replica_pb2.AttachRequest(state=self._reconciler.state()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._report_seconds):
                    await self._changed.wait()


def noise_of(message: common_pb2.Noise) -> Noise:
    """From the wire. Raises ValueError for a noise that is none."""
    number = message.dtype or common_pb2.NOISE_DTYPE_FLOAT32
    dtype = common_pb2.NoiseDtype.Name(number).removeprefix("NOISE_DTYPE_").lower()
    return Noise(message.sigma, message.seed, message.relative, dtype)


def desired_adapters(
    versions: Iterable[replica_pb2.DesiredVersion],
) -> tuple[list[DesiredAdapter], dict[VersionId, str]]:
    """From the wire; the second are versions with a noise that is none, and why."""
    adapters: list[DesiredAdapter] = []
    invalid: dict[VersionId, str] = {}
    for version in versions:
        run, number = version.policy.run, version.policy.version
        try:
            noise = noise_of(version.noise)
        except ValueError as error:
            invalid[run, number] = f"noise: {error}"
        else:
            adapters.append(DesiredAdapter(run, number, version.adapter_sha256, noise, version.live))
    return adapters, invalid
