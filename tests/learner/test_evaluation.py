"""What evaluations keep: their versions' files and places."""

from __future__ import annotations

import pytest
from qerld_learner.core import Learner
from qerld_learner.held_out import due
from qerld_learner.records import HeldOutConfig, NoiseRecord, VersionRecord, VersionState
from qerld_learner.replica_records import DesiredVersion
from qerld_learner.replicas import ReplicaPool
from qerld_learner.versions import collectable

from .conftest import hello_of


def retired(version: int) -> VersionRecord:
    return VersionRecord("r", version, version - 1, version, NoiseRecord(), VersionState.RETIRED, "", 0, 0.0)


def test_files_of_an_evaluated_version_are_kept() -> None:
    kept = [(retired(version), f"versions/r/{version}") for version in range(9, -1, -1)]
    assert [v.version for v, _ in collectable(kept, keep=3, max_lag=2)] == [6, 5, 4, 3, 2, 1, 0]
    assert [v.version for v, _ in collectable(kept, keep=3, max_lag=2, evaluated=(4, 0))] == [6, 5, 3, 2, 1]


@pytest.mark.parametrize(
    ("step", "last", "expected"), [(0, 10, True), (1, 10, False), (4, 10, True), (10, 10, True), (9, 0, False)]
)
def test_each_nth_step_and_the_last_are_due(step: int, last: int, expected: bool) -> None:
    assert due(HeldOutConfig(every_steps=4, file="f"), step, last) is expected
    assert due(None, step, last) is False


async def test_a_version_has_room_where_a_server_has_a_slot_for_it(learner: Learner) -> None:
    pool = ReplicaPool()
    names = [("r", 9), ("r", 4), ("r", 0)]
    pool.want([DesiredVersion(run, version, "", NoiseRecord(), live=version == 9) for run, version in names])
    assert all(pool.has_room(*name) for name in names)  # no server is attached: there is hope
    await pool.attach(hello_of(learner, slots=2))
    assert [pool.has_room(*name) for name in names] == [True, True, False]
    await pool.attach(hello_of(learner, "larger", endpoint="127.0.0.1:10", slots=3))
    assert all(pool.has_room(*name) for name in names)
    assert not pool.has_room("r", 5)
    await pool.close()
