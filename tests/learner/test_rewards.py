"""Outcomes against the real store and trainer: answers, groups, receipts; no policy server is needed."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from qerld_learner.core import Learner
from qerld_learner.errors import (
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RetryLaterError,
)
from qerld_learner.loop import RunLoop
from qerld_learner.records import (
    Answer,
    FinishReason,
    GroupState,
    Outcome,
    OutcomeKind,
    ReceiptState,
    RunState,
    SegmentSpec,
    TrajectorySpec,
    VersionState,
)
from qerld_learner.store import schema, steps
from sqlalchemy import Connection, update

from .conftest import (
    hello_of,
    imported,
    new_id,
    new_run,
    options_for,
    prompt,
    reward,
    reward_all,
    small_config,
    trajectory,
    until,
)


async def states(learner: Learner, rollout_ids: tuple[str, ...]) -> list[ReceiptState]:
    return [(await learner.receipt(rollout_id)).state for rollout_id in rollout_ids]


async def group_state(learner: Learner, run: str, group_id: str) -> GroupState:
    groups, _ = await learner.list_groups(run, None, 0, "")
    return next(group.state for group in groups if group.group_id == group_id)


async def until_staged(learner: Learner, run: str, version: int = 1) -> None:
    async def staged() -> bool:
        return len((await learner.list_versions(run, 0, ""))[0]) > version

    await until(staged)


async def test_receipts_follow_a_rollout_and_sum_up(learner: Learner) -> None:
    run = await new_run(learner)
    first, second = await imported(learner, run), await imported(learner, run)
    assert await states(learner, first.rollout_ids) == [ReceiptState.PENDING] * 4
    await learner.submit_outcomes(run, new_id(), "h", [reward(first.rollout_ids[0], 1.0)])
    receipt = await learner.receipt(first.rollout_ids[0])
    assert (receipt.state, receipt.group_outcomes, receipt.group_size) == (ReceiptState.BUFFERED, 1, 4)
    error = Outcome(first.rollout_ids[1], OutcomeKind.ERROR, detail="scorer is down")
    abstention = Outcome(first.rollout_ids[2], OutcomeKind.ABSTENTION)
    await learner.submit_outcomes(run, new_id(), "h", [error, abstention, reward(first.rollout_ids[3], 0.0)])
    assert await group_state(learner, run, first.group_id) is GroupState.READY
    await reward_all(learner, second, [0.0, 1.0, 0.0, 1.0])
    await until_staged(learner, run)
    trained, failed, abstained = ReceiptState.TRAINED, ReceiptState.FAILED, ReceiptState.ABSTAINED
    assert await states(learner, first.rollout_ids) == [trained, failed, abstained, trained]
    receipts = [await learner.receipt(rollout_id) for rollout_id in second.rollout_ids]
    assert Counter(r.state for r in receipts) == {trained: 4}
    assert sum(r.advantage or 0.0 for r in receipts) == pytest.approx(0, abs=1e-5)
    assert all(r.step == r.version == 1 for r in receipts)
    assert all(r.ratio is not None and r.clipped_share is not None for r in receipts)
    # The error did not enter as a zero: with rewards 1 and 0 alone the advantages are ±1/√2.
    own = await learner.receipt(first.rollout_ids[0])
    assert own.advantage == pytest.approx(2**-0.5, rel=1e-4)


async def test_rewards_by_turn_and_token_train_their_own_tokens(learner: Learner) -> None:
    """The receipt's advantage is the mean over the rollout's tokens; equal sums are no reason to drop a group."""
    run = await new_run(learner, groups_per_step=1, advantage="mean_only")
    group = await imported(learner, run, 2)
    early = Outcome(group.rollout_ids[0], OutcomeKind.TOKEN_REWARDS, (1.0, 0.0, 0.0))
    late = Outcome(group.rollout_ids[1], OutcomeKind.TOKEN_REWARDS, (0.0, 0.0, 1.0))
    checked = await learner.check_outcomes(run, [early, late])
    assert [item.advantage for item in checked] == [None, None]
    await learner.submit_outcomes(run, new_id(), "h", [early, late])
    await until_staged(learner, run)
    first, second = [await learner.receipt(rollout_id) for rollout_id in group.rollout_ids]
    # Rewards less their mean 1/3; at each token the sum of those to come.
    assert first.advantage == pytest.approx((0 + -2 / 3 + -1 / 3) / 3)
    assert second.advantage == pytest.approx((0 + 1 / 3 + 2 / 3) / 3)


async def test_rollouts_cut_off_are_filtered_where_the_run_says_so(learner: Learner) -> None:
    run = await new_run(learner, groups_per_step=1, overlong="filter")
    trajectories = [replace(trajectory(11), finish_reason=FinishReason.LENGTH), trajectory(12), trajectory(13)]
    group = await learner.import_group(run, new_id(), "h", prompt(3), trajectories)
    await reward_all(learner, group, [1.0, 0.0, 1.0])
    await until_staged(learner, run)
    filtered, trained = ReceiptState.DROPPED_FILTERED, ReceiptState.TRAINED
    assert await states(learner, group.rollout_ids) == [filtered, trained, trained]


async def test_a_group_of_one_trains_against_its_batch(learner: Learner) -> None:
    run = await new_run(learner, advantage="batch_norm", group_size=1, drop_zero_variance=False)
    groups = [await imported(learner, run, 1) for _ in range(2)]
    for group, value in zip(groups, (0.0, 1.0), strict=True):
        await reward_all(learner, group, [value])
    await until_staged(learner, run)
    receipts = [await learner.receipt(group.rollout_ids[0]) for group in groups]
    assert [receipt.state for receipt in receipts] == [ReceiptState.TRAINED] * 2
    assert [receipt.advantage for receipt in receipts] == pytest.approx([-1.0, 1.0], rel=1e-4)


async def test_a_request_id_is_one_request(learner: Learner) -> None:
    run = await new_run(learner)
    group = await imported(learner, run)
    outcome = reward(group.rollout_ids[0], 1.0)
    request_id = new_id()
    first = await learner.submit_outcomes(run, request_id, "one", [outcome])
    assert await learner.submit_outcomes(run, request_id, "one", [outcome]) == first
    with pytest.raises(ConflictError, match="another body"):
        await learner.submit_outcomes(run, request_id, "two", [reward(group.rollout_ids[0], 0.0)])
    (duplicate,) = await learner.submit_outcomes(run, new_id(), "h", [outcome])
    assert duplicate.answer is Answer.DUPLICATE
    (second,) = await learner.submit_outcomes(run, new_id(), "h", [reward(group.rollout_ids[0], 0.5)])
    assert (second.answer, second.field) == (Answer.REJECTED, "outcomes[0].reward")
    assert (await learner.receipt(group.rollout_ids[0])).group_outcomes == 1


async def test_bad_outcomes_are_rejected_one_by_one(learner: Learner) -> None:
    run = await new_run(learner)
    group = await imported(learner, run)
    ids = group.rollout_ids
    answers = await learner.submit_outcomes(
        run,
        new_id(),
        "h",
        [
            reward(ids[0], math.nan),
            reward(ids[1], 1.0),
            Outcome(ids[2], OutcomeKind.TOKEN_REWARDS, (1.0,)),
            reward("nobody", 1.0),
            reward(ids[3], math.inf),
        ],
    )
    rejected, accepted = Answer.REJECTED, Answer.ACCEPTED
    assert [a.answer for a in answers] == [rejected, accepted, rejected, rejected, rejected]
    assert answers[2].field == "outcomes[2].token_rewards"
    assert answers[3].field == "outcomes[3].rollout_id"
    pending = ReceiptState.PENDING
    assert await states(learner, ids) == [pending, ReceiptState.BUFFERED, pending, pending]
    with pytest.raises(NotFoundError, match="unknown run"):
        await learner.submit_outcomes("nowhere", new_id(), "h", [])
    with pytest.raises(InvalidRequestError, match="4096"):
        await learner.submit_outcomes(run, new_id(), "h", [reward(ids[0], 1.0)] * 4097)


async def test_a_dry_run_tells_advantages_and_stores_nothing(learner: Learner) -> None:
    run = await new_run(learner)
    group = await imported(learner, run)
    await learner.submit_outcomes(run, new_id(), "h", [reward(group.rollout_ids[0], 0.0)])
    said = [reward(group.rollout_ids[1], 1.0), reward(group.rollout_ids[2], math.nan)]
    good, bad = await learner.check_outcomes(run, said)
    assert good.advantage == pytest.approx(2**-0.5, rel=1e-4)
    assert (bad.answer, bad.advantage, len(bad.problems)) == (Answer.REJECTED, None, 1)
    assert await states(learner, group.rollout_ids[1:3]) == [ReceiptState.PENDING] * 2


async def test_groups_without_signal_are_dropped_and_counted(learner: Learner) -> None:
    run = await new_run(learner)
    flat = await imported(learner, run)
    await reward_all(learner, flat, [0.25] * 4)
    assert await states(learner, flat.rollout_ids) == [ReceiptState.DROPPED_ZERO_VARIANCE] * 4
    assert await group_state(learner, run, flat.group_id) is GroupState.DROPPED
    alone = await imported(learner, run)
    errors = [Outcome(rollout_id, OutcomeKind.ERROR) for rollout_id in alone.rollout_ids[1:]]
    await learner.submit_outcomes(run, new_id(), "h", [reward(alone.rollout_ids[0], 1.0), *errors])
    assert await states(learner, alone.rollout_ids) == [ReceiptState.DROPPED_EXPIRED, *[ReceiptState.FAILED] * 3]


async def test_a_deadline_closes_a_group_with_what_it_has(learner: Learner) -> None:
    run = await new_run(learner)
    enough, short = [await imported(learner, run, reward_deadline=500.0) for _ in range(2)]
    rollout = await learner.get_rollout(short.rollout_ids[0])
    assert rollout.finished_at is not None
    assert rollout.reward_deadline is not None
    assert rollout.reward_deadline - rollout.finished_at == pytest.approx(500.0, abs=10)
    outcomes = [
        reward(enough.rollout_ids[0], 1.0),
        reward(enough.rollout_ids[1], 0.0),
        reward(short.rollout_ids[0], 1.0),
    ]
    await learner.submit_outcomes(run, new_id(), "h", outcomes)
    # The deadline comes when the outcomes are in, however slow this machine is.
    await learner._shared.store.write(
        lambda c: c.execute(update(schema.groups).where(schema.groups.c.run == run).values(deadline=time.time()))
    )
    async with asyncio.timeout(60):
        async for receipt in learner.watch_receipts(run, short.rollout_ids):
            assert receipt.state is ReceiptState.DROPPED_EXPIRED
    assert await group_state(learner, run, enough.group_id) is GroupState.READY
    buffered, expired = ReceiptState.BUFFERED, ReceiptState.DROPPED_EXPIRED
    assert await states(learner, enough.rollout_ids) == [buffered, buffered, expired, expired]
    (late,) = await learner.submit_outcomes(run, new_id(), "h", [reward(enough.rollout_ids[3], 1.0)])
    assert late.answer is Answer.REJECTED
    assert "deadline" in late.problem


async def test_pause_and_resume(learner: Learner) -> None:
    run = await new_run(learner)
    groups = [await imported(learner, run) for _ in range(2)]
    paused = await learner.pause_run(run, new_id(), "h", "lunch")
    assert (paused.state, paused.reason) == (RunState.PAUSED, "lunch")
    for group in groups:
        await reward_all(learner, group, [0.0, 1.0, 0.0, 1.0])
    with pytest.raises(PreconditionError, match="lunch"):
        await imported(learner, run)
    with pytest.raises(PreconditionError, match="lunch"):
        await anext(learner.sample(run, new_id(), "h", prompt()))
    assert not await RunLoop(learner._shared, run)._turn()
    assert await group_state(learner, run, groups[0].group_id) is GroupState.READY
    await learner.resume_run(run, new_id(), "h")
    await until_staged(learner, run)
    version = await learner.get_version(run, 1)
    assert version.state is VersionState.STAGED  # no policy server: it waits


async def test_a_full_buffer_asks_for_patience(learner: Learner) -> None:
    run = await new_run(learner, max_lag=0)
    for _ in range(2):
        await imported(learner, run)
    with pytest.raises(RetryLaterError, match="limit is 2") as caught:
        await anext(learner.sample(run, new_id(), "h", prompt()))
    assert caught.value.retry_after > 0
    assert not caught.value.unavailable


async def test_what_cannot_be_trained_is_refused(learner: Learner) -> None:
    run = await new_run(learner)
    hot = prompt()
    hot = type(hot)(hot.prompt_ids, 1, type(hot.sampling)(0.5, 8, 1))
    with pytest.raises(InvalidRequestError) as caught:
        await anext(learner.sample(run, new_id(), "h", hot))
    assert {v.field for v in caught.value.violations} == {"group_size", "sampling.temperature"}
    environment = TrajectorySpec((SegmentSpec((1, 2), (), False, 0),), FinishReason.STOP)
    unknown = TrajectorySpec((SegmentSpec((1, 2), (-1.0, math.nan), True, 5),), FinishReason.STOP)
    with pytest.raises(InvalidRequestError) as caught:
        await learner.import_group(run, new_id(), "h", prompt(2), [environment, unknown])
    fields = {v.field for v in caught.value.violations}
    assert "trajectories[1].segments[0].version" in fields
    assert "trajectories[1].segments[0].logprobs" in fields
    wrong = small_config(group_size=1, noise_schedule="square", advantage="magic")
    with pytest.raises(InvalidRequestError) as caught:
        await learner.create_run("bad", new_id(), "h", wrong)
    assert {v.field for v in caught.value.violations} == {
        "config.group_size",
        "config.noise.schedule",
        "config.algorithm.advantage",
    }
    with pytest.raises(InvalidRequestError, match="initial_adapter"):
        await learner.create_run("bad", new_id(), "h", small_config(), b"not safetensors")


async def test_runs_are_created_once(learner: Learner) -> None:
    request_id = new_id()
    run = await learner.create_run("twice", request_id, "h", small_config())
    assert await learner.create_run("twice", request_id, "h", small_config()) == run
    with pytest.raises(ConflictError, match="another body"):
        await learner.create_run("twice", request_id, "other", small_config())
    with pytest.raises(ConflictError, match="exists already"):
        await learner.create_run("twice", new_id(), "h", small_config())
    path, digest = await learner.adapter_file("twice", 0, "adapter_model.safetensors")
    assert path.stat().st_size == (await learner.get_version("twice", 0)).adapter_bytes
    again = await learner.create_run("copy", new_id(), "h", small_config(), path.read_bytes())
    assert (await learner.get_version(again.name)).adapter_sha256 == digest


async def test_a_rank_beyond_an_attached_server_is_refused(learner: Learner) -> None:
    session = await learner.attach(hello_of(learner, "small"))
    try:
        with pytest.raises(InvalidRequestError, match=r"config.lora.rank: must be at most 8, .* got 16"):
            await learner.create_run("too-wide", new_id(), "h", small_config(lora_rank=16))
    finally:
        await session.close()
    assert "too-wide" not in {run.name for run in await learner.list_runs()}


async def test_a_caller_that_leaves_while_its_group_is_stored_still_has_it_sampled(learner: Learner) -> None:
    run = await new_run(learner)
    started, gate = threading.Event(), threading.Event()
    blocked = asyncio.create_task(learner._shared.store.write(lambda _connection: (started.set(), gate.wait(120))))
    assert await asyncio.to_thread(started.wait, 60)

    async def call() -> None:
        async for _ in learner.sample(run, new_id(), "h", prompt()):
            pass

    async def admitted() -> bool:
        # The group has its place; only writing it is left. (That the writer has work says nothing: loops write, too.)
        return learner._shared.runs[run].buffer.filled == 1

    caller = asyncio.create_task(call())
    await until(admitted)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    assert (await learner.list_groups(run, None, 0, ""))[0] == []  # the group waits behind the gate
    gate.set()
    await blocked

    async def sampled() -> bool:
        found, _ = await learner.list_groups(run, None, 0, "")
        return len(found) == 1 and learner._sampler.feed(found[0].group_id) is not None

    await until(sampled)


async def test_leases_go_to_workers_with_credits_and_come_back(learner: Learner) -> None:
    run = await new_run(learner)
    group = await imported(learner, run)
    first = learner.lease_rollouts(run, "first")
    first.add_credits(3)
    leased = [(await asyncio.wait_for(anext(first), 60)).rollout.rollout_id for _ in range(3)]
    assert leased == list(group.rollout_ids[:3])
    await learner.submit_outcomes(run, new_id(), "h", [reward(leased[0], 1.0)])
    second = learner.lease_rollouts(run, "second", lease=0.2)
    second.add_credits(4)
    rest = (await asyncio.wait_for(anext(second), 60)).rollout.rollout_id
    assert rest == group.rollout_ids[3]
    first.close()
    back = {(await asyncio.wait_for(anext(second), 60)).rollout.rollout_id for _ in range(3)}
    assert back <= {*leased[1:], rest}  # the first worker's, and the second's own lease that ran out
    second.close()


async def test_a_restart_finds_everything_again(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    options = options_for(tmp_path, tiny_model[1])
    learner = await Learner.open(options)
    run = await new_run(learner)
    group = await imported(learner, run)
    await learner.submit_outcomes(run, new_id(), "h", [reward(group.rollout_ids[0], 1.0)])
    queued = await learner.submit_prompts(run, new_id(), "h", [prompt()])

    async def admitted() -> bool:
        return await group_state(learner, run, queued[0]) is GroupState.SAMPLING

    await until(admitted)
    await learner.close()
    stray = tmp_path / "versions" / run / "00000001"
    stray.mkdir()
    learner = await Learner.open(options)
    try:
        assert not stray.exists()
        assert (await learner.receipt(group.rollout_ids[0])).state is ReceiptState.BUFFERED
        (status,) = await learner.statuses()
        assert (status.groups["awaiting_rewards"], status.groups["sampling"]) == (1, 1)
        assert await group_state(learner, run, queued[0]) is GroupState.SAMPLING
        await learner.submit_outcomes(run, new_id(), "h", [reward(i, 0.0) for i in group.rollout_ids[1:]])
        assert await group_state(learner, run, group.group_id) is GroupState.READY
    finally:
        await learner.close()


async def test_a_closed_group_makes_the_loop_write_only_when_it_may_be_the_last_of_a_batch(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that finds nothing to do keeps the store's only writer from everyone's rewards."""
    formed: list[str] = []
    form_batch = steps.form_batch

    def counted(connection: Connection, run: str, *others: Any) -> Any:
        formed.append(run)
        return form_batch(connection, run, *others)

    monkeypatch.setattr(steps, "form_batch", counted)
    run = await new_run(learner, groups_per_step=4)
    for _ in range(4):
        group = await imported(learner, run, 2)
        await reward_all(learner, group, [0.0, 1.0])
        await asyncio.sleep(0.1)  # time for the loop to look
    await until_staged(learner, run)
    assert 1 <= formed.count(run) <= 2  # one may be of its first turn


async def test_trajectory_helper_is_a_rollout_like_any_other(learner: Learner) -> None:
    run = await new_run(learner)
    group = await learner.import_group(run, new_id(), "h", prompt(2), [trajectory(3), trajectory(4)])
    rollout = await learner.get_rollout(group.rollout_ids[1])
    assert (rollout.completion_ids, rollout.index) == ((9, 10, 4), 1)
    assert [(s.begin, s.end, s.version) for s in rollout.spans] == [(0, 3, 0)]
    assert rollout.reward_deadline is not None


async def test_closing_at_once_does_not_hang(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    """The trainer is in the first moments of its start then."""
    learner = await Learner.open(options_for(tmp_path, tiny_model[1]))
    await asyncio.wait_for(learner.close(), 120)
    assert learner.trainer_pid is None
