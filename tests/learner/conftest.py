"""A learner in process: real store, real trainer process, the tiny model."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest_asyncio
from qerld_learner.core import Learner, LearnerOptions
from qerld_learner.records import (
    FinishReason,
    GroupRecord,
    Outcome,
    OutcomeAnswer,
    OutcomeKind,
    PromptSpec,
    RunConfig,
    SamplingSpec,
    SegmentSpec,
    TrajectorySpec,
)
from qerld_learner.replica_records import AdapterStatus, ReplicaHello, ReplicaReport

PROMPT_IDS = (5, 6, 7, 8)


def new_id() -> str:
    return uuid.uuid4().hex


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 200.0) -> None:
    """Wait until a condition holds, looking fifty times a second."""
    end = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s")
        await asyncio.sleep(0.02)


def small_config(**changes: object) -> RunConfig:
    wanted = {"lora_rank": 4, "group_size": 4, "groups_per_step": 2, "max_tokens": 8, "learning_rate": 1e-3}
    return RunConfig(**{**wanted, **changes})  # type: ignore[arg-type]


def prompt(size: int = 4, max_tokens: int = 8, **changes: object) -> PromptSpec:
    sampling = SamplingSpec(temperature=1.0, max_tokens=max_tokens, seed=7)
    return PromptSpec(PROMPT_IDS, size, sampling, **changes)  # type: ignore[arg-type]


def trajectory(last: int = 11, logprob: float = -1.0) -> TrajectorySpec:
    segment = SegmentSpec((9, 10, last), (logprob, logprob, logprob), trainable=True, version=0)
    return TrajectorySpec((segment,), FinishReason.STOP)


async def new_run(learner: Learner, **changes: object) -> str:
    name = f"run-{new_id()[:8]}"
    await learner.create_run(name, new_id(), "hash", small_config(**changes))
    return name


async def imported(learner: Learner, run: str, size: int = 4, **changes: object) -> GroupRecord:
    trajectories = [trajectory(11 + index) for index in range(size)]
    return await learner.import_group(run, new_id(), "hash", prompt(size, **changes), trajectories)


def reward(rollout_id: str, value: float) -> Outcome:
    return Outcome(rollout_id, OutcomeKind.REWARD, (value,))


async def reward_all(learner: Learner, group: GroupRecord, values: Sequence[float]) -> list[OutcomeAnswer]:
    outcomes = [reward(rollout_id, value) for rollout_id, value in zip(group.rollout_ids, values, strict=True)]
    return await learner.submit_outcomes(group.run, new_id(), "hash", outcomes)


def hello_of(learner: Learner, replica_id: str = "by-hand", **changes: object) -> ReplicaHello:
    """What a policy server says that fits the learner; nothing listens at its endpoint."""
    model = learner.model
    hashes = (model.base_sha256, model.tokenizer_sha256, model.chat_template_sha256)
    return replace(ReplicaHello(replica_id, "127.0.0.1:9", *hashes, "0", 1024, 8, 512, "float32"), **changes)  # type: ignore[arg-type]


def serving(*versions: tuple[str, int]) -> ReplicaReport:
    """A report of a server that has loaded these versions."""
    adapters = tuple(AdapterStatus(run, version, True, 0, 0.5, "", 1.0) for run, version in versions)
    return ReplicaReport(adapters, 1, True, "")


def options_for(folder: Path, model: Path, **changes: object) -> LearnerOptions:
    wanted = {"trainer_threads": 1, "admission_timeout": 0.3}
    return LearnerOptions(folder, model, **{**wanted, **changes})  # type: ignore[arg-type]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def learner(tiny_model: tuple[Path, Path], tmp_path_factory: object) -> AsyncIterator[Learner]:
    """One learner for the tests that share it; each makes its own runs."""
    folder = tmp_path_factory.mktemp("learner")  # type: ignore[attr-defined]
    opened = await Learner.open(options_for(folder, tiny_model[1]))
    yield opened
    await opened.close()
