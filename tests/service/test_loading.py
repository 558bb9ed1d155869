"""Adapters that come and go beside running requests, on the CPU with a tiny random NVFP4 Llama."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from qerld_kernels.noise import Noise
from qerld_service.adapters import AdapterError, AdapterKey, AdapterNotLoadedError, SlotsFullError
from qerld_service.engine import PolicyEngine
from safetensors.torch import load_file, save_file
from support.engine import NOISE, SAMPLING, assert_same, begin, collect, key

pytestmark = pytest.mark.engine


@contextlib.asynccontextmanager
async def loading_held_up(
    engine: PolicyEngine, version: AdapterKey, folder: Path
) -> AsyncIterator[asyncio.Task[float]]:
    """A load whose thread in the worker waits, amid reading the folder, until the block ends."""
    path, config = folder / "adapter_config.json", (folder / "adapter_config.json").read_text()
    path.unlink()
    os.mkfifo(path)

    def let_our_check_read() -> None:
        with path.open("w") as pipe:  # waits for the reader, who keeps this pipe when another takes its place
            os.mkfifo(folder / "second")
            (folder / "second").rename(path)
            pipe.write(config)

    loading = asyncio.create_task(engine.load(version, folder, NOISE))
    await asyncio.to_thread(let_our_check_read)
    with await asyncio.to_thread(path.open, "w") as pipe:  # waits for the worker's thread
        try:
            yield loading
        finally:
            pipe.write(config)


async def test_requests_go_on_while_an_adapter_is_read(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path
) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    undisturbed = await collect(fresh, key(1), "before", SAMPLING)
    shutil.copytree(adapters[1], tmp_path / "slow")
    async with loading_held_up(fresh, key(2), tmp_path / "slow") as loading:
        assert_same(await collect(fresh, key(1), "beside", SAMPLING), undisturbed)
        assert key(2) not in fresh.loaded
    await loading
    await fresh.load(key(3), adapters[1], NOISE)
    assert_same(await collect(fresh, key(2), "a", SAMPLING), await collect(fresh, key(3), "b", SAMPLING))


async def test_a_cancelled_load_leaves_nothing_behind(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path
) -> None:
    shutil.copytree(adapters[1], tmp_path / "slow")
    async with loading_held_up(fresh, key(0), tmp_path / "slow") as loading:
        loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert fresh.stats.in_flight == {}
    for version in range(6):  # all slots are free
        await fresh.load(key(version), adapters[0], None)


async def test_layers_that_an_adapter_leaves_out_keep_nothing_of_the_one_before(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path
) -> None:
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    left_out = [name for name in tensors if "v_proj" in name or "layers.1.mlp" in name]
    for which in ("part", "zeros"):
        shutil.copytree(adapters[0], tmp_path / which)
    zeros = {name: torch.zeros_like(value) if name in left_out else value for name, value in tensors.items()}
    save_file(zeros, tmp_path / "zeros" / "adapter_model.safetensors")
    save_file({n: v for n, v in tensors.items() if n not in left_out}, tmp_path / "part" / "adapter_model.safetensors")
    for version in range(6):  # every slot has held a full adapter
        await fresh.load(key(version), adapters[0], NOISE)
    full = await collect(fresh, key(0), "full", SAMPLING)
    for version in range(6):
        await fresh.unload(key(version))
    await fresh.load(key(1), tmp_path / "part", NOISE)
    await fresh.load(key(2), tmp_path / "zeros", NOISE)
    part = await collect(fresh, key(1), "part", SAMPLING)
    assert_same(part, await collect(fresh, key(2), "zeros", SAMPLING))
    assert part != full


async def test_a_hot_swap_leaves_running_requests_alone(fresh: PolicyEngine, adapters: list[Path]) -> None:
    long = replace(SAMPLING, max_tokens=220)
    await fresh.load(key(1), adapters[0], NOISE)
    undisturbed = await collect(fresh, key(1), "before", long)
    running = await begin(fresh, key(1), "running", long)
    await fresh.load(key(2), adapters[1], Noise(sigma=0.1, seed=3))
    assert not running.done()
    newer = await collect(fresh, key(2), "newer", SAMPLING)
    assert_same(await running, undisturbed)
    assert newer != [(ids[:24], logprobs[:24], reason) for ids, logprobs, reason in undisturbed]


async def test_unload_waits_for_running_requests_and_refuses_new_ones(
    fresh: PolicyEngine, adapters: list[Path]
) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    running = await begin(fresh, key(1), "running", replace(SAMPLING, max_tokens=100))
    unloading = asyncio.create_task(fresh.unload(key(1)))
    await asyncio.sleep(0)
    assert not running.done()
    with pytest.raises(AdapterNotLoadedError):
        await collect(fresh, key(1), "late", SAMPLING)
    completions = await running
    assert {reason for _, _, reason in completions} <= {"length", "stop"}
    await unloading
    assert key(1) not in fresh.loaded


async def test_reloading_a_key_never_serves_a_stale_cache(fresh: PolicyEngine, adapters: list[Path]) -> None:
    await fresh.load(key(1), adapters[0], NOISE)
    first = await collect(fresh, key(1), "a", SAMPLING)
    await fresh.unload(key(1))
    await fresh.load(key(1), adapters[1], None)
    other = await collect(fresh, key(1), "b", SAMPLING)
    await fresh.load(key(2), adapters[1], None)
    assert_same(await collect(fresh, key(2), "c", SAMPLING), other)
    assert other != first


async def test_slots_are_counted_and_given_back(fresh: PolicyEngine, adapters: list[Path]) -> None:
    for version in range(6):
        await fresh.load(key(version), adapters[version % 3], NOISE)
    with pytest.raises(SlotsFullError, match="6 slots"):
        await fresh.load(key(6), adapters[0], NOISE)
    with pytest.raises(AdapterError, match="already loaded"):
        await fresh.load(key(0), adapters[0], NOISE)
    with pytest.raises(AdapterError, match="clean"):
        await fresh.load(key(7, noisy=False), adapters[0], NOISE)
    await fresh.unload(key(0))
    await fresh.load(key(6), adapters[0], NOISE)
    assert fresh.stats.in_flight == {key(version): 0 for version in range(1, 7)}


def _break(folder: Path, how: str) -> None:
    weights, config_path = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    config, tensors = json.loads(config_path.read_text()), load_file(weights)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "no config":
        config_path.unlink()
    elif how == "rank too high":
        config["r"] = 64
    elif how == "other shape":
        tensors[name] = torch.zeros(8, 65, dtype=torch.bfloat16)
    elif how == "other model":
        tensors = {key.replace("layers.1", "layers.7"): value for key, value in tensors.items()}
    elif how == "half a pair":
        del tensors[name]
    elif how == "NaN":
        tensors[name][0, 0] = float("nan")
    elif how == "dora":
        config["use_dora"] = True
    if config_path.exists():
        config_path.write_text(json.dumps(config))
    if weights.exists() and how != "truncated":
        save_file(tensors, weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "truncated"),
        ("no weights", "no such file"),
        ("no config", "PEFT folder"),
        ("rank too high", "max_lora_rank = 8"),
        ("other shape", r"must be \[8, 64\]"),
        ("other model", "another model"),
        ("half a pair", "no lora_A"),
        ("NaN", "NaN"),
        ("dora", "use_dora"),
    ],
)
async def test_bad_adapters_cost_nothing(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path, how: str, message: str
) -> None:
    shutil.copytree(adapters[0], tmp_path / "bad")
    _break(tmp_path / "bad", how)
    with pytest.raises(AdapterError, match=message):
        await fresh.load(key(1), tmp_path / "bad", NOISE)
    assert fresh.loaded == frozenset()
    await fresh.load(key(1), adapters[0], NOISE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # vLLM wants it; what is adapted is plain from the tensors, so our check does not ask.
        ({"target_modules": None}, "vLLM refused"),
        # Every number in the file is finite, and so is alpha.
        ({"lora_alpha": 1e42}, "not finite once it is scaled by alpha / r and cast to torch.float32"),
    ],
)
async def test_an_adapter_that_only_vllm_refuses_costs_nothing(
    fresh: PolicyEngine, adapters: list[Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(adapters[0], tmp_path / "bad")
    config = json.loads((tmp_path / "bad" / "adapter_config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "bad" / "adapter_config.json").write_text(json.dumps(kept))
    with pytest.raises(AdapterError, match=message):
        await fresh.load(key(1), tmp_path / "bad", NOISE)
    await fresh.load(key(1), adapters[0], NOISE)
    assert fresh.loaded == {key(1)}
