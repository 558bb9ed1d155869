"""Channel options and deadlines, the same for both clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_BYTES = 64 << 20

OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The service allows a ping a minute; more often would be answered with GOAWAY too_many_pings.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own backoff grows to two minutes, which a learner that restarts in seconds would make us wait.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

UNARY_SECONDS = 30.0
"""Deadline of a unary call, retries included."""

SAMPLE_SECONDS = 600.0
"""Deadline of sampling one group, waiting for room included."""

CREATE_SECONDS = 300.0
"""Deadline of CreateRun, which writes the first adapter."""

STREAM_SECONDS = 600.0
"""Deadline of one connection of a stream that lives on: it is opened again where it ended."""
