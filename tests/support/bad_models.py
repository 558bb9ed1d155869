"""Every way in which a model folder is known to be bad: how to break the tiny model, and what must be said of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Q = "model.layers.0.self_attn.q_proj"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Bad:
    """`said`: parts of the one line, the file or tensor first, the way out last; `packed`: of an NVFP4 folder only."""

    damage: Callable[[Path], None]
    said: tuple[str, ...]
    packed: bool = False


def edit(**changes: torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    """Replace, change or (None) remove tensors; `q__weight_scale` is layer 0's q."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        for key, change in changes.items():
            name = f"{Q}.{key.removeprefix('q__')}" if key.startswith("q__") else key.replace("__", ".")
            old = tensors.pop(name)
            if change is not None:
                tensors[name] = change(old) if callable(change) else change
        save_file(tensors, folder / WEIGHTS)

    return damage


def config(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | changes))

    return damage


def cut(name: str, keep: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep]) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_code(code: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One e4m3 scale with these bits."""

    def change(scale: torch.Tensor) -> torch.Tensor:
        scale = scale.clone()
        scale.view(torch.uint8)[3, 1] = code
        return scale

    return change


def lose_a_shard(folder: Path) -> None:
    tensors = list(load_file(folder / WEIGHTS).items())
    parts = {f"model-0000{i + 1}-of-00002.safetensors": dict(tensors[i::2]) for i in range(2)}
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    file, part = next(iter(parts.items()))
    save_file(part, folder / file)
    (folder / WEIGHTS).unlink()


def swap_tokenizer(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer.json").write_text(text) and None


def leave_only_a_readme(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "README.md").write_text("not a model")


AGAIN = "copy or download"
BAD_MODELS: dict[str, Bad] = {
    "unknown folder": Bad(shutil.rmtree, ("model: no such folder", "give the path")),
    "not a model": Bad(leave_only_a_readme, ("config.json: no such file", "is this a Hugging Face model folder?")),
    "corrupt config": Bad(cut("config.json", 40), ("config.json: is not valid JSON", AGAIN)),
    "config of another model": Bad(
        config(hidden_size=128), ("model.embed_tokens.weight must be", "[512, 128], got bfloat16 [512, 64]", AGAIN)
    ),
    "no size": Bad(
        config(intermediate_size=None), ("config.json: intermediate_size: must be an integer", "got nothing")
    ),
    "other model type": Bad(config(model_type="mamba"), ("config.json: model_type: must be 'llama'", "got 'mamba'")),
    "unsupported architecture": Bad(
        config(architectures=["MambaForCausalLM"]),
        ("config.json: architectures: ['MambaForCausalLM'] is not supported", "known are", "LlamaForCausalLM"),
    ),
    "other quantisation": Bad(
        config(quantization_config={"quant_method": "awq"}), ("quant_method 'awq' is not read", "known are")
    ),
    "no quantization_config": Bad(
        config(quantization_config=None),
        ("q_proj is packed", "quantization_config is missing", AGAIN),
        packed=True,
    ),
    "truncated safetensors": Bad(cut(WEIGHTS, -100), ("model.safetensors: truncated", "the file has", AGAIN)),
    "no weights": Bad(remove(WEIGHTS), ("holds neither model.safetensors nor model.safetensors.index.json",)),
    "missing shard": Bad(lose_a_shard, ("model-00002-of-00002.safetensors: no such file", AGAIN)),
    "missing tensor": Bad(edit(q__weight_packed=None), ("q_proj.weight_packed is missing", AGAIN), packed=True),
    "missing norm": Bad(edit(model__norm__weight=None), ("tensor model.norm.weight is missing", AGAIN)),
    "missing head": Bad(edit(lm_head__weight=None), ("tensor lm_head.weight is missing", AGAIN)),
    "wrong dtype": Bad(
        edit(q__weight_scale=lambda scale: scale.float()),
        ("model.safetensors: ", "q_proj.weight_scale must be float8_e4m3fn [128, 4], got float32 [128, 4]", AGAIN),
        packed=True,
    ),
    "wrong dtype of a norm": Bad(
        edit(model__norm__weight=torch.ones(64, dtype=torch.int64)),
        ("model.norm.weight must be bfloat16 or float16 or float32 [64], got int64 [64]", AGAIN),
    ),
    "wrong shape": Bad(
        edit(q__weight_packed=lambda packed: packed[:64].clone()),
        ("q_proj.weight_packed must be uint8 [128, 32], got uint8 [64, 32]", AGAIN),
        packed=True,
    ),
    "NaN scales": Bad(
        edit(q__weight_scale=with_code(0x7F)),
        ("q_proj.weight_scale holds NaN in 1 of 512 block scales", AGAIN),
        packed=True,
    ),
    "negative scales": Bad(
        edit(q__weight_scale=with_code(0xB8)),
        ("q_proj.weight_scale holds negative scales", "1 of 512", AGAIN),
        packed=True,
    ),
    "NaN global scale": Bad(
        edit(q__weight_global_scale=torch.tensor([float("nan")])),
        ("q_proj.weight_global_scale must be finite and positive, got nan", AGAIN),
        packed=True,
    ),
    "missing tokenizer": Bad(remove("tokenizer.json"), ("tokenizer.json: no such file", "copy the model's tokenizer")),
    "truncated tokenizer": Bad(cut("tokenizer.json", 300), ("tokenizer.json: is not valid JSON", AGAIN)),
    "another file as tokenizer": Bad(swap_tokenizer('{"model": 7}'), ("tokenizer.json: is no tokenizer", AGAIN)),
}


def make_bad_model(kind: str, good: Path, folder: Path) -> Path:
    """A damaged copy of the NVFP4 folder `good`."""
    model = folder / "model"
    shutil.copytree(good, model)
    BAD_MODELS[kind].damage(model)
    return model


def assert_one_clear_line(text: str, kind: str) -> None:
    """The last line says it all, in this order, and there is no traceback."""
    assert "Traceback" not in text
    line, at = text.strip().splitlines()[-1], 0
    for part in BAD_MODELS[kind].said:
        assert part in line[at:], f"{part!r} is not, or not in its place, in: {line}"
        at = line.index(part, at) + len(part)
