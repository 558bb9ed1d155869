"""Both clients against a real learner in process; rollouts are imported, so no policy server is needed."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from qerld_client import (
    AlreadyExistsError,
    AsyncClient,
    Client,
    FinishReason,
    InvalidRequestError,
    LoraConfig,
    NotFoundError,
    NotServedError,
    OutcomesRejectedError,
    ReceiptState,
    Rollout,
    RunConfig,
    RunState,
    Segment,
    Task,
    TokenIds,
    Trajectory,
)

from .conftest import Target

CONFIG = RunConfig(lora=LoraConfig(rank=4), group_size=2, groups_per_step=2, max_tokens=8)
PROMPT = [5, 6, 7, 8]


def trajectories(count: int = 2) -> Sequence[Trajectory]:
    segment = Segment(tokens=TokenIds(ids=[9, 10, 11]), logprobs=[-1.0] * 3, trainable=True)
    return [Trajectory(segments=[segment], finish_reason=FinishReason.FINISH_REASON_STOP) for _ in range(count)]


async def new_run(client: AsyncClient) -> str:
    name = f"client-{uuid.uuid4().hex[:8]}"
    await client.create_run(name, CONFIG)
    return name


async def imported(client: AsyncClient, run: str, groups: int) -> list[str]:
    items = [(Task(PROMPT, {"number": str(number)}), trajectories()) for number in range(groups)]
    return [rollout_id for group in await client.import_trajectories(run, items) for rollout_id in group.rollout_ids]


async def test_runs(client: AsyncClient) -> None:
    name = await new_run(client)
    assert (await client.get_run(name)).state == RunState.RUN_STATE_RUNNING
    with pytest.raises(AlreadyExistsError):
        await client.create_run(name, RunConfig(group_size=4))
    assert (await client.create_run(name, RunConfig(group_size=4), exist_ok=True)).config.group_size == 2
    assert (await client.pause_run(name, "why not")).reason == "why not"
    assert (await client.resume_run(name)).state == RunState.RUN_STATE_RUNNING
    assert name in [run.name for run in await client.list_runs()]
    assert await client.list_replicas() == []
    with pytest.raises(NotServedError):
        await client.checkpoint_run(name)
    doomed = await new_run(client)
    await client.delete_run(doomed)
    with pytest.raises(NotFoundError):
        await client.get_run(doomed)
    with pytest.raises(NotFoundError):
        await client.get_run("nobody")
    with pytest.raises(InvalidRequestError) as caught:
        await client.sample(name, "", group_size=1)
    assert {violation.field for violation in caught.value.violations} == {"prompt.text", "group_size"}


async def test_groups_versions_and_adapters(client: AsyncClient, tmp_path: Path) -> None:
    name = await new_run(client)
    rollout_ids = await imported(client, name, 3)
    groups = [group async for group in client.list_groups(name)]
    assert [list(group.rollout_ids) for group in reversed(groups)] == [rollout_ids[i : i + 2] for i in (0, 2, 4)]
    assert (await client.get_rollout(rollout_ids[2])).labels["number"] == "1"
    assert [version.policy.version async for version in client.list_versions(name)] == [0]
    async for version in client.watch_policy(name):
        assert version.policy.version == 0
        break
    folder = await client.download_adapter(name, tmp_path / "adapter")
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


async def test_rewards_train_and_receipts_say_so(client: AsyncClient) -> None:
    name = await new_run(client)
    rollout_ids = await imported(client, name, 2)
    rewards = {rollout_id: float(i % 2) for i, rollout_id in enumerate(rollout_ids)}
    checked = await client.check_rewards(name, rewards)
    assert [item.advantage > 0 for item in checked] == [False, True, False, True]
    await client.submit_rewards(name, rewards)
    receipts = [receipt async for receipt in client.watch_receipts(name, rollout_ids, timeout=120)]
    assert {receipt.rollout_id for receipt in receipts} == set(rollout_ids)
    assert {receipt.state for receipt in receipts} == {ReceiptState.RECEIPT_STATE_TRAINED}
    assert (await client.get_receipt(rollout_ids[0])).step == 1
    with pytest.raises(OutcomesRejectedError):
        await client.submit_rewards(name, {rollout_ids[0]: math.nan})


async def test_the_async_worker_scores_what_is_pushed(client: AsyncClient) -> None:
    name = await new_run(client)
    rollout_ids = await imported(client, name, 5)

    async def reward(rollout: Rollout) -> float:
        await asyncio.sleep(0.001)
        if rollout.labels["number"] == "4":
            raise RuntimeError("the scorer is down")
        return 1.0

    state = await client.stream_rewards(name, reward, credits=3, limit=10)
    assert (state.accepted, state.rejected) == (10, 0)
    states = [(await client.get_receipt(rollout_id)).state for rollout_id in rollout_ids]
    assert states[:8] == [ReceiptState.RECEIPT_STATE_DROPPED_ZERO_VARIANCE] * 8
    assert states[8:] == [ReceiptState.RECEIPT_STATE_FAILED] * 2


async def test_the_async_worker_stops_when_told(client: AsyncClient) -> None:
    name = await new_run(client)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    async with asyncio.timeout(60):
        state = await client.stream_rewards(name, lambda rollout: 1.0, stop=stop)
    assert state.answered == 0


async def test_the_sync_client_does_the_same(client: AsyncClient, learner_target: Target, tmp_path: Path) -> None:
    """In a thread: the learner's event loop is this one."""
    name = await new_run(client)

    def use() -> None:
        with Client(learner_target.address) as sync:
            items = [(PROMPT, trajectories()) for _ in range(3)]
            groups = sync.import_trajectories(name, items)
            first = list(groups[0].rollout_ids)
            answers = sync.submit_rewards(name, dict.fromkeys(first, 1.0))
            assert len(answers) == 2
            state = sync.stream_rewards(name, lambda rollout: float(rollout.index), credits=2, threads=2, limit=4)
            assert state.accepted == 4
            rest = [rollout_id for group in groups[1:] for rollout_id in group.rollout_ids]
            with sync.watch_receipts(name, rest, timeout=120) as receipts:
                assert {receipt.state for receipt in receipts} == {ReceiptState.RECEIPT_STATE_TRAINED}
            assert len(list(sync.list_groups(name))) == 3
            assert sync.download_adapter(name, tmp_path).is_dir()
            with pytest.raises(NotFoundError):
                sync.get_rollout("nothing")

    await asyncio.to_thread(use)
