"""A run that has taken its last step leaves nothing open: every rollout has its final receipt, every stream ends."""

from __future__ import annotations

import asyncio

from qerld_learner.core import Learner
from qerld_learner.promotion import Promotion
from qerld_learner.records import GroupOpened, ReceiptState, RolloutFinished, RolloutState, RunState, VersionState
from qerld_learner.store import rollouts, runs

from .conftest import imported, new_id, new_run, prompt, reward_all, until


async def finish(learner: Learner, run: str) -> None:
    """Take version 1 live, as its promotion does after the canary."""

    async def staged() -> bool:
        versions, _ = await learner.list_versions(run, 0, "")
        return versions[0].state is VersionState.STAGED

    await until(staged)
    version, _folder = await learner._shared.store.read(lambda connection: runs.find_version(connection, run, 1))
    await Promotion(learner._shared, run)._go_live(version, {}, {})


async def test_completion_closes_what_was_sampled_ahead(learner: Learner) -> None:
    run = await new_run(learner, max_steps=1, max_lag=4, groups_per_step=2)
    trained = [await imported(learner, run) for _ in range(2)]
    for group in trained:
        await reward_all(learner, group, [0.0, 1.0, 0.0, 1.0])
    ready, unrewarded = await imported(learner, run), await imported(learner, run)
    await reward_all(learner, ready, [0.0, 1.0, 0.0, 1.0])
    (queued,) = await learner.submit_prompts(run, new_id(), "h", [prompt()])
    events = learner.sample(run, new_id(), "h", prompt(2))
    opened = await anext(events)
    assert isinstance(opened, GroupOpened)
    left_over = [*ready.rollout_ids, *unrewarded.rollout_ids, *opened.rollout_ids]
    finishing = asyncio.create_task(finish(learner, run))
    watched = [receipt async for receipt in learner.watch_receipts(run, left_over)]
    await finishing
    assert {receipt.rollout_id for receipt in watched} == set(left_over)
    assert {receipt.state for receipt in watched} == {ReceiptState.CANCELLED}
    assert (await learner.get_run(run)).state is RunState.COMPLETED
    for group in trained:
        assert {(await learner.receipt(one)).state for one in group.rollout_ids} == {ReceiptState.TRAINED}
    ends = [event async for event in events]
    assert [event.rollout.state for event in ends if isinstance(event, RolloutFinished)] == [RolloutState.FAILED] * 2
    (status,) = [status for status in await learner.statuses() if status.run == run]
    assert not any(status.groups.values())
    members = await learner._shared.store.read(lambda connection: rollouts.group_rollouts(connection, queued))
    assert {member.state for member in members} == {RolloutState.FAILED}


async def test_a_group_is_not_revived_by_a_late_look_for_a_server(learner: Learner) -> None:
    run = await new_run(learner, max_steps=1, max_lag=4)
    group = await imported(learner, run)

    def late(connection: object) -> rollouts.GroupState:
        rollouts.begin_sampling(connection, group.group_id, 1)  # type: ignore[arg-type]
        return rollouts.find_group(connection, group.group_id).state  # type: ignore[arg-type]

    assert await learner._shared.store.write(late) is group.state
