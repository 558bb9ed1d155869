"""Between table rows and the learner's records."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import RowMapping

from ..records import (
    FinishReason,
    GroupRecord,
    GroupState,
    HeldOutConfig,
    NoiseRecord,
    Receipt,
    ReceiptState,
    RolloutRecord,
    RolloutState,
    RunConfig,
    RunRecord,
    RunState,
    SamplingSpec,
    SpanRecord,
    StepReport,
    VersionRecord,
    VersionState,
)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32."""
    return array("i", ids).tobytes()


def unpack_ids(blob: bytes) -> tuple[int, ...]:
    """Undo `pack_ids`."""
    return tuple(array("i", blob))


def pack_floats(values: Sequence[float]) -> bytes:
    """Return numbers as float64."""
    return array("d", values).tobytes()


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    """Undo `pack_floats`."""
    return tuple(array("d", blob))


def dump(value: Any) -> str:
    """Return compact JSON; dataclasses become objects."""
    return json.dumps(value, separators=(",", ":"), default=dataclasses.asdict)


def _config(text: str) -> RunConfig:
    fields = json.loads(text)
    fields["target_modules"] = tuple(fields["target_modules"])
    evaluation = fields.get("evaluation")
    fields["evaluation"] = HeldOutConfig(**evaluation) if evaluation else None
    return RunConfig(**fields)


def run_record(row: RowMapping) -> RunRecord:
    """Return the record of a `runs` row."""
    return RunRecord(
        name=row["name"],
        config=_config(row["config"]),
        state=RunState(row["state"]),
        reason=row["reason"],
        step=row["step"],
        live_version=row["live_version"],
        base_model=row["base_model"],
        base_sha256=row["base_sha256"],
        etag=str(row["revision"]),
        created_at=row["created_at"],
    )


def version_record(row: RowMapping) -> VersionRecord:
    """Return the record of a `versions` row."""
    return VersionRecord(
        run=row["run"],
        version=row["version"],
        parent=row["parent"],
        step=row["step"],
        noise=NoiseRecord(row["sigma"], row["noise_seed"], bool(row["noise_relative"]), row["noise_dtype"]),
        state=VersionState(row["state"]),
        adapter_sha256=row["adapter_sha256"],
        adapter_bytes=row["adapter_bytes"],
        created_at=row["created_at"],
        live_at=row["live_at"],
        pinned=bool(row["pinned"]),
    )


def version_row(record: VersionRecord, folder: str) -> dict[str, Any]:
    """Return the `versions` row of a record whose folder is relative to the state folder."""
    return {
        "run": record.run,
        "version": record.version,
        "parent": record.parent,
        "step": record.step,
        "sigma": record.noise.sigma,
        "noise_seed": record.noise.seed,
        "noise_relative": record.noise.relative,
        "noise_dtype": record.noise.dtype,
        "state": record.state.value,
        "adapter_sha256": record.adapter_sha256,
        "adapter_bytes": record.adapter_bytes,
        "folder": folder,
        "created_at": record.created_at,
        "live_at": record.live_at,
        "pinned": record.pinned,
    }


def sampling_spec(text: str) -> SamplingSpec:
    """Return the sampling of a group from its JSON."""
    fields = json.loads(text)
    fields["stop_ids"] = tuple(fields["stop_ids"])
    fields["stop_strings"] = tuple(fields["stop_strings"])
    return SamplingSpec(**fields)


def group_record(row: RowMapping) -> GroupRecord:
    """Return the record of a `groups` row; rollout ids follow from the group's id."""
    return GroupRecord(
        group_id=row["group_id"],
        run=row["run"],
        state=GroupState(row["state"]),
        rollout_ids=rollout_ids(row["group_id"], row["group_size"]),
        version=row["version"],
        outcomes=row["outcomes"],
        labels=json.loads(row["labels"]),
        created_at=row["created_at"],
    )


def rollout_ids(group_id: str, size: int) -> tuple[str, ...]:
    """Return the ids of a group's rollouts, by index."""
    return tuple(f"{group_id}-{index}" for index in range(size))


def rollout_record(row: RowMapping) -> RolloutRecord:
    """Return the record of a `rollouts` row joined with its group's prompt, labels and deadline."""
    return RolloutRecord(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        run=row["run"],
        index=row["position"],
        prompt_ids=unpack_ids(row["prompt_ids"]),
        completion_ids=unpack_ids(row["completion_ids"]),
        logprobs=unpack_floats(row["logprobs"]),
        spans=spans(row["spans"]),
        finish_reason=FinishReason(row["finish_reason"]) if row["finish_reason"] else None,
        text=row["text"],
        state=RolloutState(row["state"]),
        labels=json.loads(row["labels"]),
        finished_at=row["finished_at"],
        reward_deadline=row["deadline"] or _own_deadline(row),
    )


def _own_deadline(row: RowMapping) -> float | None:
    # While others of the group are sampled its deadline is open, but not earlier than this.
    return None if row["finished_at"] is None else float(row["finished_at"] + row["reward_deadline"])


def spans(text: str) -> tuple[SpanRecord, ...]:
    """Return spans from their JSON."""
    return tuple(SpanRecord(b, e, v, NoiseRecord(*noise), env) for b, e, v, noise, env in json.loads(text))


def dump_spans(records: Sequence[SpanRecord]) -> str:
    """Undo `spans`."""
    return dump([[s.begin, s.end, s.version, dataclasses.astuple(s.noise), s.environment] for s in records])


def receipt(row: RowMapping) -> Receipt:
    """Return the receipt in a `rollouts` row joined with its group's `outcomes` and `group_size`."""
    return Receipt(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        state=ReceiptState(row["receipt"]),
        group_outcomes=row["outcomes"],
        group_size=row["group_size"],
        at=row["receipt_at"],
        step=row["step"],
        version=row["version"],
        advantage=row["advantage"],
        ratio=row["ratio"],
        clipped_share=row["clipped_share"],
    )


def report(text: str) -> StepReport:
    """Return a report from its JSON."""
    fields: Mapping[str, Any] = json.loads(text)
    return StepReport(**{**fields, "run_state": RunState(fields["run_state"])})
