"""The check of a model folder that both roles make before anything loads the model."""

from __future__ import annotations

from pathlib import Path

from qerld_kernels.checkpoint import CheckpointReader, read_json
from qerld_kernels.errors import CheckpointError

__all__ = ["check_tokenizer", "open_model"]


def open_model(folder: Path) -> CheckpointReader:
    """A reader of a folder that can be served and trained: complete, with sound scales and a tokenizer.

    Reads headers, small files and the scales: seconds for 32B.

    Raises:
        CheckpointError: what is wrong, with the file or tensor, what was expected, what was found and the way out.
    """
    reader = CheckpointReader(folder)
    check_tokenizer(folder)
    reader.check_scales()
    return reader


def check_tokenizer(folder: Path) -> None:
    """Load the tokenizer.

    Raises:
        CheckpointError: tokenizer.json is missing or cannot be used, or tokenizer_config.json is no JSON object.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; copy the model's tokenizer files there, or save its fast tokenizer with "
            "transformers' save_pretrained"
        )
    read_json(path)
    if (folder / "tokenizer_config.json").is_file():
        read_json(folder / "tokenizer_config.json")
    # Here, since the package that a reader of checkpoints needs is torch alone.
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class of its own
        raise CheckpointError(f"{path}: is no tokenizer ({error}); copy or download it again") from error
