"""A deleted run stays deleted over a restart, and its files stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from qerld_learner.core import Learner
from qerld_learner.errors import ConflictError, NotFoundError
from qerld_learner.records import ReceiptState, RolloutState
from qerld_learner.store import deletion
from qerld_learner.store.rewards import Closed
from qerld_learner.store.rollouts import Sampled, store_sampled

from .conftest import imported, new_id, new_run, options_for, prompt, small_config


async def test_a_restart_leaves_a_deleted_run_alone(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    learner = await Learner.open(options_for(tmp_path, tiny_model[1]))
    run, other = await new_run(learner), await new_run(learner)
    group = await imported(learner, run)
    await learner.submit_prompts(run, new_id(), "h", [prompt()])
    request_id = new_id()
    await learner.delete_run(run, request_id, "h")
    await learner.close()
    learner = await Learner.open(options_for(tmp_path, tiny_model[1]))
    try:
        assert [found.name for found in await learner.list_runs()] == [other]
        assert [status.run for status in await learner.statuses()] == [other]
        assert (tmp_path / "versions" / run / "00000000" / "adapter").is_dir()
        assert (await learner.receipt(group.rollout_ids[0])).state is ReceiptState.CANCELLED
        await learner.delete_run(run, request_id, "h")
        with pytest.raises(ConflictError, match="another body"):
            await learner.delete_run(run, request_id, "other")
        with pytest.raises(NotFoundError):
            await learner.delete_run(run, new_id(), "h")
        with pytest.raises(ConflictError, match="was deleted"):
            await learner.create_run(run, new_id(), "h", small_config())
    finally:
        await learner.close()


async def test_a_rollout_that_finishes_too_late_does_not_revive_its_group(learner: Learner) -> None:
    """The server's last tokens may be on their way into the store when the run is deleted."""
    run = await new_run(learner)
    events = learner.sample(run, new_id(), "h", prompt(2))
    opened = await anext(events)
    late = Sampled(opened.rollout_ids[0], (9,), (-1.0,))  # type: ignore[union-attr]

    def mutation(connection: object) -> tuple[list[str], bool]:
        groups = deletion.delete_run(connection, run, Closed())  # type: ignore[arg-type]
        return groups, store_sampled(connection, late)  # type: ignore[arg-type]

    groups, last = await learner._shared.store.write(mutation)
    assert (groups, last) == ([opened.group_id], False)  # type: ignore[union-attr]
    rollout = await learner.get_rollout(late.rollout_id)
    assert (rollout.state, rollout.completion_ids) == (RolloutState.FAILED, ())
    assert (await learner.receipt(late.rollout_id)).state is ReceiptState.CANCELLED
    await learner._deleter._let_go(run, groups, Closed())
    with pytest.raises(NotFoundError):
        await anext(events)
