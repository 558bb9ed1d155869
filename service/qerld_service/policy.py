"""The policy server's process: engine, attachment to the learner, gRPC, OpenAI HTTP, metrics.

    python -m qerld_service.policy --model FOLDER --learner HOST:PORT

Health names: "started" once the engine is loaded; "" and "qerld.v1.PolicyReplicaService" while every desired version is
served. SIGTERM lets running requests end. When the engine dies the process ends with status 1, for its supervisor to
start it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Never

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from qerld.v1 import policy_pb2_grpc, replica_pb2, replica_pb2_grpc
from qerld_kernels.errors import CheckpointError
from qerld_kernels.exclusive import FolderError, PortError, port_error, require_free_port
from qerld_kernels.fingerprint import base_fingerprint, chat_template_fingerprint, tokenizer_fingerprint
from qerld_kernels.model_folder import open_model
from transformers import PreTrainedTokenizerFast

from qerld_service import flags
from qerld_service.attachment import MESSAGE_BYTES, Attachment, learner_channel
from qerld_service.downloads import AdapterFolders
from qerld_service.engine import EngineConfig, EngineDiedError, EngineSettingsError, PolicyEngine
from qerld_service.metrics import PolicyMetrics, serving_metrics
from qerld_service.openai_proxy import HOST, LoopbackServer, OpenAIProxy, create_app
from qerld_service.reconciler import Reconciler
from qerld_service.serve import write_json
from qerld_service.servicer import PolicyReplicaServicer
from qerld_service.settings import PolicySettings

log = logging.getLogger(__name__)

SERVICE = "qerld.v1.PolicyReplicaService"
USAGE_ERROR = 2
ENGINE_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class RunningPolicy:
    """A policy server that serves. `hello` is what it tells the learner."""

    hello: replica_pb2.Hello
    port: int
    openai_port: int
    metrics_port: int
    engine: PolicyEngine
    reconciler: Reconciler
    tasks: frozenset[asyncio.Future[Any]]

    async def failed(self) -> Never:
        """Wait for what this process cannot go on after, and raise it: EngineDiedError when the engine died."""
        done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError("a task that never ends has ended")


@contextlib.asynccontextmanager
async def running_policy(settings: PolicySettings, engine: PolicyEngine | None = None) -> AsyncIterator[RunningPolicy]:
    """Serve until left; then requests may end for `drain_seconds`. A given engine is used and left running.

    Raises:
        CheckpointError: the model folder cannot be served.
        FolderError: another server works in `cache_dir`, or it cannot be made.
        PortError: a port is taken.
        EngineSettingsError: vLLM refuses the model or a setting.
        RuntimeError: vLLM did not start.
    """
    await asyncio.to_thread(check_model, settings.model)
    metrics = PolicyMetrics()
    async with contextlib.AsyncExitStack() as stack:
        folders = AdapterFolders(settings.cache_dir, settings.download_seconds, metrics.download_bytes.inc)
        stack.callback(folders.close)
        require_free_ports(settings)  # before the engine starts, which takes a minute or two
        metrics_port = stack.enter_context(serving_metrics(metrics, settings.host, settings.metrics_port))
        if engine is None:
            engine = await PolicyEngine.start(engine_config(settings))
            stack.push_async_callback(engine.stop)
        metrics.engine_up.set_function(lambda: float(not engine.errored))
        metrics.slots_used.set_function(lambda: len(engine.stats.in_flight))
        channel = await stack.enter_async_context(learner_channel(settings.learner, settings.reconnect_seconds))
        adapters = policy_pb2_grpc.PolicyServiceStub(channel)
        reconciler = Reconciler(engine, folders, adapters, settings.max_loras, metrics)
        stack.push_async_callback(reconciler.close)
        serving = await stack.enter_async_context(serving_requests(settings, engine, reconciler, metrics))
        hello = await asyncio.to_thread(hello_of, settings, engine, serving.port)
        work = (
            attachment_of(settings, channel, hello, reconciler, metrics).run(),
            publish_health(serving.health, reconciler),
            engine_death(engine),
        )
        tasks = await stack.enter_async_context(running_tasks(*work))
        everything = frozenset([*tasks, reconciler.crashed])
        yield RunningPolicy(hello, serving.port, serving.openai_port, metrics_port, engine, reconciler, everything)


def require_free_ports(settings: PolicySettings) -> None:
    """Raise PortError, naming the setting, when a port is taken."""
    for name, host in (("port", settings.host), ("openai_port", HOST), ("metrics_port", settings.host)):
        require_free_port(name, host, getattr(settings, name))


@dataclass(frozen=True)
class Serving:
    """Where requests are answered, and the gRPC health that is said of it."""

    port: int
    openai_port: int
    health: health.aio.HealthServicer


@contextlib.asynccontextmanager
async def serving_requests(
    settings: PolicySettings, engine: PolicyEngine, reconciler: Reconciler, metrics: PolicyMetrics
) -> AsyncIterator[Serving]:
    """Answer gRPC and OpenAI requests until left; then running ones may end for `drain_seconds`."""
    health_servicer = health.aio.HealthServicer()
    server, port = await start_grpc(settings, PolicyReplicaServicer(engine, reconciler, metrics), health_servicer)
    http = await start_http(settings, engine, reconciler, metrics)
    try:
        yield Serving(port, http.port, health_servicer)
    finally:
        await drain(health_servicer, server, http, settings.drain_seconds)


def attachment_of(
    settings: PolicySettings,
    channel: grpc.aio.Channel,
    hello: replica_pb2.Hello,
    reconciler: Reconciler,
    metrics: PolicyMetrics,
) -> Attachment:
    """The attachment to the learner, not yet running."""
    return Attachment(
        channel,
        hello,
        reconciler,
        metrics,
        report_seconds=settings.report_seconds,
        reconnect_seconds=settings.reconnect_seconds,
    )


def check_model(folder: Path) -> None:
    """Find in seconds what vLLM would say in a minute and a long traceback, or not at all (NaN scales).

    Raises:
        CheckpointError: the folder cannot be served on this machine.
    """
    model = open_model(folder)
    if torch.cuda.is_available() or model.layout == "plain":
        return
    if model.layout == "modelopt" or model.quantizes_activations:
        kind = "ModelOpt's layout" if model.layout == "modelopt" else "4-bit weights with quantised activations"
        raise CheckpointError(
            f"{folder}: {kind} is served on a GPU only, and there is none; "
            "give the unquantised model to `qerld quantize`"
        )


def engine_config(settings: PolicySettings) -> EngineConfig:
    """The engine's part of the settings."""
    return EngineConfig(
        model=settings.model,
        dtype=settings.dtype,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.host_loras,
        max_lora_rank=settings.max_lora_rank,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        cpu_kv_cache_gib=settings.cpu_kv_cache_gib,
        # None lets the engine choose: eager on the CPU, where compilation takes longer than it saves.
        enforce_eager=settings.enforce_eager or None,
        nvfp4_kernel=settings.nvfp4_kernel,
        lora_kernel=settings.lora_kernel,
        seed=settings.seed,
    )


