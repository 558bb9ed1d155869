"""8-bit AdamW, by the kernels that bitsandbytes has for the CPU: near AdamW, and its state outlives a checkpoint.

Runs train with it on a GPU only (tests/gpu/test_optimizer_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from qerld_learner.trainer.checkpoint import AdapterState, read_version, write_version
from qerld_learner.trainer.messages import OptimizerConfig, TrainerConfig
from qerld_learner.trainer.optimizers import OPTIMIZERS, Masters
from torch import nn

pytest.importorskip("bitsandbytes", minversion="0.50")
CONFIG = OptimizerConfig(kind="adamw_8bit", lr=1e-2, weight_decay=0.1)
SHAPES = {"large.lora_A.weight": (64, 130), "small.lora_B.weight": (10, 8)}  # 4096 elements and more have 8-bit moments
UPDATES = 6

Between = Callable[[AdapterState], AdapterState]


def start() -> tuple[Masters, AdapterState]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    masters = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}
    return masters, AdapterState(weights, zeros, zeros, updates=0, step=0)


def run(kind: str, between: Between = lambda state: state) -> AdapterState:
    """The state after some updates with random gradients; `between` is done to it after each."""
    masters, state = start()
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        for name, master in masters.items():
            master.data = state.weights[name].clone()
            master.grad = torch.randn(master.shape, generator=generator) * (1 + 3 * torch.rand(1, generator=generator))
        state = between(OPTIMIZERS[kind](masters, state, CONFIG))
    return state


def test_it_goes_where_adamw_goes_with_moments_of_a_byte() -> None:
    eight, exact, (_, first) = run("adamw_8bit"), run("adamw"), start()
    for name, weight in exact.weights.items():
        moved = weight - first.weights[name]
        error = float((eight.weights[name] - weight).norm() / moved.norm())
        assert error < (0.05 if name.startswith("large") else 1e-4)
    assert eight.updates == UPDATES
    assert {name: moment.dtype for name, moment in eight.first_moments.items()} == {
        "large.lora_A.weight": torch.uint8,
        "small.lora_B.weight": torch.float32,
    }
    assert {name: len(scales) for name, scales in eight.absmax.items()} == {
        "first/large.lora_A.weight": 33,  # 64 · 130 values in blocks of 256
        "second/large.lora_A.weight": 33,
    }


def test_it_goes_on_from_a_checkpoint_bit_for_bit(config: TrainerConfig, tmp_path: Path) -> None:
    config = msgspec.structs.replace(config, optimizer=CONFIG)

    def through_a_folder(state: AdapterState) -> AdapterState:
        folder = tmp_path / str(state.updates)
        write_version(folder, state, config, 0)
        return read_version(folder, config, torch.device("cpu"))[0]

    straight, broken = run("adamw_8bit"), run("adamw_8bit", through_a_folder)
    for name, weight in straight.weights.items():
        assert torch.equal(broken.weights[name], weight)
        assert torch.equal(broken.second_moments[name], straight.second_moments[name])
