"""8-bit AdamW through the trainer's steps: near AdamW, half a byte a moment and more, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from qerld_learner.trainer.checkpoint import read_version
from qerld_learner.trainer.messages import OptimizerConfig, TrainerConfig
from qerld_learner.trainer.worker import Worker
from safetensors.torch import load_file
from trainer.conftest import make_groups, write_tiny_llama
from trainer.test_step import digest, ignore, new_run, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    """Rank 64: the masters of 64 × 64 elements and more have 8-bit moments, those of fewer keep fp32."""
    pytest.importorskip("bitsandbytes")
    base = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    config = TrainerConfig(base=str(base), device="cuda", optimizer=OptimizerConfig(kind="adamw_8bit", lr=1e-3))
    return msgspec.structs.replace(config, lora=msgspec.structs.replace(config.lora, rank=64))


def weights_after(config: TrainerConfig, folder: Path, *, restart: bool = False) -> torch.Tensor:
    worker = Worker(ignore)
    new_run(worker, config, folder)
    for number in range(1, STEPS + 1):
        worker = Worker(ignore) if restart else worker
        train(worker, config, folder, number, make_groups(number))
    state = load_file(folder / f"v{STEPS}" / "state.safetensors")
    return torch.cat([tensor.flatten() for name, tensor in sorted(state.items()) if name.startswith("weights/")])


def test_it_goes_where_adamw_goes(config: TrainerConfig, tmp_path: Path) -> None:
    eight = weights_after(config, tmp_path / "eight")
    plain = msgspec.structs.replace(config, optimizer=OptimizerConfig(lr=1e-3))
    exact, first = weights_after(plain, tmp_path / "exact"), load_file(tmp_path / "exact" / "v0" / "state.safetensors")
    start = torch.cat([tensor.flatten() for name, tensor in sorted(first.items()) if name.startswith("weights/")])
    moved = exact - start
    assert float((eight - exact).norm() / moved.norm()) < 0.2
    state, _ = read_version(tmp_path / "eight" / f"v{STEPS}", config, torch.device("cpu"))
    small = [name for name, weight in state.weights.items() if weight.numel() < 4096]
    assert {state.first_moments[name].dtype for name in small} <= {torch.float32}
    assert {state.first_moments[n].dtype for n in set(state.weights) - set(small)} == {torch.uint8}
    assert len(state.absmax) == 2 * (len(state.weights) - len(small)) > 0


def test_it_is_resumed_bit_for_bit(config: TrainerConfig, tmp_path: Path) -> None:
    weights_after(config, tmp_path / "straight")
    weights_after(config, tmp_path / "broken", restart=True)
    assert digest(tmp_path / "straight" / f"v{STEPS}") == digest(tmp_path / "broken" / f"v{STEPS}")
