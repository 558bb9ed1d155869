"""LoRA by slot on a GPU: the compiled kernels against float64, under CUDA graphs, beside vLLM's, and in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from qerld_kernels.lora import Plan, add_lora, plan, planned_lora
from qerld_service.adapters import AdapterKey
from qerld_service.engine import EngineConfig, PolicyEngine, Sampling
from support.tiny import make_adapter
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

DTYPES = [torch.bfloat16, torch.float16]
SLOTS = 4
# Of Qwen2.5-7B as vLLM fuses them, and one that fits no tile.
LAYERS = {
    "qkv": (3584, (3584, 512, 512)),
    "gate_up": (3584, (18944, 18944)),
    "down": (18944, (3584,)),
    "odd": (330, (150, 40)),
}
NONE, SOME = torch.tensor([True]), torch.tensor([False])
Arguments = tuple[Tensor, Tensor, list[Tensor], list[Tensor], Tensor]


def make(tokens: int, inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype) -> Arguments:
    """y, x, a, b and slots, on the GPU."""
    draw: dict[str, Any] = {
        "generator": torch.Generator("cuda").manual_seed(tokens + rank),
        "dtype": dtype,
        "device": "cuda",
    }
    return (
        torch.randn(tokens, sum(widths), **draw),
        torch.randn(tokens, inputs, **draw),
        [torch.randn(SLOTS, 1, rank, inputs, **draw) / inputs**0.5 for _ in widths],
        [torch.randn(SLOTS, 1, width, rank, **draw) / rank**0.5 for width in widths],
        torch.randint(-1, SLOTS, (tokens + 3,), generator=draw["generator"], device="cuda"),
    )


def exact(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], slots: Tensor) -> Tensor:
    """In float64 but for the rounding of the low-rank product."""
    wide, own, begin = y.double(), slots[: len(x)], 0
    for down, up in zip(a, b, strict=True):
        columns = slice(begin, begin + up.shape[2])
        for slot in range(SLOTS):
            rows = (own == slot).nonzero().squeeze(1)
            low = (x[rows].double() @ down[slot, 0].double().T).to(x.dtype).double()
            wide[rows, columns] += low @ up[slot, 0].double().T
        begin += up.shape[2]
    return wide


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Within a few roundings to the dtype, relative to the largest value: sums cancel."""
    tolerance = 2 * torch.finfo(found.dtype).eps * wanted.abs().max()
    assert (found.double() - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64, 123, 256, 300, 1024, 2500])
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, tokens: int, dtype: torch.dtype) -> None:
    y, *others = make(tokens, *LAYERS[name], 32, dtype)
    found = y.clone()
    add_lora(found, *others, SOME)
    assert_rounded(found, exact(y, *others))
    without = others[3][:tokens] < 0
    assert torch.equal(found[without], y[without])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 8, 16, 64, 128])
@pytest.mark.parametrize("tokens", [5, 40, 400])
def test_ranks(tokens: int, rank: int, dtype: torch.dtype) -> None:
    y, *others = make(tokens, *LAYERS["qkv"], rank, dtype)
    found = y.clone()
    add_lora(found, *others, SOME)
    assert_rounded(found, exact(y, *others))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [8, 256])
@pytest.mark.parametrize(
    "chosen",
    [
        Plan(16, 128, 32, 4, 4, 16, 128, 1056, 4),
        Plan(32, 64, 4, 4, 2, 32, 64, 132, 8),
        Plan(64, 128, 1, 8, 3, 64, 128, 33, 8),
    ],
    ids=str,
)
def test_other_plans(chosen: Plan, tokens: int, dtype: torch.dtype) -> None:
    y, *others = make(tokens, *LAYERS["down"], 32, dtype)
    found = y.clone()
    planned_lora(found, *others, chosen)
    assert_rounded(found, exact(y, *others))


@pytest.mark.parametrize("tokens", [8, 64, 300])
def test_the_same_bits_again_and_beside_others(tokens: int) -> None:
    """No atomics: a row's bits depend neither on the run nor on which adapters its neighbours have."""
    y, x, a, b, slots = make(tokens, *LAYERS["qkv"], 32, torch.bfloat16)
    slots.copy_(torch.arange(len(slots)) % 5 - 1)
    first, again, alone = y.clone(), y.clone(), y.clone()
    add_lora(first, x, a, b, slots, SOME)
    add_lora(again, x, a, b, slots, SOME)
    add_lora(alone, x, a, b, torch.where(slots == 2, 2, -1), SOME)
    assert torch.equal(first, again)
    rows = slots[:tokens] == 2
    assert torch.equal(first[rows], alone[rows])
    assert torch.equal(alone[~rows], y[~rows])


