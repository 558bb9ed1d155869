"""What becomes of groups and of a run when a step cannot be taken; and the comparison with the sampler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from qerld_learner.batches import BatchData, report_metrics
from qerld_learner.core import Learner
from qerld_learner.groups import Closing, Member, Verdict
from qerld_learner.promotion import fitting
from qerld_learner.records import (
    Answer,
    GroupState,
    NoiseRecord,
    OutcomeKind,
    ReceiptState,
    RolloutRecord,
    RolloutState,
    RunRecord,
    RunState,
    SpanRecord,
    VersionRecord,
    VersionState,
)
from qerld_learner.replica_records import AdapterStatus, ReplicaHello, ReplicaReport
from qerld_learner.replicas import Replica
from qerld_learner.scoring import behaviour_gap, mean_gap, policy_logprobs, trainer_scores
from qerld_learner.store import Store, rewards, rows, runs, steps
from qerld_learner.store import rollouts as stored
from qerld_learner.store.rewards import Closed
from qerld_learner.store.rollouts import Sampled
from qerld_learner.store.schema import rollouts, versions
from sqlalchemy import Connection, insert, update

from .conftest import imported, new_id, new_run, prompt, reward, reward_all, small_config, until

DAY = 86400.0


async def test_a_step_that_the_trainer_refuses_pauses_the_run_and_says_why(learner: Learner) -> None:
    """A log-probability that turned into NaN behind the checks at the door reaches the trainer, and no further."""
    run = await new_run(learner)
    groups = [await imported(learner, run) for _ in range(2)]
    broken = groups[1].rollout_ids[2]

    def set_logprobs(value: float) -> Callable[[Connection], object]:
        blob = rows.pack_floats([-1.0, value, -1.0])
        return lambda c: c.execute(update(rollouts).where(rollouts.c.rollout_id == broken).values(logprobs=blob))

    await learner._shared.store.write(set_logprobs(math.nan))
    for group in groups:
        await reward_all(learner, group, [0.0, 1.0, 0.0, 1.0])

    async def paused() -> bool:
        return (await learner.get_run(run)).state is RunState.PAUSED

    await until(paused)
    reason = (await learner.get_run(run)).reason
    assert reason.startswith("step 1 failed: BatchError: ")
    assert broken in reason
    assert "logprobs must be finite" in reason
    assert [v.version for v in (await learner.list_versions(run, 0, ""))[0]] == [0]
    assert (await learner.receipt(broken)).state is ReceiptState.BATCHED

    # Nothing is lost: with the cause gone, the same batch trains.
    await learner._shared.store.write(set_logprobs(-1.0))
    await learner.resume_run(run, new_id(), "h")

    async def trained() -> bool:
        return (await learner.receipt(broken)).state is ReceiptState.TRAINED

    await until(trained)


# Stale groups, in the store alone


def version(run: str, number: int) -> VersionRecord:
    return VersionRecord(run, number, max(0, number - 1), number, NoiseRecord(), VersionState.STAGED, "0", 1, 1.0)


def new_store_run(connection: Connection, max_lag: int) -> None:
    config = small_config(max_lag=max_lag, group_size=2, groups_per_step=1)
    run = RunRecord("r", config, RunState.RUNNING, "", 0, 0, "base", "0", "1", time.time())
    runs.add_run(connection, run, replace(version("r", 0), state=VersionState.LIVE), "versions/r/00000000")


def sampled_group(connection: Connection, number: int) -> list[str]:
    """A group of two that a version has sampled; returns its rollouts' ids."""
    group_id = stored.add_group(connection, "r", prompt(2), DAY, number, GroupState.SAMPLING)
    ids = rows.rollout_ids(group_id, 2)
    for rollout_id in ids:
        stored.store_sampled(
            connection, Sampled(rollout_id, (1, 2), (-1.0, -1.0), (SpanRecord(0, 2, number, NoiseRecord()),))
        )
    return list(ids)


def next_live(connection: Connection, number: int) -> None:
    connection.execute(insert(versions), rows.version_row(version("r", number), f"versions/r/{number:08d}"))
    runs.make_live(connection, "r", number)


def form_batch(connection: Connection) -> tuple[steps.Batch | None, Closed]:
    closed = Closed()
    return steps.form_batch(connection, "r", runs.find_run(connection, "r").config, 1, closed), closed


