"""Checks of a model folder for `qerld doctor`: the one that both roles make at start, in rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from qerld_service.checks import Check

if TYPE_CHECKING:
    from qerld_kernels.checkpoint import CheckpointReader


def check_model(folder: Path) -> Iterator[Check]:
    """Findings on one model folder; only the first that keeps it from being used."""
    if find_spec("torch") is None:
        yield Check("model folder", "fail", "not checked: torch is not installed", "pip install 'qerld[learner]'")
        return
    from qerld_kernels.errors import CheckpointError
    from qerld_kernels.model_folder import open_model

    try:
        model = open_model(folder)
    except CheckpointError as error:
        found, _, advice = str(error).partition("; ")
        yield Check("model folder", "fail", found, advice)
        return
    yield Check("model folder", "ok", str(folder))
    yield Check("architecture", "ok", f"{model.architecture.name}, {model.layers} layers")
    yield check_weights(model)
    yield check_chat_template(folder)


def check_weights(model: CheckpointReader) -> Check:
    total = sum(path.stat().st_size for path in model.shards)
    found = f"{len(model.shards)} file(s), {total / 1e9:.2f} GB"
    if model.layout == "plain":
        return Check("weights", "warn", f"not quantised, {found}", "`qerld quantize MODEL OUT` makes a 4-bit copy")
    assert model.format is not None
    return Check("weights", "ok", f"{model.format.name} ({model.layout}), {found}")


def check_chat_template(folder: Path) -> Check:
    if (folder / "chat_template.jinja").is_file():
        return Check("chat template", "ok", "chat_template.jinja")
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "chat_template" in json.loads(settings.read_text()):
        return Check("chat template", "ok", "tokenizer_config.json")
    return Check("chat template", "warn", "none", "prompts as messages will be refused; send text or ids")
