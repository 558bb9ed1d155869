"""Version folders: what PEFT reads, and what a crash or a bad disk leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftConfig
from peft.utils import load_peft_weights
from qerld_learner.trainer import checkpoint
from qerld_learner.trainer.checkpoint import AdapterState, VersionFolderError
from qerld_learner.trainer.messages import InitVersion, LoraShape, TrainerConfig, VersionMade
from qerld_learner.trainer.worker import Worker

CPU = torch.device("cpu")


def some_state() -> AdapterState:
    torch.manual_seed(0)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    return AdapterState(*({name: torch.randn(4, 64)} for _ in range(3)), updates=7, step=9)


def test_round_trip_is_bit_equal(config: TrainerConfig, tmp_path: Path) -> None:
    state = some_state()
    files = checkpoint.write_version(tmp_path / "v", state, config, seed=3)
    found, index = checkpoint.read_version(tmp_path / "v", config, CPU)
    assert index == files.index
    assert (found.updates, found.step) == (7, 9)
    for part in ("weights", "first_moments", "second_moments"):
        for name, tensor in getattr(state, part).items():
            assert torch.equal(getattr(found, part)[name], tensor)
    assert json.loads(index)["seed"] == 3


def test_the_adapter_is_a_plain_peft_folder_in_bf16(config: TrainerConfig, tmp_path: Path) -> None:
    reply = Worker(lambda _event: None).handle(InitVersion("run", config, str(tmp_path / "v0")))
    assert isinstance(reply, VersionMade)
    folder = tmp_path / "v0" / "adapter"
    loaded = PeftConfig.from_pretrained(folder)
    assert (loaded.r, loaded.lora_alpha, loaded.target_modules) == (4, 8.0, set(config.lora.target_modules))
    weights = load_peft_weights(str(folder), device="cpu")
    assert len(weights) == 2 * 7 * 2
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert all(not w.any() for name, w in weights.items() if "lora_B" in name)
    assert reply.adapter_bytes == (folder / "adapter_model.safetensors").stat().st_size


def test_a_run_can_start_from_an_existing_peft_adapter(config: TrainerConfig, tmp_path: Path) -> None:
    worker = Worker(lambda _event: None)
    worker.handle(InitVersion("run", config, str(tmp_path / "v0")))
    adapter = tmp_path / "v0" / "adapter"
    worker.handle(InitVersion("run", config, str(tmp_path / "copy"), adapter_dir=str(adapter)))
    published = (adapter / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "copy" / "adapter" / "adapter_model.safetensors").read_bytes() == published
    small = msgspec.structs.replace(config, lora=LoraShape(rank=2, alpha=8.0))
    with pytest.raises(ValueError, match="match the rank"):
        worker.handle(InitVersion("run", small, str(tmp_path / "other"), adapter_dir=str(adapter)))


def damage_truncate(folder: Path) -> None:
    path = folder / "state.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def damage_flip(folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_remove(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def damage_no_index(folder: Path) -> None:
    (folder / "state.json").unlink()


def damage_half_index(folder: Path) -> None:
    path = folder / "state.json"
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"state\.safetensors has \d+ bytes, \d+ were committed"),
        (damage_flip, r"adapter_model\.safetensors has sha256 .* was committed"),
        (damage_remove, "is missing: the version is half-written"),
        (damage_no_index, "not a finished version"),
        (damage_half_index, "state.json cannot be read"),
    ],
)
def test_damaged_folders_are_refused(
    config: TrainerConfig, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    checkpoint.write_version(tmp_path / "v", some_state(), config, seed=0)
    damage(tmp_path / "v")
    with pytest.raises(VersionFolderError, match=message):
        checkpoint.read_version(tmp_path / "v", config, CPU)


def test_another_lora_shape_is_refused(config: TrainerConfig, tmp_path: Path) -> None:
    checkpoint.write_version(tmp_path / "v", some_state(), config, seed=0)
    other = msgspec.structs.replace(config, lora=LoraShape(rank=8, alpha=8.0))
    with pytest.raises(VersionFolderError, match=r"lora.rank is 4, the run's is 8"):
        checkpoint.read_version(tmp_path / "v", other, CPU)


@pytest.mark.parametrize("stage", ["save_file", "_write_text", "os.rename"])
def test_a_crash_at_any_stage_leaves_nothing(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"qerld_learner.trainer.checkpoint.{stage}", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.write_version(tmp_path / "v", some_state(), config, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_swept_by_the_next_write(config: TrainerConfig, tmp_path: Path) -> None:
    leftover = tmp_path / ".writing-v-0123"
    leftover.mkdir()
    (leftover / "state.safetensors").write_bytes(b"half")
    (tmp_path / ".writing-v1-0123").mkdir()
    checkpoint.write_version(tmp_path / "v", some_state(), config, seed=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".writing-v1-0123", "v"]


def test_a_version_is_never_overwritten(config: TrainerConfig, tmp_path: Path) -> None:
    checkpoint.write_version(tmp_path / "v", some_state(), config, seed=0)
    with pytest.raises(VersionFolderError, match="never overwritten"):
        checkpoint.write_version(tmp_path / "v", some_state(), config, seed=0)
