"""Conversion at the edge, without a server."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from qerld.v1 import common_pb2, policy_pb2, reward_pb2, rollout_pb2, run_pb2
from qerld_learner import records
from qerld_learner.api import convert
from qerld_learner.api.checks import Checks, body_hash
from qerld_learner.api.run_config import run_config
from qerld_learner.run_options import check_run_config
from qerld_learner.trainer import aqn
from qerld_learner.trainer.algorithm import NAMES


@pytest.mark.parametrize(
    ("ours", "wire", "prefix", "unused"),
    [
        (records.RunState, run_pb2.RunState, "RUN_STATE", set()),
        (records.GroupState, rollout_pb2.GroupState, "GROUP_STATE", set()),
        (records.RolloutState, common_pb2.RolloutState, "ROLLOUT_STATE", set()),
        (records.ReceiptState, reward_pb2.ReceiptState, "RECEIPT_STATE", set()),
        (records.VersionState, policy_pb2.VersionState, "VERSION_STATE", set()),
        (records.FinishReason, common_pb2.FinishReason, "FINISH_REASON", set()),
        (records.Answer, common_pb2.Answer, "ANSWER", set()),
    ],
)
def test_enums_map_one_to_one(ours: type[StrEnum], wire: Any, prefix: str, unused: set[str]) -> None:
    numbers = {convert.to_enum(wire, prefix, value) for value in ours}
    assert numbers == set(wire.values()) - {0}


def test_run_config_defaults_are_those_of_the_records() -> None:
    checks = Checks()
    config = run_config(checks, run_pb2.RunConfig())
    assert checks.violations == []
    assert config == records.RunConfig()
    assert check_run_config(config) == []


def test_run_config_survives_a_round_trip() -> None:
    config = records.RunConfig(
        lora_rank=4,
        lora_alpha=3.0,
        lora_rslora=True,
        target_modules=("q_proj",),
        advantage="mean_only",
        aggregation="sequence_mean",
        clip_low=0.1,
        kl_coef=0.01,
        tis_cap=0.0,
        optimizer="adamw_8bit",
        lr_schedule="cosine",
        warmup_steps=5,
        final_learning_rate=1e-6,
        beta1=0.0,
        max_grad_norm=0.0,
        noise_schedule="exponential",
        sigma_start=0.02,
        sigma_end=0.001,
        noise_stages=4,
        noise_relative=True,
        noise_dtype="bfloat16",
        max_lag=0,
        max_steps=7,
        schedule_steps=9,
        seed=11,
        reward_deadline=1.5,
        drop_zero_variance=False,
        canary_tolerance=0.5,
        max_sampling_rounds=3,
        evaluation=records.HeldOutConfig(3, "a.jsonl", 7, 4, False, 0.6, 99, "think", "be kind", 12.5),
    )
    checks = Checks()
    assert run_config(checks, convert.run_config(config)) == config
    assert checks.violations == []


@pytest.mark.parametrize("schedule", aqn.SCHEDULES)
@pytest.mark.parametrize("old_policy", NAMES["old_policy"])
def test_every_schedule_and_old_policy_has_a_number(schedule: str, old_policy: str) -> None:
    config = records.RunConfig(noise_schedule=schedule, old_policy=old_policy, correction="none")
    assert run_config(Checks(), convert.run_config(config)) == config


def test_alpha_and_schedule_follow_rank_and_max_steps() -> None:
    config = run_config(Checks(), run_pb2.RunConfig(lora=run_pb2.LoraConfig(rank=4), max_steps=40))
    assert (config.lora_alpha, config.schedule_steps) == (8.0, 40)
    config = run_config(Checks(), run_pb2.RunConfig(lora=run_pb2.LoraConfig(rank=16, rslora=True)))
    assert config.lora_alpha == 8.0


def test_rollout_keeps_every_field() -> None:
    span = records.SpanRecord(0, 2, 3, records.NoiseRecord(0.01, 2**63, True, "bfloat16"), environment=False)
    record = records.RolloutRecord(
        rollout_id="r",
        group_id="g",
        run="a",
        index=1,
        prompt_ids=(1, 2),
        completion_ids=(3, 4),
        logprobs=(-0.5, -1.0),
        spans=(span,),
        finish_reason=records.FinishReason.LENGTH,
        text="x",
        state=records.RolloutState.FINISHED,
        labels={"k": "v"},
        finished_at=1.25,
        reward_deadline=2.5,
    )
    wire = convert.rollout(record)
    bf16 = common_pb2.NOISE_DTYPE_BFLOAT16
    noise = common_pb2.Noise(sigma=0.01, seed=2**63, relative=True, dtype=bf16)
    assert (list(wire.prompt.ids), list(wire.completion.ids), list(wire.logprobs)) == ([1, 2], [3, 4], [-0.5, -1.0])
    assert wire.spans[0] == common_pb2.Span(begin=0, end=2, version=3, noise=noise)
    assert (wire.rollout_id, wire.group_id, wire.run, wire.index, wire.text) == ("r", "g", "a", 1, "x")
    assert (wire.finish_reason, wire.state) == (common_pb2.FINISH_REASON_LENGTH, common_pb2.ROLLOUT_STATE_FINISHED)
    assert dict(wire.labels) == {"k": "v"}
    assert (wire.finished_at.ToNanoseconds(), wire.reward_deadline.ToNanoseconds()) == (1_250_000_000, 2_500_000_000)


def test_unset_times_stay_unset() -> None:
    record = records.VersionRecord("a", 0, 0, 0, records.NoiseRecord(), records.VersionState.STAGED, "", 0, 1.0)
    assert not convert.policy_version(record).HasField("live_at")


def test_body_hash_ignores_the_request_id_and_nothing_else() -> None:
    first = reward_pb2.SubmitRewardsRequest(run="a", request_id="1")
    second = reward_pb2.SubmitRewardsRequest(run="a", request_id="2")
    other = reward_pb2.SubmitRewardsRequest(run="b", request_id="1")
    assert body_hash(first) == body_hash(second) != body_hash(other)
    assert first.request_id == "1"
    # Two kinds of mutations with the same bytes are two bodies.
    paused = run_pb2.PauseRunRequest(run="a", request_id="1")
    assert body_hash(paused) != body_hash(run_pb2.ResumeRunRequest(run="a", request_id="1"))


def test_body_hash_does_not_depend_on_the_order_of_labels() -> None:
    one = rollout_pb2.SampleRequest(run="a", labels={"x": "1", "y": "2"})
    two = rollout_pb2.SampleRequest(run="a", labels={"y": "2", "x": "1"})
    assert body_hash(one) == body_hash(two)
