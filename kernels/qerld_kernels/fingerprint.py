"""Fingerprints by which a learner and a policy server make sure that they hold the same model.

All are SHA-256 in hexadecimal. Keys of config files that change without the model changing are left out.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from qerld_kernels.checkpoint import CheckpointReader, read_json
from qerld_kernels.errors import CheckpointError

__all__ = ["base_fingerprint", "chat_template_fingerprint", "tokenizer_fingerprint"]

_SAMPLE = 4096
_VOLATILE = ("_name_or_path", "transformers_version")
_OLD_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")


def base_fingerprint(folder: Path) -> str:
    """Of config.json and, of every tensor, its name, dtype, shape and the 4 KiB in its middle (20 GB are not read).

    Independent of how tensors are spread over files.

    Raises:
        CheckpointError: the folder is no readable checkpoint.
    """
    reader = CheckpointReader(folder)
    digest = hashlib.sha256(_canonical({k: v for k, v in reader.config.items() if k not in _VOLATILE}))
    for name, info in sorted(reader.infos.items()):
        digest.update(f"\n{name} {info.dtype} {list(info.shape)}\n".encode())
        middle = info.start + max(0, (info.end - info.start - _SAMPLE) // 2)
        with info.path.open("rb") as file:
            file.seek(middle)
            digest.update(file.read(min(_SAMPLE, info.end - middle)))
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """Of tokenizer.json, or of the older vocabulary files where there is none.

    Raises:
        CheckpointError: the folder has no tokenizer.
    """
    if (folder / "tokenizer.json").is_file():
        return hashlib.sha256(_canonical(read_json(folder / "tokenizer.json"))).hexdigest()
    found = [folder / name for name in _OLD_TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise CheckpointError(f"{folder}: has no tokenizer (neither tokenizer.json nor {_OLD_TOKENIZER_FILES})")
    digest = hashlib.sha256()
    for path in found:
        digest.update(path.name.encode() + b"\n" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def chat_template_fingerprint(folder: Path) -> str:
    """Of chat_template.jinja, or of `chat_template` in tokenizer_config.json; of nothing for a model without one."""
    template: Any = None
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text("utf-8")
    elif (folder / "tokenizer_config.json").is_file():
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
    return hashlib.sha256(_canonical(template)).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