def hello_of(settings: PolicySettings, engine: PolicyEngine, port: int) -> replica_pb2.Hello:
    """What the learner checks before it trusts this server's tokens; reads some of the model's files."""
    auto_dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return replica_pb2.Hello(
        replica_id=uuid.uuid4().hex,
        endpoint=settings.endpoint or f"{settings.host}:{port}",
        base_sha256=base_fingerprint(settings.model),
        tokenizer_sha256=tokenizer_fingerprint(settings.model),
        chat_template_sha256=chat_template_fingerprint(settings.model),
        engine_version=version_of("vllm"),
        slots=settings.version_slots,
        max_lora_rank=settings.max_lora_rank,
        max_model_len=engine.max_model_len,
        dtype=auto_dtype if settings.dtype == "auto" else settings.dtype,
    )


async def start_grpc(
    settings: PolicySettings, servicer: PolicyReplicaServicer, health_servicer: health.aio.HealthServicer
) -> tuple[grpc.aio.Server, int]:
    """Start the gRPC server; returns it and its port. Raises PortError when the port is taken."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MESSAGE_BYTES),
            ("grpc.max_send_message_length", MESSAGE_BYTES),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            # Otherwise two servers could listen on one port, and each would get half of the calls.
            ("grpc.so_reuseport", 0),
        ]
    )
    replica_pb2_grpc.add_PolicyReplicaServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    if settings.reflection:
        services = (replica_pb2.DESCRIPTOR, "PolicyReplicaService"), (health_pb2.DESCRIPTOR, "Health")
        names = [file.services_by_name[name].full_name for file, name in services]
        reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    try:
        port = server.add_insecure_port(f"{settings.host}:{settings.port}")
    except RuntimeError as error:
        raise port_error("port", settings.host, settings.port, error) from error
    await health_servicer.set("started", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    return server, port


async def start_http(
    settings: PolicySettings, engine: PolicyEngine, reconciler: Reconciler, metrics: PolicyMetrics
) -> LoopbackServer:
    """Start the OpenAI API on loopback."""
    tokenizer = await asyncio.to_thread(PreTrainedTokenizerFast.from_pretrained, str(settings.model))
    app = create_app(OpenAIProxy(engine, reconciler, tokenizer, metrics), engine)
    return LoopbackServer(app, settings.openai_port, settings.drain_seconds)


async def publish_health(health_servicer: health.aio.HealthServicer, reconciler: Reconciler) -> Never:
    """Keep gRPC health at whether every desired version is served."""
    changed = reconciler.watch()
    while True:
        changed.clear()
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if reconciler.reconciled
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE):
            await health_servicer.set(name, status)
        await changed.wait()


async def engine_death(engine: PolicyEngine) -> Never:
    """Wait for the engine to die; raises EngineDiedError then."""
    while not engine.errored:  # noqa: ASYNC110 - vLLM offers no event
        await asyncio.sleep(ENGINE_POLL_SECONDS)
    raise EngineDiedError("vLLM's engine process has died; its own log, above, says why")


async def drain(
    health_servicer: health.aio.HealthServicer, server: grpc.aio.Server, http: LoopbackServer, seconds: float
) -> None:
    """Say NOT_SERVING, refuse new requests and let running ones end for `seconds`; then they are cancelled."""
    await health_servicer.enter_graceful_shutdown()
    await asyncio.gather(server.stop(seconds), http.stop())


@contextlib.asynccontextmanager
async def running_tasks(*work: Coroutine[Any, Any, Never]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Run coroutines until left; then they are cancelled."""
    tasks: list[asyncio.Future[Any]] = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run(settings: PolicySettings) -> int:
    """Serve until SIGTERM or SIGINT (status 0) or a failure (status 1)."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave_now, number)
    async with running_policy(settings) as policy:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        announce(settings, policy)
        failure = asyncio.create_task(policy.failed())
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({failure, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not failure.done():
            failure.cancel()
            log.info("stopping; running requests may take %g s to end", settings.drain_seconds)
            return 0
        log.critical("ending: %s", failure.exception(), exc_info=failure.exception())
    return 1


def leave_now(number: int) -> Never:
    """A signal while the engine starts: the thread that starts it cannot be cancelled."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(128 + number)


def announce(settings: PolicySettings, policy: RunningPolicy) -> None:
    if settings.ready_file is not None:
        ports = {"port": policy.port, "openai_port": policy.openai_port, "metrics_port": policy.metrics_port}
        write_json(settings.ready_file, ports)
    log.info(
        "serving: gRPC %s, OpenAI http://127.0.0.1:%d/v1, metrics port %d, %d versions fit",
        policy.hello.endpoint,
        policy.openai_port,
        policy.metrics_port,
        policy.hello.slots,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="qerld policy",
        description="Start a policy server: vLLM with one adapter slot a version. It attaches itself to the learner.",
        usage="qerld policy --model FOLDER [--SETTING VALUE ...]",
    )
    flags.add_flags(parser, PolicySettings)
    settings = flags.parsed(PolicySettings, parser, sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return asyncio.run(run(settings))
    except CheckpointError as error:
        sys.stderr.write(f"qerld policy: model: {error}\n")
        return USAGE_ERROR
    except (FolderError, PortError, EngineSettingsError) as error:  # a restart mends none of these
        sys.stderr.write(f"qerld policy: {error}\n")
        return USAGE_ERROR
    except (OSError, RuntimeError) as error:
        log.critical("cannot start: %s", error, exc_info=error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
