"""The pure part: what to load and unload, and which settings hold together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qerld_kernels.noise import Noise
from qerld_service.desired import DesiredAdapter, Held, Phase, plan, reconciled
from qerld_service.flags import SettingsError, merged
from qerld_service.settings import PolicySettings


def adapter(version: int, *, sigma: float = 0.0, live: bool = False, sha: str = "a", run: str = "r") -> DesiredAdapter:
    return DesiredAdapter(run, version, sha, Noise(sigma, 7), live)


def held(*entries: tuple[DesiredAdapter, Phase]) -> dict[tuple[str, int], Held]:
    return {wanted.id: Held(wanted, phase) for wanted, phase in entries}


def test_loads_what_is_missing_and_unloads_what_is_not_wanted() -> None:
    new, old = adapter(2, sigma=0.1), adapter(1)
    todo = plan([new], held((old, Phase.SERVING)), capacity=4)
    assert (todo.load, todo.unload, todo.excess) == ([new], [("r", 1)], [])


def test_a_version_with_noise_takes_two_slots_and_one_without_takes_one() -> None:
    assert [key.name for key in adapter(3, sigma=0.1).keys] == ["r@3~clean", "r@3"]
    assert [key.name for key in adapter(3).keys] == ["r@3~clean"]
    assert adapter(3).key(noise_free=False) == adapter(3).key(noise_free=True)


def test_a_load_waits_while_a_draining_version_holds_the_slots() -> None:
    old, new = adapter(1, sigma=0.1), adapter(2, sigma=0.1)
    todo = plan([new], held((old, Phase.DRAINING)), capacity=3)
    assert (todo.load, todo.excess) == ([], [])
    assert plan([new], {}, capacity=3).load == [new]


def test_live_versions_come_first_and_what_does_not_fit_is_named() -> None:
    live, newer = adapter(1, sigma=0.1, live=True), adapter(2, sigma=0.1)
    todo = plan([newer, live], {}, capacity=3)
    assert (todo.load, todo.excess) == ([live], [newer])


def test_a_failed_version_is_left_alone_until_its_bytes_change() -> None:
    broken = adapter(1)
    state = held((broken, Phase.FAILED))
    assert plan([broken], state, capacity=2).load == []
    mended = replace(broken, sha256="b")
    assert plan([mended], state, capacity=2).load == [mended]
    assert plan([], state, capacity=2).forget == [("r", 1)]


def test_changed_noise_means_unload_then_load() -> None:
    before, after = adapter(1, sigma=0.1), adapter(1, sigma=0.2)
    todo = plan([after], held((before, Phase.SERVING)), capacity=8)
    assert (todo.load, todo.unload) == ([], [("r", 1)])
    assert not reconciled([after], held((before, Phase.SERVING)))


def test_reconciled_is_true_with_nothing_desired() -> None:
    assert reconciled([], held((adapter(1), Phase.DRAINING)))
    assert not reconciled([adapter(1)], held((adapter(1), Phase.LOADING)))


VERSIONS = st.builds(
    adapter,
    st.integers(0, 5),
    sigma=st.sampled_from([0.0, 0.1]),
    live=st.booleans(),
    sha=st.sampled_from("ab"),
    run=st.sampled_from("rs"),
)


@given(
    st.lists(VERSIONS, max_size=8, unique_by=lambda a: a.id),
    st.lists(st.tuples(VERSIONS, st.sampled_from(Phase)), max_size=6, unique_by=lambda e: e[0].id),
    st.integers(2, 12),
)
def test_a_plan_never_takes_more_slots_than_there_are(
    desired: list[DesiredAdapter], entries: list[tuple[DesiredAdapter, Phase]], capacity: int
) -> None:
    state = held(*entries)
    todo = plan(desired, state, capacity)
    used = sum(entry.slots for entry in state.values())
    if todo.load:
        assert used + sum(len(a.keys) for a in todo.load) <= capacity
    assert all(state[identity].phase is Phase.SERVING for identity in todo.unload)
    assert not {a.id for a in todo.load} & {i for i, e in state.items() if e.phase is not Phase.FAILED}


@given(st.lists(VERSIONS, max_size=8, unique_by=lambda a: a.id), st.integers(2, 12))
def test_carrying_plans_out_reaches_the_desired_state(desired: list[DesiredAdapter], capacity: int) -> None:
    state = held((adapter(0, sigma=0.1, sha="z"), Phase.SERVING))
    for _ in range(3):
        todo = plan(desired, state, capacity)
        for identity in todo.unload:
            del state[identity]
        for wanted in todo.load:
            state[wanted.id] = Held(wanted, Phase.SERVING)
    todo = plan(desired, state, capacity)
    assert (todo.load, todo.unload) == ([], [])
    assert reconciled([a for a in desired if a not in todo.excess], state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_loras": 8, "max_cpu_loras": 9}, "max_cpu_loras: must be at least max_loras \\+ 2 = 10, got 9"),
        ({"host": "0.0.0.0"}, "endpoint: must be set when host is 0.0.0.0"),
        ({"port": 7000, "metrics_port": 7000}, "metrics_port: must differ from port, both are 7000"),
        ({"learner": "somewhere"}, "learner: .*must be host:port"),
        ({"max_loras": 1}, "max_loras: .*greater than or equal to 2"),
        ({"nonsense": 1}, "nonsense: Extra inputs"),
    ],
)
def test_settings_that_do_not_hold_together_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        merged(PolicySettings, {"model": "m"}, given)


def test_flags_beat_the_environment_which_beats_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QERLD_POLICY_PORT", "2")
    monkeypatch.setenv("QERLD_POLICY_OPENAI_PORT", "2000")
    file = {"model": "m", "port": 1, "openai_port": 1, "metrics_port": 3000}
    settings = merged(PolicySettings, file, {"port": 3})
    assert (settings.port, settings.openai_port, settings.metrics_port) == (3, 2000, 3000)
    assert settings.model == Path("m")


def test_every_setting_has_a_description() -> None:
    assert [name for name, info in PolicySettings.model_fields.items() if not info.description] == []
