"""`qerld quantize MODEL OUT`: write a 4-bit copy of a model, with a progress bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from qerld_kernels.errors import CheckpointError, QuantizationError
from qerld_kernels.formats import FORMATS, Format
from qerld_kernels.nvfp4 import Search
from qerld_kernels.quantizer import quantize_checkpoint
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

USAGE_ERROR = 2


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qerld quantize",
        description="Write a 4-bit copy of a model, weights only (compressed-tensors nvfp4-pack-quantized or "
        "mxfp4-pack-quantized, or bitsandbytes nf4), shard by shard: memory is bounded by the largest layer. OUT "
        "appears complete or not at all.",
    )
    parser.add_argument("model", type=Path, help="Hugging Face folder with bf16, fp16 or fp32 safetensors")
    parser.add_argument("out", type=Path, help="new or empty folder")
    parser.add_argument(
        "--format",
        choices=list(FORMATS),
        default="nvfp4",
        help="nvfp4 (default): blocks of 16, scales e4m3; mxfp4: of 32, powers of two; nf4: QLoRA's, of 64",
    )
    parser.add_argument(
        "--search",
        choices=get_args(Search),
        default="absmax",
        help="NVFP4's block scales by absolute maximum (default) or by least mean square error (slower, no better)",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="where to compute: a GPU if there is one (default), or as named; the bytes are the same",
    )
    arguments = parser.parse_args(argv)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("qerld quantize: --device cuda: torch finds no GPU here; use cpu or auto\n")
        return USAGE_ERROR
    form = FORMATS[arguments.format]
    if form is not FORMATS["nvfp4"] and arguments.search != "absmax":
        sys.stderr.write("qerld quantize: --search mse: is of nvfp4; leave it out with the others\n")
        return USAGE_ERROR
    try:
        quantize_with_bar(arguments.model, arguments.out, form, arguments.search, device)
    except (CheckpointError, QuantizationError, OSError) as error:
        sys.stderr.write(f"qerld quantize: {error}\n")
        return 1 if isinstance(error, OSError) else USAGE_ERROR
    return 0


def quantize_with_bar(model: Path, out: Path, form: Format, search: Search, device: str) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        quantize_checkpoint(model, out, form=form, search=search, device=device, progress=show)
        bar.update(task, description=f"wrote {out}")
