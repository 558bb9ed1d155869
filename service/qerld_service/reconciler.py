"""Brings the engine to the versions that the learner wants: download, load, serve, drain, unload.

Level-triggered: after every change, wanted or done, `plan` compares again; nothing depends on having seen each change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from qerld.v1 import common_pb2, policy_pb2_grpc, replica_pb2

from qerld_service.adapters import AdapterError, AdapterKey, SlotsFullError
from qerld_service.desired import DesiredAdapter, Held, Phase, VersionId, plan, reconciled
from qerld_service.downloads import AdapterFolders, DownloadError
from qerld_service.engine import EngineDiedError, PolicyEngine
from qerld_service.metrics import PolicyMetrics

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 30.0
# So many failed tries in a row, about 15 seconds, may pass by themselves; more are reported as a refusal.
PASSING_FAILURES = 5


class NotServedError(RuntimeError):
    """The version is not served here; the text says why."""


class Reconciler:
    """Owns which versions the engine has. Everything runs on the event loop that made it.

    `crashed` gets the exception of an action that failed in a way that no adapter explains; the owner should end.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        folders: AdapterFolders,
        stub: policy_pb2_grpc.PolicyServiceAsyncStub,
        slots: int,
        metrics: PolicyMetrics,
    ) -> None:
        self._engine, self._folders, self._stub = engine, folders, stub
        self._slots, self._metrics = slots, metrics
        self._generation = 0
        self._desired: Sequence[DesiredAdapter] = ()
        self._invalid: Mapping[VersionId, str] = {}
        self._refused: dict[VersionId, str] = {}
        self._held: dict[VersionId, Held] = {}
        self._failures: dict[VersionId, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.Event] = []
        self._swept = False
        self._closed = False
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        metrics.slots.set(slots)

    def want(self, generation: int, desired: Sequence[DesiredAdapter], invalid: Mapping[VersionId, str]) -> None:
        """Take a desired state; `invalid` are versions that cannot even be tried, and why."""
        self._generation, self._desired, self._invalid = generation, desired, invalid
        if not self._swept:
            self._swept = True
            self._folders.sweep(desired)
        self._advance()

    def retry_failed(self) -> None:
        """Try failed versions again: the learner is new, or was mended."""
        self._failures.clear()
        for identity in [identity for identity, entry in self._held.items() if entry.phase is Phase.FAILED]:
            del self._held[identity]
        self._advance()

    def watch(self) -> asyncio.Event:
        """An event that is set at each change; its owner clears it."""
        event = asyncio.Event()
        self._watchers.append(event)
        return event

    @property
    def reconciled(self) -> bool:
        """Whether every desired version is served, also when there is none."""
        return not self._invalid and reconciled(self._desired, self._held)

    @property
    def runs(self) -> list[str]:
        """Runs that have a live version."""
        return sorted({adapter.run for adapter in self._desired if adapter.live})

    def served(self, run: str, version: int) -> DesiredAdapter:
        """The version, if requests for it are served now; raises NotServedError."""
        entry = self._held.get((run, version))
        if entry is not None and entry.phase is Phase.SERVING:
            return entry.adapter
        why = "not desired by the learner" if entry is None else f"{entry.phase.value} {entry.error}".strip()
        raise NotServedError(f"policy: {run}@{version} is not served here: {self._refused.get((run, version), why)}")

    def live(self, run: str) -> DesiredAdapter:
        """The live version of a run; raises NotServedError when it is not served yet."""
        version = max((a.version for a in self._desired if a.live and a.run == run), default=None)
        if version is None:
            raise NotServedError(f"model: no live version of run {run!r}")
        return self.served(run, version)

    def state(self) -> replica_pb2.ReplicaState:
        """What the learner gets reported."""
        wanted = {adapter.id: adapter for adapter in self._desired}
        identities = sorted({*self._held, *wanted, *self._invalid})
        return replica_pb2.ReplicaState(
            adapters=[self._adapter_state(identity) for identity in identities],
            generation=self._generation,
            reconciled=self.reconciled,
            error="the engine died" if self._engine.errored else "",
        )

    async def close(self) -> None:
        """Give up what is under way and unload everything; requests should have ended."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(EngineDiedError):
            ours = {key for entry in self._held.values() for key in entry.adapter.keys}
            for key in sorted(ours & self._engine.loaded):
                await self._engine.unload(key)

    def _adapter_state(self, identity: VersionId) -> replica_pb2.AdapterState:
        entry = self._held.get(identity)
        state = replica_pb2.AdapterState(
            policy=common_pb2.Policy(run=identity[0], version=identity[1]), error=self._refused.get(identity, "")
        )
        if entry is not None:
            state.serving = entry.phase is Phase.SERVING
            running = self._engine.stats.in_flight
            state.in_flight = sum(running.get(key, 0) for key in entry.adapter.keys)
            state.load_seconds, state.noise_ratio = entry.load_seconds, entry.noise_ratio
            state.error = state.error or entry.error
            state.retrying = 0 < self._failures.get(identity, 0) <= PASSING_FAILURES and identity not in self._refused
        return state

    def _advance(self) -> None:
        todo = plan(self._desired, self._held, self._slots)
        refused = {
            **self._invalid,
            **{
                adapter.id: f"slots: {self._slots} (max_loras) are taken by more important versions, this one needs "
                f"{len(adapter.keys)}; raise max_loras or lower max_lag"
                for adapter in todo.excess
            },
        }
        for identity in refused.keys() - self._refused.keys():
            self._metrics.load_failures.labels(refused[identity].partition(":")[0]).inc()
        self._refused = refused
        for identity in todo.forget:
            self._folders.remove(self._held.pop(identity).adapter)
        for identity in todo.unload:
            self._held[identity].phase = Phase.DRAINING
            self._start(self._unload(self._held[identity]))
        for adapter in todo.load:
            self._held[adapter.id] = Held(adapter, Phase.LOADING)
            self._start(self._load(self._held[adapter.id]))
        self._changed()

    def _changed(self) -> None:
        phases = [entry.phase for entry in self._held.values()]
        self._metrics.desired.set(len(self._desired))
        self._metrics.serving.set(phases.count(Phase.SERVING))
        self._metrics.reconciled.set(self.reconciled)
        for event in self._watchers:
            event.set()

    def _start(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.crashed.done():
            self.crashed.set_exception(error)
            self.crashed.exception()  # nobody may be waiting for it any more: the server is on its way down

    async def _load(self, entry: Held) -> None:
        started = time.monotonic()
        try:
            folder = await self._folders.fetch(self._stub, entry.adapter)
            await self._load_instances(entry, folder)
        except DownloadError as error:
            self._fail(entry, "download", error)
        except SlotsFullError as error:
            self._fail(entry, "slots", error)
        except AdapterError as error:
            self._fail(entry, "adapter", error)
        else:
            entry.phase, entry.load_seconds = Phase.SERVING, time.monotonic() - started
            self._failures.pop(entry.adapter.id, None)
            self._metrics.loads.inc()
            self._metrics.swap_seconds.observe(entry.load_seconds)
            log.info("serving %s@%d after %.3f s", entry.adapter.run, entry.adapter.version, entry.load_seconds)
        self._advance()

    async def _load_instances(self, entry: Held, folder: Path) -> None:
        """Load all instances of the version or none."""
        loaded: list[AdapterKey] = []
        try:
            for key in entry.adapter.keys:
                await self._engine.load(key, folder, entry.adapter.noise if key.noisy else None)
                loaded.append(key)
        except (AdapterError, SlotsFullError):
            for key in loaded:
                await self._engine.unload(key)
            raise
        if entry.adapter.noise.sigma > 0:
            entry.noise_ratio = self._engine.stats.noise_realised[loaded[-1]]
            self._metrics.noise_ratio.set(entry.noise_ratio)

    async def _unload(self, entry: Held) -> None:
        for key in entry.adapter.keys:
            await self._engine.unload(key)
        del self._held[entry.adapter.id]
        self._folders.remove(entry.adapter)
        self._metrics.unloads.inc()
        log.info("unloaded %s@%d", entry.adapter.run, entry.adapter.version)
        self._advance()

    def _fail(self, entry: Held, reason: str, error: Exception) -> None:
        """Report the version as failed. A broken adapter stays so; a download or a slot may work a little later."""
        entry.phase, entry.error = Phase.FAILED, f"{reason}: {error}"
        self._metrics.load_failures.labels(reason).inc()
        log.error("cannot serve %s@%d: %s", entry.adapter.run, entry.adapter.version, entry.error)
        if reason != "adapter":
            failures = self._failures[entry.adapter.id] = self._failures.get(entry.adapter.id, 0) + 1
            delay = min(FIRST_RETRY_SECONDS * 2 ** (failures - 1), MAX_RETRY_SECONDS)
            asyncio.get_running_loop().call_later(delay, self._retry, entry)

    def _retry(self, entry: Held) -> None:
        if not self._closed and self._held.get(entry.adapter.id) is entry and entry.phase is Phase.FAILED:
            del self._held[entry.adapter.id]
            self._advance()
