"""What a policy server should serve, what it holds, and the pure function that says what to do about the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from qerld_kernels.noise import Noise

from qerld_service.adapters import AdapterKey

VersionId = tuple[str, int]
"""Run and version."""


@dataclass(frozen=True)
class DesiredAdapter:
    """A version to serve: `sha256` of its safetensors file, and its noise (sigma 0 for none)."""

    run: str
    version: int
    sha256: str
    noise: Noise
    live: bool

    @property
    def id(self) -> VersionId:
        return self.run, self.version

    @property
    def same_weights_and_noise(self) -> tuple[str, Noise]:
        """What an engine slot holds; a version that changes here must be loaded again."""
        return self.sha256, self.noise

    @property
    def keys(self) -> tuple[AdapterKey, ...]:
        """The engine's instances of this version: always one without noise, which canary and evaluation use."""
        clean = AdapterKey(self.run, self.version, noisy=False)
        if self.noise.sigma == 0:
            return (clean,)
        return clean, AdapterKey(self.run, self.version, noisy=True)

    def key(self, *, noise_free: bool) -> AdapterKey:
        """The instance that serves requests with, or without, this version's noise."""
        return AdapterKey(self.run, self.version, noisy=self.noise.sigma > 0 and not noise_free)


class Phase(StrEnum):
    """Life of a version on this server."""

    LOADING = "loading"
    SERVING = "serving"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass
class Held:
    """A version on this server."""

    adapter: DesiredAdapter
    phase: Phase
    error: str = ""
    load_seconds: float = 0.0
    noise_ratio: float = 0.0

    @property
    def slots(self) -> int:
        """Engine slots that it may occupy."""
        return 0 if self.phase is Phase.FAILED else len(self.adapter.keys)


@dataclass(frozen=True)
class Plan:
    """What to do now. `excess` does not fit at all; `forget` failed and is not wanted any more.

    A wanted version that is named nowhere is either served, under load, or waits for a slot that another still holds.
    """

    load: list[DesiredAdapter] = field(default_factory=list)
    unload: list[VersionId] = field(default_factory=list)
    forget: list[VersionId] = field(default_factory=list)
    excess: list[DesiredAdapter] = field(default_factory=list)


def plan(desired: Sequence[DesiredAdapter], held: Mapping[VersionId, Held], capacity: int) -> Plan:
    """Compare what is wanted with what is here; `capacity` counts engine slots.

    Live versions come first, then the order of `desired` (the learner puts the newest first). A version under load is
    let finish before it is unloaded, and one that drains keeps its slots until it is gone.
    """
    result = Plan()
    fitting = _fitting(desired, capacity, result.excess)
    _release(fitting, held, result)
    free = capacity - sum(entry.slots for entry in held.values())
    for adapter in fitting.values():
        if _needs_load(adapter, held.get(adapter.id)) and len(adapter.keys) <= free:
            free -= len(adapter.keys)
            result.load.append(adapter)
    return result


def reconciled(desired: Sequence[DesiredAdapter], held: Mapping[VersionId, Held]) -> bool:
    """Whether every wanted version is served as wanted."""
    return all(
        (entry := held.get(adapter.id)) is not None
        and entry.phase is Phase.SERVING
        and entry.adapter.same_weights_and_noise == adapter.same_weights_and_noise
        for adapter in desired
    )


def _fitting(
    desired: Sequence[DesiredAdapter], capacity: int, excess: list[DesiredAdapter]
) -> dict[VersionId, DesiredAdapter]:
    fitting: dict[VersionId, DesiredAdapter] = {}
    for adapter in sorted(desired, key=lambda adapter: not adapter.live):
        if len(adapter.keys) <= capacity:
            capacity -= len(adapter.keys)
            fitting[adapter.id] = adapter
        else:
            excess.append(adapter)
    return fitting


def _release(fitting: Mapping[VersionId, DesiredAdapter], held: Mapping[VersionId, Held], result: Plan) -> None:
    for identity, entry in held.items():
        wanted = fitting.get(identity)
        if wanted is not None and wanted.same_weights_and_noise == entry.adapter.same_weights_and_noise:
            continue
        if entry.phase is Phase.SERVING:
            result.unload.append(identity)
        elif wanted is None and entry.phase is Phase.FAILED:
            result.forget.append(identity)


def _needs_load(adapter: DesiredAdapter, entry: Held | None) -> bool:
    """Other bytes or another noise than those that failed deserve their own try."""
    return entry is None or (
        entry.phase is Phase.FAILED and entry.adapter.same_weights_and_noise != adapter.same_weights_and_noise
    )
