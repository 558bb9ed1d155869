"""Prometheus metrics of the policy server, beside vLLM's own. Labels are bounded: no versions, runs or clients."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics_core import Metric
from qerld_kernels.exclusive import port_error

_SWAP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_CALL_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# vLLM labels this one with the names of loaded adapters: a new series for each version, forever.
_UNBOUNDED = "vllm:lora_requests_info"


class PolicyMetrics:
    """All series of one policy server, in their own registry so that several servers fit in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.engine_up = Gauge("qerld_policy_engine_up", "1 while the engine takes requests.", registry=r)
        self.attached = Gauge("qerld_policy_attached", "1 while attached to the learner.", registry=r)
        self.attach_failures = Counter("qerld_policy_attach_failures", "Attachments that ended or failed.", registry=r)
        self.reconciled = Gauge("qerld_policy_reconciled", "1 when every desired version is served.", registry=r)
        self.desired = Gauge("qerld_policy_desired_versions", "Versions that the learner wants served.", registry=r)
        self.serving = Gauge("qerld_policy_serving_versions", "Versions that are served.", registry=r)
        self.slots = Gauge("qerld_policy_slots", "Adapter slots of the engine.", registry=r)
        self.slots_used = Gauge("qerld_policy_slots_used", "Adapter slots in use; a version may take two.", registry=r)
        self.loads = Counter("qerld_policy_adapter_loads", "Versions loaded.", registry=r)
        self.load_failures = Counter(
            "qerld_policy_adapter_load_failures",
            "Versions that could not be loaded.",
            ["reason"],  # download, adapter, slots, noise
            registry=r,
        )
        self.unloads = Counter("qerld_policy_adapter_unloads", "Versions drained and unloaded.", registry=r)
        self.swap_seconds = Histogram(
            "qerld_policy_swap_seconds",
            "From the wish for a version to serving it, download included.",
            buckets=_SWAP_BUCKETS,
            registry=r,
        )
        self.download_bytes = Counter("qerld_policy_download_bytes", "Bytes of adapters received.", registry=r)
        self.noise_ratio = Gauge(
            "qerld_policy_noise_ratio",
            "Realised over intended sigma of the last version loaded with noise, root mean square over its norms.",
            registry=r,
        )
        self.in_flight = Gauge("qerld_policy_requests_in_flight", "Calls being answered.", ["method"], registry=r)
        self.calls = Counter("qerld_policy_requests", "Calls answered.", ["method", "code"], registry=r)
        self.call_seconds = Histogram(
            "qerld_policy_request_seconds", "Duration of calls.", ["method"], buckets=_CALL_BUCKETS, registry=r
        )
        self.generated_tokens = Counter("qerld_policy_generated_tokens", "Tokens sampled.", ["method"], registry=r)
        self.scored_tokens = Counter("qerld_policy_scored_tokens", "Completion tokens scored.", registry=r)

    @contextlib.contextmanager
    def call(self, method: str) -> Iterator[CallOutcome]:
        """Count one call: in flight now, its duration and its code at the end. `method` is a name of ours."""
        outcome = CallOutcome()
        started = time.monotonic()
        self.in_flight.labels(method).inc()
        try:
            yield outcome
        finally:
            self.in_flight.labels(method).dec()
            self.calls.labels(method, outcome.code).inc()
            self.call_seconds.labels(method).observe(time.monotonic() - started)


class CallOutcome:
    """How a call ended; CANCELLED unless it says otherwise, since a vanished caller leaves no time to."""

    def __init__(self) -> None:
        self.code = "CANCELLED"


class _Exposition:
    """What a scrape sees: our series and vLLM's, which live in the process-wide registry."""

    def __init__(self, ours: CollectorRegistry) -> None:
        self._ours = ours

    def collect(self) -> Iterable[Metric]:
        yield from self._ours.collect()
        for metric in REGISTRY.collect():
            if metric.name != _UNBOUNDED:
                yield metric


@contextlib.contextmanager
def serving_metrics(metrics: PolicyMetrics, host: str, port: int) -> Iterator[int]:
    """Serve /metrics over HTTP from a thread; yields the port.

    Raises:
        PortError: the port is taken.
    """
    exposition: Any = _Exposition(metrics.registry)
    try:
        server, thread = start_http_server(port, addr=host, registry=exposition)
    except OSError as error:
        raise port_error("metrics_port", host, port, error) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
