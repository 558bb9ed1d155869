"""The learner's types to wire types. `requests.py` is the other direction, with the checks.

Enums map by name: `RunState.RUNNING` is `RUN_STATE_RUNNING`; a test walks all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from qerld.v1 import common_pb2, policy_pb2, replica_pb2, reward_pb2, rollout_pb2, run_pb2

from qerld_learner import records, replica_records
from qerld_learner.leases import Lease
from qerld_learner.replicas import ReplicaInfo

# Fields of `qerld.v1.Algorithm`, named as in `RunConfig`: enums with the prefix of their values, and numbers.
ALGORITHM: dict[str, tuple[Any, str]] = {
    "preset": (run_pb2.AlgorithmPreset, "ALGORITHM_PRESET"),
    "advantage": (run_pb2.AdvantageEstimator, "ADVANTAGE_ESTIMATOR"),
    "ratio": (run_pb2.ImportanceRatio, "IMPORTANCE_RATIO"),
    "old_policy": (run_pb2.OldPolicy, "OLD_POLICY"),
    "clip": (run_pb2.LossClip, "LOSS_CLIP"),
    "aggregation": (run_pb2.LossAggregation, "LOSS_AGGREGATION"),
    "kl_estimator": (run_pb2.KlEstimator, "KL_ESTIMATOR"),
    "kl_in": (run_pb2.KlPlacement, "KL_PLACEMENT"),
    "overlong": (run_pb2.Overlong, "OVERLONG"),
    "correction": (run_pb2.MismatchCorrection, "MISMATCH_CORRECTION"),
}
ALGORITHM_NUMBERS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "loss_divisor",
    "kl_coef",
    "entropy_coef",
    "overlong_buffer",
    "overlong_penalty",
    "tis_cap",
    "mask_low",
    "mask_high",
    "epochs",
    "mini_batches",
)


def to_enum(wrapper: Any, prefix: str, value: StrEnum | str) -> Any:
    """Return the wire number of `value` in the enum `wrapper`, whose names begin with `prefix`."""
    return wrapper.Value(f"{prefix}_{str(value).upper()}")


def timestamp(seconds: float | None) -> Timestamp | None:
    """Return UNIX seconds as a Timestamp."""
    if seconds is None:
        return None
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp


def token_ids(ids: Iterable[int]) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=ids)


def noise(record: records.NoiseRecord) -> common_pb2.Noise:
    dtype = to_enum(common_pb2.NoiseDtype, "NOISE_DTYPE", record.dtype)
    return common_pb2.Noise(sigma=record.sigma, seed=record.seed, relative=record.relative, dtype=dtype)


def span(record: records.SpanRecord) -> common_pb2.Span:
    return common_pb2.Span(
        begin=record.begin,
        end=record.end,
        version=record.version,
        noise=None if record.environment else noise(record.noise),
        environment=record.environment,
    )


def finish_reason(reason: records.FinishReason | None) -> common_pb2.FinishReason.ValueType:
    if reason is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    number: common_pb2.FinishReason.ValueType = to_enum(common_pb2.FinishReason, "FINISH_REASON", reason)
    return number


def rollout(record: records.RolloutRecord) -> common_pb2.Rollout:
    return common_pb2.Rollout(
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        run=record.run,
        index=record.index,
        prompt=token_ids(record.prompt_ids),
        completion=token_ids(record.completion_ids),
        logprobs=record.logprobs,
        spans=[span(item) for item in record.spans],
        finish_reason=finish_reason(record.finish_reason),
        text=record.text,
        state=to_enum(common_pb2.RolloutState, "ROLLOUT_STATE", record.state),
        labels=record.labels,
        finished_at=timestamp(record.finished_at),
        reward_deadline=timestamp(record.reward_deadline),
    )


def sample_event(event: records.SampleEvent) -> rollout_pb2.SampleResponse:
    match event:
        case records.GroupOpened():
            opened = rollout_pb2.GroupOpened(
                group_id=event.group_id,
                rollout_ids=event.rollout_ids,
                prompt=token_ids(event.prompt_ids),
                version=event.version,
            )
            return rollout_pb2.SampleResponse(opened=opened)
        case records.TokenDelta():
            delta = rollout_pb2.Delta(
                rollout_id=event.rollout_id,
                index=event.index,
                begin=event.begin,
                tokens=token_ids(event.ids),
                logprobs=event.logprobs,
                text=event.text,
            )
            return rollout_pb2.SampleResponse(delta=delta)
        case records.RolloutFinished():
            return rollout_pb2.SampleResponse(finished=rollout(event.rollout))


def group(record: records.GroupRecord) -> rollout_pb2.Group:
    return rollout_pb2.Group(
        group_id=record.group_id,
        run=record.run,
        state=to_enum(rollout_pb2.GroupState, "GROUP_STATE", record.state),
        rollout_ids=record.rollout_ids,
        version=record.version,
        outcomes=record.outcomes,
        labels=record.labels,
        created_at=timestamp(record.created_at),
    )


def _answer(value: records.Answer) -> common_pb2.Answer.ValueType:
    number: common_pb2.Answer.ValueType = to_enum(common_pb2.Answer, "ANSWER", value)
    return number


def outcome_answer(record: records.OutcomeAnswer) -> reward_pb2.OutcomeAnswer:
    problem = common_pb2.Problem(field=record.field, description=record.problem) if record.problem else None
    return reward_pb2.OutcomeAnswer(rollout_id=record.rollout_id, answer=_answer(record.answer), problem=problem)


def checked_outcome(record: records.CheckedOutcome) -> reward_pb2.CheckedOutcome:
    return reward_pb2.CheckedOutcome(
        rollout_id=record.rollout_id,
        answer=_answer(record.answer),
        problems=[common_pb2.Problem(field=field, description=text) for field, text in record.problems],
        advantage=record.advantage,
    )


def receipt(record: records.Receipt) -> reward_pb2.Receipt:
    return reward_pb2.Receipt(
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        state=to_enum(reward_pb2.ReceiptState, "RECEIPT_STATE", record.state),
        group_outcomes=record.group_outcomes,
        group_size=record.group_size,
        step=record.step,
        version=record.version,
        advantage=record.advantage,
        ratio=record.ratio,
        clipped_share=record.clipped_share,
        at=timestamp(record.at),
    )


def lease(record: Lease) -> reward_pb2.Lease:
    return reward_pb2.Lease(rollout=rollout(record.rollout), expires_at=timestamp(record.expires_at))


def policy_version(record: records.VersionRecord) -> policy_pb2.PolicyVersion:
    return policy_pb2.PolicyVersion(
        policy=common_pb2.Policy(run=record.run, version=record.version),
        parent=record.parent,
        step=record.step,
        noise=noise(record.noise),
        state=to_enum(policy_pb2.VersionState, "VERSION_STATE", record.state),
        adapter_sha256=record.adapter_sha256,
        adapter_bytes=record.adapter_bytes,
        created_at=timestamp(record.created_at),
        live_at=timestamp(record.live_at),
        pinned=record.pinned,
    )


def run_config(config: records.RunConfig) -> run_pb2.RunConfig:
    """Return the configuration with every field set, defaults included."""
    message = run_pb2.RunConfig(
        lora=run_pb2.LoraConfig(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            target_modules=config.target_modules,
            rslora=config.lora_rslora,
        ),
        algorithm=_algorithm(config),
        optimizer=run_pb2.Optimizer(
            kind=to_enum(run_pb2.OptimizerKind, "OPTIMIZER_KIND", config.optimizer),
            learning_rate=config.learning_rate,
            schedule=to_enum(run_pb2.LearningRateSchedule, "LEARNING_RATE_SCHEDULE", config.lr_schedule),
            warmup_steps=config.warmup_steps,
            final_learning_rate=config.final_learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        ),
        noise=_adaptive_noise(config),
        group_size=config.group_size,
        groups_per_step=config.groups_per_step,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        max_lag=config.max_lag,
        schedule_steps=config.schedule_steps,
        max_steps=config.max_steps,
        seed=config.seed,
        drop_zero_variance=config.drop_zero_variance,
        canary_tolerance=config.canary_tolerance,
        max_sampling_rounds=config.max_sampling_rounds,
    )
    if config.evaluation is not None:
        message.evaluation.CopyFrom(_held_out(config.evaluation))
    message.reward_deadline.FromNanoseconds(int(config.reward_deadline * 1e9))
    return message


def _held_out(config: records.HeldOutConfig) -> run_pb2.HeldOutEvaluation:
    message = run_pb2.HeldOutEvaluation(
        every_steps=config.every_steps,
        file=config.file,
        problems=config.problems,
        samples=config.samples,
        greedy=config.greedy,
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        instruction=config.instruction,
        system=config.system,
    )
    message.time_limit.FromNanoseconds(int(config.time_limit * 1e9))
    return message


def _algorithm(config: records.RunConfig) -> run_pb2.Algorithm:
    names = {field: to_enum(wrapper, prefix, getattr(config, field)) for field, (wrapper, prefix) in ALGORITHM.items()}
    numbers = {field: getattr(config, field) for field in ALGORITHM_NUMBERS}
    return run_pb2.Algorithm(**names, **numbers)


def _adaptive_noise(config: records.RunConfig) -> run_pb2.AdaptiveNoise:
    return run_pb2.AdaptiveNoise(
        schedule=to_enum(run_pb2.NoiseSchedule, "NOISE_SCHEDULE", config.noise_schedule),
        sigma_start=config.sigma_start,
        sigma_end=config.sigma_end,
        stages=config.noise_stages,
        relative=config.noise_relative,
        dtype=to_enum(common_pb2.NoiseDtype, "NOISE_DTYPE", config.noise_dtype),
    )


def run(record: records.RunRecord) -> run_pb2.Run:
    return run_pb2.Run(
        name=record.name,
        config=run_config(record.config),
        state=to_enum(run_pb2.RunState, "RUN_STATE", record.state),
        reason=record.reason,
        step=record.step,
        live_version=record.live_version,
        base_model=record.base_model,
        base_sha256=record.base_sha256,
        etag=record.etag,
        created_at=timestamp(record.created_at),
    )


def report(record: records.StepReport) -> run_pb2.RunReport:
    return run_pb2.RunReport(
        run=record.run,
        step=record.step,
        version=record.version,
        metrics=record.metrics,
        phase_seconds=record.phase_seconds,
        at=timestamp(record.at),
        state=to_enum(run_pb2.RunState, "RUN_STATE", record.run_state),
    )


def replica(record: ReplicaInfo) -> run_pb2.Replica:
    return run_pb2.Replica(
        replica_id=record.hello.replica_id,
        endpoint=record.hello.endpoint,
        engine_version=record.hello.engine_version,
        loaded=[common_pb2.Policy(run=name, version=version) for name, version in record.loaded],
        reconciled=record.reconciled,
        in_flight=record.in_flight,
        slots=record.hello.slots,
        quarantine_reason=record.quarantine_reason,
        refused_reason=record.refused_reason,
    )


def desired_state(record: replica_records.DesiredState) -> replica_pb2.DesiredState:
    versions = [
        replica_pb2.DesiredVersion(
            policy=common_pb2.Policy(run=item.run, version=item.version),
            adapter_sha256=item.adapter_sha256,
            noise=noise(item.noise),
            live=item.live,
        )
        for item in record.versions
    ]
    return replica_pb2.DesiredState(generation=record.generation, versions=versions)
