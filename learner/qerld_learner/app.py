"""The learner as a process: core, API, metrics, ready file, signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from qerld_kernels.exclusive import FolderError, PortError, require_free_port, require_unheld

from qerld_learner.api.server import running_server
from qerld_learner.core import Learner
from qerld_learner.errors import LearnerError, ModelFolderError, StoreError
from qerld_learner.metrics import LearnerMetrics, metrics_server
from qerld_learner.settings import LearnerSettings
from qerld_learner.store import LOCK_NAME

log = logging.getLogger(__name__)

USAGE_ERROR = 2
# A restart mends none of these.
USAGE_ERRORS = (ModelFolderError, StoreError, FolderError, PortError)
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(frozen=True)
class Ports:
    """Where the learner serves."""

    port: int
    metrics_port: int


@asynccontextmanager
async def running_learner(settings: LearnerSettings) -> AsyncIterator[Ports]:
    """Run the whole learner; yields its ports once it serves.

    Raises:
        ModelFolderError: The base model cannot be trained.
        FolderError: Another learner has the state folder, or it cannot be made.
        StoreError: The store's database cannot be used.
        PortError: A port is taken.
    """
    # Before the model is read, which takes half a minute for a large one.
    require_unheld(settings.state_dir, "state_dir", LOCK_NAME)
    require_free_port("port", settings.host, settings.port)
    require_free_port("metrics_port", settings.host, settings.metrics_port)
    metrics = LearnerMetrics()
    learner = await Learner.open(settings.options(), metrics)
    try:
        with metrics_server(metrics, settings.host, settings.metrics_port) as metrics_port:
            async with running_server(learner, settings, metrics) as port:
                yield Ports(port, metrics_port)
    finally:
        await learner.close()


@contextmanager
def _ready_file(path: Path | None, ports: Ports) -> Iterator[None]:
    """Keep a JSON file with the ports while the learner serves; it appears whole."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"port": ports.port, "metrics_port": ports.metrics_port, "pid": os.getpid()}) + "\n")
    aside.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def serve(settings: LearnerSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_learner(settings) as ports:
        with _ready_file(settings.ready_file, ports):
            address = f"gRPC {settings.host}:{ports.port}, metrics http://{settings.host}:{ports.metrics_port}/metrics"
            log.info("learner serves %s: %s", settings.model, address)
            if settings.host not in LOOPBACK:
                log.warning(
                    "there is no authentication: whoever reaches %s can train and attach servers", settings.host
                )
            await stop.wait()
            log.info("stopping; calls have %g s to finish", settings.stop_grace)
    log.info("stopped")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `qerld learner`; returns 0 after a stop by signal, 1 when it cannot start now, 2 when it never can."""
    settings, arguments = LearnerSettings.parse(sys.argv[1:] if argv is None else argv)
    if arguments.print_config:
        sys.stdout.write(settings.model_dump_json(indent=2) + "\n")
        return 0
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        asyncio.run(serve(settings))
    except (*USAGE_ERRORS, LearnerError, OSError) as error:
        sys.stderr.write(f"qerld learner: {error}\n")
        return USAGE_ERROR if isinstance(error, USAGE_ERRORS) else 1
    return 0