def test_a_captured_graph_serves_whatever_slots_come() -> None:
    y, x, a, b, slots = make(24, *LAYERS["qkv"], 32, torch.bfloat16)
    held, without = y.clone(), y.clone()
    add_lora(held, x, a, b, slots, SOME)  # compiles
    torch.cuda.synchronize()
    graph, empty = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_lora(held, x, a, b, slots, SOME)
    with torch.cuda.graph(empty):
        without.add_(0)
        add_lora(without, x, a, b, slots, NONE)
    for shift in range(3):
        slots[:24] = (torch.arange(24, device="cuda") + shift) % 5 - 1 if shift else 3
        held.copy_(y)
        graph.replay()
        assert_rounded(held, exact(y, x, a, b, slots))
    empty.replay()
    torch.cuda.synchronize()
    assert torch.equal(without, y)


@pytest.mark.parametrize("rank", [8, 32, 64, 128])
def test_every_usual_plan_fits_this_gpu(rank: int) -> None:
    """Too much shared memory is an error of the launch."""
    for tokens in (1, 17, 64, 300, 2049):
        arguments = make(tokens, 3584, (256,), rank, torch.bfloat16)
        planned_lora(*arguments, plan(tokens, rank, 3584))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [8, 64, 300])
@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_beside_vllms_own_kernels(name: str, tokens: int, dtype: torch.dtype) -> None:
    """By the wrapper that vLLM gets from us, and by the one it has."""
    pytest.importorskip("vllm")
    from qerld_service.gpu_lora import SlotLora
    from vllm.config import LoRAConfig
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.ops.triton_ops import utils
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    utils._LORA_A_PTR_DICT.clear()  # which know adapters by their addresses, and those of other tests are gone
    utils._LORA_B_PTR_DICT.clear()
    inputs, widths = LAYERS[name]
    y, x, a, b, slots = make(tokens, inputs, widths, 32, dtype)
    ids = tuple((slots[:tokens] + 1).tolist())
    config = LoRAConfig(max_loras=SLOTS, max_lora_rank=32, lora_dtype=dtype)
    results = []
    for kind in (PunicaWrapperGPU, type("Ours", (SlotLora, PunicaWrapperGPU), {})):
        wrapper = kind(tokens, tokens, torch.device("cuda"), max_loras=SLOTS, lora_config=config)
        wrapper.update_metadata(LoRAMapping(ids, ids), list(range(1, SLOTS + 1)), SLOTS + 1, 1000)
        found = y.clone()
        wrapper.add_lora_linear(found, x, tuple(a), tuple(b), 1.0, widths)
        results.append(found)
    theirs, ours = results
    wanted = exact(y, x, a, b, slots)
    assert_rounded(ours, wanted)
    assert (theirs.double() - wanted).abs().max() <= 4 * torch.finfo(dtype).eps * wanted.abs().max()


PROMPT, COMPLETION = list(range(5, 45)), [210, 55, 19, 8, 301, 44, 5, 99, 12, 12, 480, 1]
KEYS = [AdapterKey("lora", version, False) for version in (1, 2)]


async def served(model: Path, adapters: list[Path], kernel: Literal["vllm", "qerld"]) -> tuple[Any, Any]:
    """Log-probabilities of given tokens by each adapter, and of tokens as they are sampled and scored afterwards."""
    config = EngineConfig(
        model,
        dtype="float16",
        lora_kernel=kernel,
        max_loras=4,
        max_lora_rank=8,
        max_model_len=256,
        max_num_seqs=16,
        gpu_memory_utilization=0.3,
    )
    engine = await PolicyEngine.start(config)
    try:
        for key, folder in zip(KEYS, adapters, strict=True):
            await engine.load(key, folder, None)
        given = [await engine.score(key, PROMPT, COMPLETION) for key in KEYS]
        sampled = []
        for key in KEYS:
            ids, logprobs = [], []
            async for delta in engine.generate(key, key.name, PROMPT, Sampling(max_tokens=16, temperature=1.0, seed=3)):
                ids += delta.token_ids
                logprobs += delta.logprobs
            sampled.append((logprobs, await engine.score(key, PROMPT, ids)))
    finally:
        await engine.stop()
    return given, sampled


@pytest.mark.engine
async def test_the_engine_serves_by_our_kernels_what_it_serves_by_vllms(
    tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    """One after the other on one cache of compiled code, which must tell the two apart."""
    adapters = [make_adapter(tmp_path / str(seed), seed=seed, scale=0.1) for seed in range(2)]
    theirs, _ = await served(tiny_model[1], adapters, "vllm")
    ours, sampled = await served(tiny_model[1], adapters, "qerld")
    gap = (torch.tensor(ours) - torch.tensor(theirs)).abs()
    assert gap.mean() < 0.01
    assert gap.max() > 0, "the same bits: vLLM's kernels served both times"
    first, second = torch.tensor(ours)
    assert (first - second).abs().mean() > 0.05, "the adapters must matter for this to mean anything"
    for logprobs, scored in sampled:  # decoding runs from captured graphs, scoring does not
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(scored), rtol=0, atol=0.05)
