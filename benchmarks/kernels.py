"""Our kernels beside the libraries', on the shapes of Qwen2.5: microseconds, and shares of what the machine can do.

    python benchmarks/kernels.py --out result.json [--only matmul,norm,lora] [--models 7B] [--tokens 1,8,64]
    python benchmarks/kernels.py --out tuned.json --only tune   # every plan of the fused product; compiles for minutes
    python benchmarks/kernels.py --out tuned.json --only lora_tune --models 7B      # plans of the adapters' kernels

Beside ours: cuBLAS in bf16, Marlin, vLLM's norms and LoRA (vLLM), NF4 (bitsandbytes), fused cross-entropy (Liger), each
where it is installed and there is a GPU. Floors: bytes over the copy bandwidth and operations over the product rate
that the same run measures. Random weights. Runs on the CPU too with `--models tiny`, to try the script.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from gpu_timing import copies, eager, library, microseconds
from lora_timing import BATCHES, LORA_TOKENS, Layer, lora_rows, lora_tune_rows
from qerld_kernels.dequantize import dequantize_unscaled
from qerld_kernels.fused_product import Plan, fused_product
from qerld_kernels.jit import can_launch
from qerld_kernels.linear_logprob import Head, pair_logprobs
from qerld_kernels.lora import add_lora
from qerld_kernels.low_rank import Adapters, Sharing, counters_for
from qerld_kernels.matmul import dequantized_product, lora_matmul, lora_plan, matmul, matmul_reference, remember_scale
from qerld_kernels.rmsnorm import add_rmsnorm_slots, rmsnorm_slots
from qerld_kernels.tiles import Tiles, dequantize_tiles, tile
from qerld_learner.trainer.packed_linear import scaled_product
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
# (outputs, inputs) of the linear layers as vLLM fuses them, and the vocabulary.
MODELS: dict[str, dict[str, tuple[int, int]]] = {
    "tiny": {"gate_up": (256, 64), "down": (64, 128)},
    "7B": {"gate_up": (37888, 3584), "down": (3584, 18944), "qkv": (4608, 3584), "o": (3584, 3584)},
    "14B": {"gate_up": (27648, 5120), "down": (5120, 13824), "qkv": (7168, 5120), "o": (5120, 5120)},
    "32B": {"gate_up": (55296, 5120), "down": (5120, 27648), "qkv": (7168, 5120), "o": (5120, 5120)},
}
VOCABULARY = {"tiny": 512, "7B": 152064, "14B": 152064, "32B": 152064}
TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384]


@dataclass
class Weight:
    """An NVFP4 weight of random bytes within the format's rules, in the checkpoint's layout and in tiles."""

    packed: Tensor
    scale: Tensor
    tiles: Tiles
    global_scale: Tensor

    @staticmethod
    def random(outputs: int, inputs: int) -> Weight:
        codes = torch.randint(0x20, 0x60, (outputs, inputs // 16), dtype=torch.uint8, device=DEVICE)
        packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        scale = codes.view(torch.float8_e4m3fn)
        return Weight(packed, scale, tile(packed, scale), remember_scale(torch.tensor(1e-3, device=DEVICE)))

    @property
    def bytes(self) -> int:
        return self.packed.numel() + self.scale.numel()

    def product(self, x: Tensor) -> Tensor:
        return matmul(x, self.tiles.words, self.tiles.scale, self.global_scale, self.packed.shape[0])


def machine_limits() -> dict[str, float]:
    """Bytes a second of a copy (read and written); operations a second of a bf16 product, the best of some sizes."""
    source, target = (torch.zeros(1 << (29 if DEVICE == "cuda" else 18), dtype=DTYPE, device=DEVICE) for _ in range(2))
    # A kernel: torch's copy of equal dtypes is the driver's, at two thirds of this on an H200.
    bandwidth = 2 * source.nbytes / (1e-6 * microseconds([lambda: torch.mul(source, 2, out=target)]))
    rate = 0.0
    for side in (2048, 4096, 8192) if DEVICE == "cuda" else (256,):
        left, right = (torch.randn(side, side, dtype=DTYPE, device=DEVICE) for _ in range(2))
        rate = max(rate, 2 * side**3 / (1e-6 * microseconds([lambda a=left, b=right: a @ b])))
    return {"copy_bytes_per_s": bandwidth, "product_flops": rate}


def dequantize_rows(models: list[str], limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Packed and tiled to bf16: share of the copy bandwidth."""
    for model, (layer, (outputs, inputs)) in layers(models):
        weights = [Weight.random(outputs, inputs) for _ in range(copies(outputs * inputs * 5 // 2))]
        out = torch.empty(outputs, inputs, dtype=DTYPE, device=DEVICE)
        calls = {
            "packed": [lambda w=w: dequantize_unscaled(w.packed, w.scale, out=out) for w in weights],
            "tiles": [lambda w=w: dequantize_tiles(w.tiles, outputs, inputs, DTYPE) for w in weights],
        }
        row: dict[str, Any] = {"model": model, "layer": layer}
        moved = weights[0].bytes + 2 * outputs * inputs
        for name, some in calls.items():
            took = microseconds(some)
            share = moved / (1e-6 * took) / limits["copy_bytes_per_s"]
            row |= {f"{name}_us": took, f"{name}_share_of_copy_bandwidth": share}
        yield row


def matmul_rows(models: list[str], tokens: list[int], limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Forward and backward for each M."""
    for model, (layer, (outputs, inputs)) in layers(models):
        weights = [Weight.random(outputs, inputs) for _ in range(copies(outputs * inputs // 2))]
        plain = [torch.randn(outputs, inputs, dtype=DTYPE, device=DEVICE) for _ in range(copies(2 * outputs * inputs))]
        others = {"marlin": marlin_calls(weights, inputs), "nf4": nf4_calls(plain)}
        for count in tokens:
            x = torch.randn(count, inputs, dtype=DTYPE, device=DEVICE)
            grad = torch.randn(count, outputs, dtype=DTYPE, device=DEVICE)
            floor = max(
                (weights[0].bytes + 2 * count * (inputs + outputs)) / limits["copy_bytes_per_s"],
                2 * count * inputs * outputs / limits["product_flops"],
            )
            row: dict[str, Any] = {"model": model, "layer": layer, "tokens": count, "floor_us": 1e6 * floor}
            row["bf16_us"] = microseconds([lambda w=w: x @ w.T for w in plain])
            row["ours_us"] = microseconds([lambda w=w: w.product(x) for w in weights])
            row["bf16_backward_us"] = microseconds([lambda w=w: grad @ w for w in plain])
            row["ours_backward_us"] = microseconds([lambda w=w: backward(grad, w) for w in weights])
            for name, calls in others.items():
                if calls is not None:
                    row[f"{name}_us"] = microseconds([lambda call=call: call(x) for call in calls])
            wanted = matmul_reference(x[:64], weights[0].tiles, outputs, weights[0].global_scale)
            found = weights[0].product(x)[:64]
            row["largest_difference"] = float((found - wanted).abs().max() / wanted.abs().max())
            yield row


def backward(grad: Tensor, weight: Weight) -> Tensor:
    """As the trainer does it: dequantised, then the library's product."""
    return scaled_product(grad, dequantize_unscaled(weight.packed, weight.scale), 1e-3)


def marlin_calls(weights: list[Weight], inputs: int) -> list[Callable[[Tensor], Tensor]] | None:
    """vLLM's product, on its own layout of random bytes."""
    marlin = library("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    if marlin is None:
        return None

    def call(weight: Weight) -> Callable[[Tensor], Tensor]:
        layer = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = weight.packed.shape[0], inputs
        layer.params_dtype = DTYPE
        layer.weight = torch.nn.Parameter(weight.packed, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(weight.scale, requires_grad=False)
        layer.weight_global_scale = torch.nn.Parameter(weight.global_scale.clone(), False)
        marlin.prepare_fp4_layer_for_marlin(layer)
        return lambda x: marlin.apply_fp4_marlin_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            layer.workspace,
            weight.packed.shape[0],
            inputs,
        )

    return [call(weight) for weight in weights]


def nf4_calls(plain: list[Tensor]) -> list[Callable[[Tensor], Tensor]] | None:
    """bitsandbytes' product: its own kernel for one token, else dequantised."""
    bnb = library("bitsandbytes")
    if bnb is None:
        return None

    def call(weight: Tensor) -> Callable[[Tensor], Tensor]:
        packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4")
        return lambda x: bnb.matmul_4bit(x, packed.t(), state)

    return [call(weight) for weight in plain]


def norm_rows(models: list[str], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Norms with slot noise beside vLLM's, alone and with the residual added."""
    vllm_ops = library("vllm._custom_ops")
    for model, count in product(models, tokens):
        channels = MODELS[model]["gate_up"][1]
        weight = torch.rand(channels, dtype=DTYPE, device=DEVICE)
        table = 0.01 * torch.randn(5, channels, device=DEVICE)
        slots = torch.randint(-1, 4, (count,), device=DEVICE)
        inputs = [
            torch.randn(2, count, channels, dtype=DTYPE, device=DEVICE).unbind()
            for _ in range(copies(4 * count * channels))
        ]
        row: dict[str, Any] = {"model": model, "tokens": count}
        row["ours_us"] = microseconds([lambda x=x: rmsnorm_slots(x, weight, table, slots, 1e-6) for x, _ in inputs])
        row["ours_add_us"] = microseconds(
            [lambda x=x, r=r: add_rmsnorm_slots(x, r, weight, table, slots, 1e-6) for x, r in inputs]
        )
        if vllm_ops is not None:
            out = torch.empty_like(inputs[0][0])
            row["vllm_us"] = microseconds([lambda x=x: vllm_ops.rms_norm(out, x, weight, 1e-6) for x, _ in inputs])
            row["vllm_add_us"] = microseconds(
                [lambda x=x, r=r: vllm_ops.fused_add_rms_norm(x, r, weight, 1e-6) for x, r in inputs]
            )
        yield row


def head_rows(models: list[str], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Log-probability, entropy and gradient of hidden states: time and extra memory."""
    liger_ops = library("liger_kernel.ops.fused_linear_cross_entropy")
    for model, count in product(models, tokens):
        channels, vocabulary = MODELS[model]["gate_up"][1], VOCABULARY[model]
        weight = 0.02 * torch.randn(vocabulary, channels, dtype=DTYPE, device=DEVICE)
        hidden = torch.randn(count, channels, dtype=DTYPE, device=DEVICE, requires_grad=True)
        targets = torch.randint(0, vocabulary, (count,), device=DEVICE)
        rows = torch.arange(count, device=DEVICE)

        def ours(
            hidden: Tensor = hidden, weight: Tensor = weight, rows: Tensor = rows, targets: Tensor = targets
        ) -> None:
            logprobs, _ = pair_logprobs(hidden, Head(weight), rows, targets)
            torch.autograd.grad(logprobs.sum(), hidden)

        def chunked(hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets) -> None:
            """torch's operators over chunks of rows, with the entropy."""
            for start in range(0, len(hidden), 512):
                logits = (hidden[start : start + 512] @ weight.T).float()
                table = logits.log_softmax(-1)
                (table.exp().detach() * table.detach()).sum(-1)
                torch.autograd.grad(table.gather(1, targets[start : start + 512, None]).sum(), hidden)

        def liger(hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets) -> None:
            function = liger_ops.LigerFusedLinearCrossEntropyFunction
            loss = function.apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "sum")
            torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, hidden)

        row: dict[str, Any] = {"model": model, "tokens": count}
        for name, call in (("ours", ours), ("torch_chunked", chunked), ("liger", liger if liger_ops else None)):
            if call is not None:
                row |= {f"{name}_us": eager(call), f"{name}_extra_bytes": extra_memory(call)}
        yield row


def extra_memory(call: Callable[[], None]) -> int:
    """Bytes that the device's peak rises by."""
    if DEVICE == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def plans(tokens: int) -> list[Plan]:
    """Plans worth trying for this many tokens, but for their parts, which nothing is compiled for."""
    tile = max(8, min(256, 1 << (tokens - 1).bit_length()))
    found = []
    for width, groups, inputs, stages, programs in product(
        sorted({tile, max(8, tile // 2), min(tile, 128)}),
        (1, 2, 4),
        (128, 256),
        (2, 3, 4, 5, 6, 8),
        (1, 2, 3, 4, 5),
    ):
        plan = Plan(width, groups, inputs, stages, programs)
        shared = stages * (inputs // 64 * (128 * width + 2304 * groups) + 16) + min(4096, 128 * width)
        own = (plan.registers * (groups + 1) - 24) // groups  # registers of a computing thread
        waiting = groups * programs * stages * inputs * 36  # bytes of W̃ in flight; memory wants some 40 KB
        enough = (waiting > 40 << 10 and programs > 1) if tokens <= 32 else waiting > 24 << 10
        if enough and (shared + 1024) * programs <= 228 << 10 and own >= width // 2 + 56:
            found.append(plan)
    # Of rings that differ in their depth alone, the two deepest.
    return [
        plan
        for plan in found
        if sum(replace(o, stages=9) == replace(plan, stages=9) and o.stages > plan.stages for o in found) < 2
    ]


def compile_plan(chosen: Plan) -> None:
    """In a process of its own: fills Triton's cache."""
    weight = Weight.random(1024, 2048)
    x = torch.randn(chosen.tokens, 2048, dtype=DTYPE, device=DEVICE)
    fused_product(x, weight.tiles, 1024, 1.0, chosen)


def tune_rows(models: list[str], tokens: list[int], processes: int) -> Iterator[dict[str, Any]]:
    """The plans within a tenth of the fastest for each layer and M, and the other way."""
    few = [count for count in tokens if count <= 4096]
    every = sorted({plan for count in few for plan in plans(count)}, key=str)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_plan, every, chunksize=4))
    for model, (layer, (outputs, inputs)) in layers(models):
        weights = [Weight.random(outputs, inputs) for _ in range(copies(outputs * inputs // 2))]
        for count in few:
            x = torch.randn(count, inputs, dtype=DTYPE, device=DEVICE)

            def took(
                chosen: Plan, x: Tensor = x, weights: list[Weight] = weights, outputs: int = outputs
            ) -> tuple[float, Plan]:
                calls = [lambda w=w: fused_product(x, w.tiles, outputs, 1.0, chosen) for w in weights]
                return microseconds(calls), chosen

            taken = [took(replace(plan, parts=parts)) for plan in plans(count) for parts in (1, Plan.parts)]
            taken.sort(key=lambda pair: pair[0])
            taken += [took(replace(plan, parts=parts)) for _, plan in taken[:4] for parts in (2, 3, 4, 6)]
            taken.sort(key=lambda pair: pair[0])
            near = [[us, asdict(plan)] for us, plan in taken if us < 1.1 * taken[0][0]]
            others = microseconds([lambda w=w: dequantized_product(x, w.tiles, outputs, 1.0) for w in weights])
            yield {"model": model, "layer": layer, "tokens": count, "dequantized_us": others, "near": near}


def sharing_tune_rows(models: list[str], tokens: list[int], names: list[str]) -> Iterator[dict[str, Any]]:
    """The ways to share a launch with LoRA that are within a twentieth of the fastest, for each layer and M.

    And the time of two launches, of which LoRA's reads and writes y.
    """
    none = torch.tensor([False])
    for model, (name, (outputs, inputs)) in layers(models):
        if name not in names:
            continue
        layer = Layer.of(name, outputs, inputs, DTYPE, DEVICE)
        weights = [Weight.random(outputs, inputs) for _ in range(copies(outputs * inputs // 2))]
        stacks = layer.adapters(1)[: len(weights)]
        for count in tokens:
            x, (chosen, sharing) = layer.batch(count)[1], lora_plan(count, outputs, inputs)
            counters = torch.zeros(counters_for(count), dtype=torch.int32, device=DEVICE)
            slots = BATCHES["one"](count).to(DEVICE)
            adapters = [Adapters(a, b, slots, counters, sharing) for a, b in stacks]
            pairs = list(zip(weights, adapters, strict=False))

            def took(sharing: Sharing, x: Tensor = x, pairs: Any = pairs, chosen: Plan = chosen) -> float:
                return microseconds(
                    [
                        lambda w=w, a=a: fused_product(x, w.tiles, outputs, 1.0, chosen, replace(a, sharing=sharing))
                        for w, a in pairs
                    ]
                )

            taken = sorted(((took(way), way) for way in ways_to_share(count, inputs, chosen)), key=lambda pair: pair[0])
            without = microseconds([lambda w=w: w.product(x) for w in weights])
            apart = microseconds([lambda w=w, a=a: add_lora(w.product(x), x, a.a, a.b, slots, none) for w, a in pairs])
            near = [[us, asdict(sharing)] for us, sharing in taken if us < 1.05 * taken[0][0]]
            times = {"without_us": without, "two_launches_us": apart, "near": near}
            yield {"model": model, "layer": name, "tokens": count, **times}


def ways_to_share(tokens: int, inputs: int, chosen: Plan) -> list[Sharing]:
    """What is tried; nothing is compiled for it."""
    steps = -(-inputs // chosen.inputs)
    if tokens > 2048:
        return [Sharing(splits, 1, 0.9) for splits in (1, 2, 4, 8)]
    splits = sorted({-(-steps // own) for own in (1, 2, 3, 4, 6, 8, 12)})
    parts = sorted({chosen.parts, 1, 2, 4, 6, Plan.parts})
    return [Sharing(*way) for way in product(splits, parts, (0.0, 0.5, 0.9))]


def product_lora_rows(models: list[str], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """What LoRA costs within the product: a layer without, with one adapter, and with two in a batch."""
    none = torch.tensor([False])
    for model, (name, (outputs, inputs)) in layers(models):
        layer = Layer.of(name, outputs, inputs, DTYPE, DEVICE)
        weights = [Weight.random(outputs, inputs) for _ in range(copies(outputs * inputs // 2))]
        stacks = layer.adapters(1)[: 2 * len(weights)]
        pairs = [(weights[at % len(weights)], *stack) for at, stack in enumerate(stacks)]
        for count in tokens:
            x = layer.batch(count)[1]
            counters = torch.zeros(counters_for(count), dtype=torch.int32, device=DEVICE)
            row: dict[str, Any] = {"model": model, "layer": name, "tokens": count}
            row["without_us"] = microseconds([lambda w=w: w.product(x) for w in weights])
            for batch, make in BATCHES.items():
                slots = make(count).to(DEVICE)
                calls = [
                    lambda w=w, a=a, b=b: lora_matmul(
                        x, w.tiles.words, w.tiles.scale, w.global_scale, outputs, a, b, slots, none, counters
                    )
                    for w, a, b in pairs
                ]
                row[f"{batch}_us"] = microseconds(calls)
            yield row


def layers(models: list[str]) -> list[tuple[str, tuple[str, tuple[int, int]]]]:
    return [(model, layer) for model in models for layer in MODELS[model].items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rewritten after each section")
    parser.add_argument(
        "--only", default="dequantize,matmul,norm,head,lora", help="sections: these, product_lora, tune, lora_tune"
    )
    parser.add_argument("--models", default="7B,14B,32B", help="shapes")
    parser.add_argument("--tokens", help=f"M; else {TOKENS}, for lora {LORA_TOKENS}")
    parser.add_argument("--layers", default="gate_up,down,qkv,o", help="for sharing_tune")
    parser.add_argument("--processes", type=int, default=14, help="that compile plans")
    args = parser.parse_args()
    models, given = args.models.split(","), [int(part) for part in args.tokens.split(",")] if args.tokens else []
    tokens, lora_tokens = given or TOKENS, given or LORA_TOKENS
    if not can_launch(torch.empty(0, device=DEVICE)):
        print("no Triton here: the references run")
    limits = machine_limits()
    record: dict[str, Any] = {
        "command": f"python benchmarks/kernels.py --only {args.only} --models {args.models}"
        + (f" --tokens {args.tokens}" if args.tokens else ""),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "limits": limits,
    }
    sections: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "dequantize": lambda: dequantize_rows(models, limits),
        "matmul": lambda: matmul_rows(models, tokens, limits),
        "norm": lambda: norm_rows(models, tokens),
        "head": lambda: head_rows(models, [t for t in tokens if t >= min(512, max(tokens))]),
        "lora": lambda: lora_rows(layers(models), lora_tokens, limits, DTYPE, DEVICE),
        "tune": lambda: tune_rows(models, tokens, args.processes),
        "product_lora": lambda: product_lora_rows(models, lora_tokens),
        "sharing_tune": lambda: sharing_tune_rows(models, lora_tokens, args.layers.split(",")),
        "lora_tune": lambda: lora_tune_rows(layers(models), lora_tokens, DTYPE, DEVICE),
    }
    for name in args.only.split(","):
        record[name] = []
        for row in sections[name]():
            record[name].append(row)
            print(name, json.dumps(row), flush=True)
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