async def test_a_group_beyond_the_lag_is_dropped_as_stale(tmp_path: Path) -> None:
    store = Store(tmp_path)
    try:
        await store.write(lambda c: new_store_run(c, max_lag=1))
        old = await store.write(lambda c: sampled_group(c, 0))
        await store.write(lambda c: next_live(c, 1))
        within = await store.write(lambda c: sampled_group(c, 1))
        first = [reward(old[0], 1.0)]
        await store.write(lambda c: rewards.submit(c, "r", "1", "h", first, Closing()))
        assert await store.write(form_batch) == (None, Closed())  # a lag of 1 is within the limit
        await store.write(lambda c: next_live(c, 2))
        batch, closed = await store.write(form_batch)
        assert batch is None
        assert list(closed.verdicts.values()) == [Verdict.STALE]
        assert {receipt.rollout_id: receipt.state for receipt in closed.receipts} == dict.fromkeys(
            old, ReceiptState.DROPPED_STALE
        )
        receipts = await store.read(lambda c: stored.find_receipts(c, [*old, *within]))
        assert [receipts[i].state for i in old] == [ReceiptState.DROPPED_STALE] * 2
        assert [receipts[i].state for i in within] == [ReceiptState.PENDING] * 2
        # Stale is a receipt, not an error: a reward that comes too late is taken, and changes nothing.
        late, closed, _ = await store.write(
            lambda c: rewards.submit(c, "r", "2", "h", [reward(old[1], 0.0)], Closing())
        )
        assert [answer.answer for answer in late] == [Answer.ACCEPTED]
        assert closed == Closed()
        both = [reward(within[0], 1.0), reward(within[1], 0.0)]
        await store.write(lambda c: rewards.submit(c, "r", "3", "h", both, Closing()))
        batch, _ = await store.write(form_batch)
        assert batch is not None
        assert (batch.parent, batch.version, batch.step) == (2, 3, 3)
        receipts = await store.read(lambda c: stored.find_receipts(c, [*old, *within]))
        assert [receipts[i].state for i in old] == [ReceiptState.DROPPED_STALE] * 2
        assert [receipts[i].state for i in within] == [ReceiptState.BATCHED] * 2
    finally:
        store.close()


SAID = Member("i", RolloutState.FINISHED, OutcomeKind.REWARD, 1.0)


def test_the_zero_variance_share_counts_the_groups_that_were_dropped() -> None:
    """Three dropped before the batch, and one of its two groups equal where the run keeps such groups."""
    batch = steps.Batch("r", 1, 0, 1, 0, ("a", "b"), zero_variance=3)
    rollout = RolloutRecord(
        "i", "g", "r", 0, (1,), (2,), (-1.0,), (SpanRecord(0, 1, 0, NoiseRecord()),), None, "",
        RolloutState.FINISHED, {}, None, None,
    )  # fmt: skip
    data = BatchData(batch, ((rollout,), (rollout,)), {"i": SAID}, "")
    trained = {"mismatch_kl_k3": 0.0, "zero_variance_share": 0.5}
    found = report_metrics(data, trained, 0.0, 2, 1.0)
    assert (found["zero_variance_share"], found["groups_zero_variance"], found["sampling_rounds"]) == (4 / 5, 3, 3)
    data = replace(data, batch=replace(batch, zero_variance=0))
    found = report_metrics(data, trained | {"zero_variance_share": 0.0}, 0.0, 2, 1.0)
    assert (found["zero_variance_share"], found["groups_zero_variance"], found["sampling_rounds"]) == (0, 0, 1)


@pytest.mark.parametrize(("made_by", "mean", "largest"), [((4, 4), 0.0, 0.0), ((3, 4), 0.5, 1.0), ((1, 3), 2.0, 3.0)])
def test_lag_is_the_learner_version_minus_the_version_that_made_a_span(
    made_by: tuple[int, int], mean: float, largest: float
) -> None:
    """Versions are counted, not steps: number 4 may be the rollback of 3 to the weights of 2."""
    spans = [SpanRecord(i, i + 1, number, NoiseRecord()) for i, number in enumerate(made_by)]
    tool = SpanRecord(2, 3, 0, NoiseRecord(), environment=True)
    rollout = RolloutRecord(
        "i", "g", "r", 0, (1,), (2, 3, 4), (-1.0, -1.0, 0.0), (*spans, tool), None, "", RolloutState.FINISHED, {}, None,
        None,
    )  # fmt: skip
    data = BatchData(steps.Batch("r", 5, 4, 3, 0, ("g",)), ((rollout,),), {"i": SAID}, "")
    found = report_metrics(data, {"mismatch_kl_k3": 0.0, "zero_variance_share": 0.0}, 0.0, 1, 1.0)
    assert (found["lag_mean"], found["lag_max"]) == (mean, largest)


