"""Checks of a model folder for `qerld doctor`: quick, from headers and small files; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerld_kernels.architectures import architecture_of
from qerld_kernels.errors import CheckpointError

from qerld_service.checks import Check

NVFP4_FORMATS = {"nvfp4-pack-quantized", "NVFP4"}
HEADER_LIMIT = 100 << 20


def check_model(folder: Path) -> Iterator[Check]:
    """Findings on one model folder, the most basic first; stops where the next would make no sense."""
    config_file = folder / "config.json"
    try:
        config = json.loads(config_file.read_text())
    except OSError as error:
        yield Check("model folder", "fail", f"{config_file}: {error.strerror}", "give a Hugging Face model folder")
        return
    except ValueError as error:
        yield Check("model folder", "fail", f"{config_file}: {error}", "download or quantise the model again")
        return
    yield Check("model folder", "ok", str(folder))
    yield check_architecture(config)
    yield check_format(config)
    yield check_weights(folder)
    yield check_tokenizer(folder)
    yield check_chat_template(folder)


def check_architecture(config: dict[str, Any]) -> Check:
    try:
        architecture_of(config)
    except CheckpointError as error:
        return Check("architecture", "fail", str(config.get("architectures")), str(error))
    return Check("architecture", "ok", str(config["architectures"][0]))


def check_format(config: dict[str, Any]) -> Check:
    quantization = config.get("quantization_config")
    if not quantization:
        return Check("weights", "warn", "not quantised", "`qerld quantize MODEL OUT` makes an NVFP4 copy")
    names = {quantization.get("format"), quantization.get("quant_algo")}
    names |= {group.get("format") for group in quantization.get("config_groups", {}).values()}
    if not names & NVFP4_FORMATS:
        found = str(next(filter(None, names), quantization.get("quant_method")))
        return Check("weights", "fail", found, "give the bf16 model to `qerld quantize`; this format is not read")
    return Check("weights", "ok", "NVFP4")


def check_weights(folder: Path) -> Check:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return Check("safetensors", "fail", "no *.safetensors file", "give a folder with safetensors weights")
    for file in files:
        problem = header_problem(file)
        if problem:
            return Check("safetensors", "fail", f"{file.name}: {problem}", "copy or download the file again")
    total = sum(file.stat().st_size for file in files)
    return Check("safetensors", "ok", f"{len(files)} file(s), {total / 1e9:.2f} GB")


def header_problem(file: Path) -> str | None:
    """What is wrong with a safetensors file's header or length; None when both fit."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size, HEADER_LIMIT):
            return "its header does not fit into the file"
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            return f"its header cannot be read: {error}"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    missing = 8 + length + max(ends, default=0) - size
    return f"{missing} bytes are missing at its end" if missing > 0 else None


def check_tokenizer(folder: Path) -> Check:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return Check("tokenizer", "fail", "no tokenizer file", "copy tokenizer.json and tokenizer_config.json there")
    return Check("tokenizer", "ok", "found")


def check_chat_template(folder: Path) -> Check:
    if (folder / "chat_template.jinja").is_file():
        return Check("chat template", "ok", "chat_template.jinja")
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "chat_template" in json.loads(settings.read_text()):
        return Check("chat template", "ok", "tokenizer_config.json")
    return Check("chat template", "warn", "none", "prompts as messages will be refused; send text or ids")
