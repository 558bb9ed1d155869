"""Peak memory of `qerld quantize` on Qwen2.5-32B's layer shapes, random weights: what a machine needs for a 32B model.

    python benchmarks/quantize_memory.py

A model of two layers is written (5 GB, in the folder for temporary files) and quantised by the command in a process of
its own. More layers take longer and no more memory: tests/kernels/test_quantizer.py holds that.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from qerld_kernels.safetensors_io import ShardWriter, nbytes_of

HIDDEN, FFN, KV, VOCABULARY = 5120, 27648, 1024, 152064
CHUNK = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--temporary", type=Path, help="folder for the model (default: the system's)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quantize-memory-cpu.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.temporary) as temporary:
        source, target = Path(temporary) / "model", Path(temporary) / "nvfp4"
        written = write_model(source, options.layers)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "qerld_service.cli", "quantize", str(source), str(target)], check=True)
        seconds = time.perf_counter() - started
        result = {
            "source_gb": round(written / 1e9, 2),
            "quantised_gb": round(sum(path.stat().st_size for path in target.iterdir()) / 1e9, 2),
            "seconds": round(seconds, 1),
            "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2),
        }
    report = {
        "command": f"python benchmarks/quantize_memory.py --layers {options.layers}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        "model": f"Qwen2.5-32B's shapes, {options.layers} layers, random bf16 weights",
        **result,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    print(json.dumps(report, indent=2))


def write_model(folder: Path, layers: int) -> int:
    """Write config.json and one shard, chunk by chunk; returns the shard's bytes."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": layers,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    entries = {name: (torch.bfloat16, shape) for name, shape in shapes(layers).items()}
    with ShardWriter(folder / "model.safetensors", entries) as writer:
        for name, entry in entries.items():
            writer.write(name, random_bytes(nbytes_of(*entry)))
    return (folder / "model.safetensors").stat().st_size


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part, rows in (("q", HIDDEN), ("k", KV), ("v", KV)):
            found[f"{prefix}.self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            found[f"{prefix}.self_attn.{part}_proj.bias"] = (rows,)
        found[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        found[f"{prefix}.mlp.gate_proj.weight"] = found[f"{prefix}.mlp.up_proj.weight"] = (FFN, HIDDEN)
        found[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        found[f"{prefix}.input_layernorm.weight"] = found[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {**found, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


def random_bytes(size: int) -> Iterator[bytes]:
    """Normal weights of a usual size (standard deviation .02); one chunk over and over: the values do not matter."""
    chunk = (torch.randn(CHUNK // 2, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    data = chunk.view(torch.uint8).numpy().tobytes()
    for begin in range(0, size, CHUNK):
        yield data[: min(CHUNK, size - begin)]


if __name__ == "__main__":
    main()