# The trainer against the sampler


def of_several_versions(rollout: RolloutRecord) -> RolloutRecord:
    spans = (SpanRecord(0, 1, 0, NoiseRecord()), SpanRecord(1, 3, 1, NoiseRecord()))
    return replace(rollout, spans=spans)


async def test_the_gap_is_taken_where_version_and_noise_are_known(learner: Learner) -> None:
    run = await new_run(learner, temperature=0.7)
    group = await imported(learner, run)
    record = await learner.get_run(run)
    shared = learner._shared
    noise = NoiseRecord(0.1, 5, True)
    spans = (SpanRecord(0, 2, 0, noise), SpanRecord(2, 3, 0, NoiseRecord(), environment=True))
    found = [replace(await learner.get_rollout(i), spans=spans) for i in group.rollout_ids]
    folder = shared.options.state_dir / (await shared.store.read(lambda c: runs.find_version(c, run, 0)))[1]
    scores = await trainer_scores(shared, record, folder, found, noise=noise, temperature=0.7)
    assert [len(one) for one in scores] == [2] * 4
    sampled = [replace(r, logprobs=(*one, 0.0)) for r, one in zip(found, scores, strict=True)]
    assert await behaviour_gap(shared, record, sampled) == 0.0
    moved = [replace(r, logprobs=(r.logprobs[0] - 0.5, *r.logprobs[1:])) for r in sampled]
    assert await behaviour_gap(shared, record, moved) == 0.25
    elsewhere = [replace(r, spans=(SpanRecord(0, 2, 0, NoiseRecord()), r.spans[1])) for r in sampled]
    without_noise = await behaviour_gap(shared, record, elsewhere)
    assert without_noise is not None
    assert without_noise > 1e-2
    assert await behaviour_gap(shared, record, [of_several_versions(r) for r in found]) is None
    await shared.store.write(lambda c: runs.forget_folders(c, run, [0]))
    assert await behaviour_gap(shared, record, sampled) is None


async def test_a_server_that_tries_again_has_not_refused() -> None:
    replica = Replica(ReplicaHello("p", "127.0.0.1:9", "", "", "", "", 4, 8, 64, "float32"))
    for retrying, refusal in ((True, ""), (False, "download: UNAVAILABLE")):
        status = AdapterStatus("r", 1, False, 0, 0.0, "download: UNAVAILABLE", 0.0, retrying)
        replica.reported = ReplicaReport((status,), 1, False, "")
        assert replica.refusal("r", 1) == refusal
    await replica.client.close()


def rollout_of_five_tokens() -> RolloutRecord:
    spans = (SpanRecord(0, 2, 0, NoiseRecord()), SpanRecord(2, 4, 0, NoiseRecord(), environment=True))
    return RolloutRecord(
        "i", "g", "r", 0, (1,), (1, 2, 3, 4), (-1.0,) * 4, spans, None, "", RolloutState.FINISHED, {}, None, None
    )


async def test_a_probe_beyond_a_servers_context_is_left_out_of_the_canary() -> None:
    record = rollout_of_five_tokens()
    long, short = (
        Replica(ReplicaHello(f"p{limit}", "127.0.0.1:9", "", "", "", "", 4, 8, limit, "float32")) for limit in (64, 4)
    )
    assert fitting([record], [long]) == [record]
    assert fitting([record], [long, short]) == []
    for replica in (long, short):
        await replica.client.close()


def test_a_server_that_scores_too_few_tokens_never_agrees() -> None:
    record = rollout_of_five_tokens()
    assert policy_logprobs(record, [-1.0, -2.0, -3.0, -4.0]) == [-1.0, -2.0]
    assert mean_gap([[-1.0, -2.0]], [policy_logprobs(record, [-1.0, -2.0, -3.0])]) == math.inf
