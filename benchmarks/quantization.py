"""Perplexity of SmolLM2-135M-Instruct in bf16 and in NVFP4 with scales by absmax and by the mean-square-error search.

    python benchmarks/quantization.py --data PATH/gsm8k/test.jsonl

DATA is a JSON-lines file with `question` and `answer`, none of which any choice of the quantiser was made on.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import resource
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.nvfp4 import Search, dequantize
from qerld_kernels.quantizer import quantize_checkpoint
from qerld_service.quickstart.model import prepare_smollm2_bf16
from transformers import AutoModelForCausalLM, AutoTokenizer

SEARCHES: tuple[Search, ...] = ("absmax", "mse")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/qerld").expanduser())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quantization-cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    source = prepare_smollm2_bf16(options.cache)
    texts = read_texts(options.data, options.rows)
    results: dict[str, Any] = {"bf16": measure(source, None, texts)}
    for search in SEARCHES:
        folder = options.cache / f"benchmark-{search}"
        started = time.perf_counter()
        if not folder.is_dir():
            quantize_checkpoint(source, folder, search=search)
        seconds = time.perf_counter() - started
        results[f"nvfp4-{search}"] = {**measure(source, folder, texts), "quantize_seconds": round(seconds, 1)}
    write(options, results)


def read_texts(path: Path, rows: int) -> list[str]:
    """The first `rows` rows as question, newline, answer."""
    lines = path.read_text("utf-8").splitlines()[:rows]
    return [f"{row['question']}\n{row['answer']}" for row in map(json.loads, lines)]


def measure(source: Path, quantised: Path | None, texts: list[str]) -> dict[str, Any]:
    """Perplexity over all tokens but each text's first, in fp32, and the relative error of the quantised weights."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    error = 0.0 if quantised is None else replace_weights(model, CheckpointReader(quantised))
    total, tokens = 0.0, 0
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            loss = model(input_ids=ids, labels=ids).loss.item()
            total, tokens = total + loss * (ids.shape[1] - 1), tokens + ids.shape[1] - 1
    return {"perplexity": round(math.exp(total / tokens), 4), "tokens": tokens, "relative_rms_error": round(error, 5)}


def replace_weights(model: Any, reader: CheckpointReader) -> float:
    """Put the served weights into the model; returns ‖Δw‖ / ‖w‖ over all quantised layers."""
    squared_error = squared = 0.0
    with torch.no_grad():
        for name in reader.linear_names:
            weight, served = model.get_submodule(name).weight, dequantize(reader.linear(name))
            squared_error += (served - weight).square().sum().item()
            squared += weight.square().sum().item()
            weight.copy_(served)
    return math.sqrt(squared_error / squared)


def write(options: argparse.Namespace, results: dict[str, Any]) -> None:
    data = f"{options.data.parent.name}/{options.data.name}"  # without the machine's own folders
    report = {
        "command": f"python benchmarks/quantization.py --data {data} --rows {options.rows} --threads {options.threads}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{cpu_name()}, {options.threads} thread, torch {torch.__version__}, fp32 arithmetic",
        "model": "SmolLM2-135M-Instruct",
        "rows": options.rows,
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    print(json.dumps(report, indent=2))


def cpu_name() -> str:
    """The processor's model name, where Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
