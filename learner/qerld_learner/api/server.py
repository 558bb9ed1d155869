"""The gRPC server of the learner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from qerld.v1 import policy_pb2_grpc, replica_pb2_grpc, reward_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc
from qerld_kernels.exclusive import port_error

from qerld_learner.api.health import SAMPLING, STORE_SERVICES, HealthLoop
from qerld_learner.api.interceptors import ErrorInterceptor, MetricsInterceptor
from qerld_learner.api.policy import PolicyServicer
from qerld_learner.api.replica import ReplicaServicer
from qerld_learner.api.reward import RewardServicer
from qerld_learner.api.rollout import RolloutServicer
from qerld_learner.api.run import RunServicer
from qerld_learner.api.service import Service
from qerld_learner.api.streams import Streams
from qerld_learner.core import Learner
from qerld_learner.metrics import LearnerMetrics
from qerld_learner.settings import LearnerSettings
from qerld_learner.tokens import PromptTokenizer

MAX_MESSAGE_BYTES = 64 << 20
CHANNEL_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every 60 s, also between calls; gRPC's own minimum is 5 minutes and answers GOAWAY too_many_pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 50_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanished without a FIN is noticed, and its streams end.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Without this a second learner would silently share the port.
    ("grpc.so_reuseport", 0),
)


@asynccontextmanager
async def running_server(
    learner: Learner, settings: LearnerSettings, metrics: LearnerMetrics | None = None
) -> AsyncIterator[int]:
    """Serve the API of an open learner; yields the port. On leaving: health first, then streams, then other calls.

    Raises:
        PortError: The address is taken or not of this machine.
    """
    service = Service(
        learner=learner,
        tokenizer=PromptTokenizer(settings.model),
        metrics=metrics or LearnerMetrics(),
        streams=Streams(),
        replica_timeout=settings.replica_timeout,
    )
    health = HealthLoop(service)
    server = _build(service, health, reflect=settings.reflection)
    port = _bind(server, settings.host, settings.port)
    await health.update()
    await server.start()
    watcher = asyncio.create_task(health.run())
    try:
        yield port
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        await health.stop()
        service.streams.stop()
        await server.stop(settings.stop_grace)


def _build(service: Service, health: HealthLoop, *, reflect: bool) -> grpc.aio.Server:
    server = grpc.aio.server(
        interceptors=(MetricsInterceptor(service.metrics), ErrorInterceptor()), options=CHANNEL_OPTIONS
    )
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(service), server)
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(service), server)
    reward_pb2_grpc.add_RewardServiceServicer_to_server(RewardServicer(service), server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(PolicyServicer(service), server)
    replica_pb2_grpc.add_ReplicaServiceServicer_to_server(ReplicaServicer(service), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    if reflect:
        names = [name for name in (*STORE_SERVICES, SAMPLING) if name]
        reflection.enable_server_reflection(
            [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME], server
        )
    return server


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = f"[{host}]:{port}" if ":" in host.strip("[]") and not host.startswith("[") else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise port_error("port", host, port, error) from error
