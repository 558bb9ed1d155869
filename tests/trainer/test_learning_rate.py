"""The learning rate by step in NumPy, and that a step uses it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from qerld_learner.run_options import OPTIMIZERS as NAMES
from qerld_learner.trainer.learning_rate import SCHEDULES, lr_at
from qerld_learner.trainer.messages import OptimizerConfig, TrainerConfig
from qerld_learner.trainer.optimizers import OPTIMIZERS, OptimizerError
from qerld_learner.trainer.worker import Worker, check_config

from .conftest import make_groups
from .papers import Array
from .test_step import digest, ignore, new_run, train


def by_hand(schedule: str, lr: float, final: float, warmup: int, steps: int) -> Array:
    """Learning rates of steps 1 … M."""
    step = np.arange(1, steps + 1)
    after = np.arange(steps - warmup) / (steps - warmup)
    decay = {
        "constant": np.full_like(after, lr),
        "linear": lr + (final - lr) * after,
        "cosine": final + (lr - final) * np.cos(np.pi / 2 * after) ** 2,
    }[schedule]
    return np.concatenate([lr * step[:warmup] / max(warmup, 1), decay])


@pytest.mark.parametrize(("final", "warmup", "steps"), [(0.0, 0, 10), (0.0, 4, 10), (1e-5, 3, 100), (1e-4, 0, 1)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_step(schedule: str, final: float, warmup: int, steps: int) -> None:
    config = OptimizerConfig(lr=1e-4, schedule=schedule, warmup_steps=warmup, schedule_steps=steps, final_lr=final)
    found = [lr_at(config, step) for step in range(1, steps + 1)]
    np.testing.assert_allclose(found, by_hand(schedule, 1e-4, final, warmup, steps), rtol=1e-12)
    assert min(found) > 0
    assert lr_at(config, 10 * steps) == found[-1]


def test_a_constant_rate_with_a_warm_up_needs_no_length() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [lr_at(config, step) for step in (1, 2, 4, 5, 10**6)] == [0.25, 0.5, 1.0, 1.0, 1.0]


def test_a_step_takes_the_rate_of_its_number(config: TrainerConfig, tmp_path: Path) -> None:
    """Step 3 from the same state: as if the constant rate were that of step 3; the report says it."""
    cosine = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=1, schedule_steps=6, final_lr=1e-3)
    same = OptimizerConfig(lr=lr_at(cosine, 3))
    found = []
    for optimizer in (cosine, same):
        changed, folder, worker = (
            msgspec.structs.replace(config, optimizer=optimizer),
            tmp_path / str(optimizer.lr),
            Worker(ignore),
        )
        new_run(worker, changed, folder)
        (folder / "v0").rename(folder / "v2")
        result = train(worker, changed, folder, 3, make_groups(1))
        assert result.metrics["lr"] == lr_at(cosine, 3)
        found.append(digest(folder / "v3"))
    assert found[0] == found[1]
    assert lr_at(cosine, 3) not in (1e-2, 1e-3)


def test_eight_bits_need_a_gpu(config: TrainerConfig) -> None:
    eight = msgspec.structs.replace(config, optimizer=OptimizerConfig(kind="adamw_8bit"))
    with pytest.raises(OptimizerError, match=r"optimizer.kind adamw_8bit needs a GPU, .* 'cpu'; use adamw"):
        check_config(eight)
    other = msgspec.structs.replace(config, optimizer=OptimizerConfig(kind="sgd"))
    with pytest.raises(OptimizerError, match="must be one of adamw, adamw_8bit, got 'sgd'"):
        check_config(other)


def test_optimizers_are_those_that_a_run_may_name() -> None:
    assert tuple(OPTIMIZERS) == NAMES
