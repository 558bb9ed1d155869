"""The loop on a base of each format beside NVFP4, of which the other tests are: served by vLLM, trained, live again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from statistics import fmean

import pytest
from qerld_kernels.formats import FORMATS
from qerld_kernels.quantizer import quantize_checkpoint
from qerld_learner.api.server import running_server
from qerld_learner.core import Learner
from qerld_learner.metrics import LearnerMetrics
from qerld_learner.records import RunState
from qerld_learner.settings import LearnerSettings
from qerld_service.adapters import AdapterKey
from qerld_service.engine import EngineConfig, PolicyEngine

from .conftest import PROMPT_IDS, new_run, options_for
from .looping import Loop, train

pytestmark = pytest.mark.engine


def base_of(name: str, plain: Path, folder: Path) -> Path:
    if name == "bf16":
        return plain
    quantize_checkpoint(plain, folder / name, form=FORMATS[name])
    return folder / name


@pytest.fixture(params=["bf16", "mxfp4", "nf4"])
async def loop(request: pytest.FixtureRequest, tiny_model: tuple[Path, Path], tmp_path: Path) -> AsyncIterator[Loop]:
    base, metrics = base_of(request.param, tiny_model[0], tmp_path), LearnerMetrics()
    engine = await PolicyEngine.start(
        EngineConfig(model=base, dtype="float32", max_loras=6, max_lora_rank=8, max_model_len=256)
    )
    learner = await Learner.open(options_for(tmp_path / "state", base, admission_timeout=60.0), metrics)
    settings = LearnerSettings(model=base, port=0, metrics_port=0)
    async with running_server(learner, settings, metrics) as port:
        yield Loop(learner, port, base, engine, tmp_path, metrics)
    await learner.close()
    await engine.stop()


async def preference(loop: Loop, run: str, version: int) -> float:
    """How much likelier than at first the served version makes what was rewarded in the first groups, in nats.

    The sum of advantage times log-probability over rollouts of version 0: it depends on no sampling afterwards.
    """
    total = 0.0
    groups, _ = await loop.learner.list_groups(run, None, 0, "")
    for group in groups:
        rollouts = [await loop.learner.get_rollout(one) for one in group.rollout_ids]
        if group.state != "trained" or any(span.version for rollout in rollouts for span in rollout.spans):
            continue
        rewards = [sum(token % 2 == 0 for token in rollout.completion_ids) for rollout in rollouts]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            now = await loop.engine.score(AdapterKey(run, version, False), PROMPT_IDS, rollout.completion_ids)
            total += (reward - fmean(rewards)) * (sum(now) - sum(rollout.logprobs))
    return total


async def test_the_loop_learns_on_the_base(loop: Loop) -> None:
    learner = loop.learner
    noise = {"noise_schedule": "exponential", "sigma_start": 0.05, "sigma_end": 0.01, "noise_stages": 3}
    run = await new_run(learner, **noise, schedule_steps=8, max_steps=8, learning_rate=1e-2)
    async with loop.policy():
        reports = await train(learner, run, 8)
        assert await preference(loop, run, 8) > 100  # some 600
    assert all(report.metrics["logprob_gap"] < 1e-3 for report in reports), "server and trainer have the same weights"
    assert all(report.metrics["behaviour_gap"] < 1e-3 for report in reports)
    record = await learner.get_run(run)
    assert (record.state, record.live_version) == (RunState.COMPLETED, 8)
