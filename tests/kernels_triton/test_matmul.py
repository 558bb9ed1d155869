"""Products with tiled weights against float64; the fused kernel on a Hopper GPU only: Gluon has no interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import pytest
import torch
from qerld_kernels import fused_product as fused_product_module
from qerld_kernels import matmul as matmul_module
from qerld_kernels.dequantize import dequantize_reference
from qerld_kernels.fused_product import Plan, can_fuse, fused_product
from qerld_kernels.jit import INTERPRETED
from qerld_kernels.lora import lora_reference
from qerld_kernels.low_rank import Sharing, counters_for, low_rank_reference, slices
from qerld_kernels.matmul import MOST_SHARED, lora_matmul, lora_plan, matmul, matmul_reference, plan, remember_scale
from qerld_kernels.nvfp4 import Nvfp4Tensor, quantize
from qerld_kernels.plans import PLANS, SHARINGS
from qerld_kernels.stream_k import add_pieces
from qerld_kernels.tiles import Tiles, tile
from torch import Tensor

from kernels_triton.test_tiles import on

SHAPES = [(1, 64, 256), (3, 20, 64), (17, 130, 576), (123, 70, 112), (300, 1000, 1040)]
DTYPES = [torch.float16, torch.bfloat16]
INPUTS = 576
# What the table has, and others: one warpgroup and many tokens, a ring of two, few parts.
USED = sorted({chosen for plans in PLANS.values() for _, chosen in plans}, key=str)
USED += [Plan(128, 1, 128, 2, 2, 1), Plan(16, 2, 256, 2, 2, 2), Plan(64, 4, 128, 3, 1, 3)]
# As if the GPU had so few multiprocessors: programs then go from tile to tile, and share some.
FEW = [1, 2, 3, None]


def weight(outputs: int, inputs: int) -> Nvfp4Tensor:
    made = torch.randn(outputs, inputs)
    made[0, :16] = 0  # a block of scale zero
    return quantize(made)


def exact(x: Tensor, packed: Nvfp4Tensor) -> Tensor:
    wide = dequantize_reference(packed.packed, packed.scale, dtype=torch.float32).double()
    return x.cpu().double() @ wide.T * packed.global_scale.double()


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Within a few roundings to the dtype, relative to the largest value: sums cancel."""
    tolerance = 4 * torch.finfo(found.dtype).eps * wanted.abs().max()
    assert (found.cpu().double() - wanted).abs().max() <= tolerance


@pytest.fixture
def hopper(device: str) -> str:
    if not can_fuse(torch.empty(0, device=device)):
        pytest.skip("the fused kernel needs a Hopper GPU")
    return device


def few_multiprocessors(monkeypatch: pytest.MonkeyPatch, few: int | None) -> None:
    if few is not None:
        monkeypatch.setattr(fused_product_module, "_multiprocessors", lambda _device: few)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chosen", USED, ids=str)
@pytest.mark.parametrize(("shape", "few"), [*((shape, None) for shape in SHAPES), *(((70, 520, 576), n) for n in FEW)])
def test_fused_against_float64(
    shape: tuple[int, int, int],
    few: int | None,
    chosen: Plan,
    dtype: torch.dtype,
    hopper: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_multiprocessors(monkeypatch, few)
    tokens, outputs, inputs = shape
    packed, x = weight(outputs, inputs), torch.randn(tokens, inputs).to(dtype)
    tiles = on(hopper, tile(packed.packed, packed.scale))
    torch.full((1 << 24,), torch.nan, device=hopper)  # what the allocator hands out next
    found = [fused_product(x.to(hopper), tiles, outputs, float(packed.global_scale), chosen) for _ in range(2)]
    assert found[0].dtype == dtype
    assert_rounded(found[0], exact(x, packed))
    assert torch.equal(*found), "the order of the sums does not depend on timing"


@pytest.mark.parametrize("chosen", USED, ids=str)
def test_fused_on_a_layer_that_keeps_the_gpu_busy(chosen: Plan, hopper: str) -> None:
    """The ring goes round many times, and memory is slower than the products: what small layers do not show."""
    outputs, inputs, tokens = 18944, 3584, 2 * chosen.tokens + 3
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=hopper)
    scale = torch.randint(0x20, 0x60, (outputs, inputs // 16), dtype=torch.uint8, device=hopper)
    tiles, x = tile(packed, scale.view(torch.float8_e4m3fn)), torch.randn(tokens, inputs, device=hopper).bfloat16()
    wanted = matmul_reference(x, tiles, outputs, torch.ones((), device=hopper))
    for _ in range(10):
        found = fused_product(x, tiles, outputs, 1.0, chosen)
        assert (found - wanted).abs().max() <= 4 * torch.finfo(x.dtype).eps * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_scale_in_the_tile(dtype: torch.dtype, hopper: str) -> None:
    """x is the identity, so y is W̃ itself: exact in fp16 and bf16."""
    scales = torch.tensor([0, *range(0x08, 0x7F)], dtype=torch.uint8)
    packed = (torch.arange(16, dtype=torch.uint8) * 17).repeat(len(scales), 1)
    scale = scales[:, None].repeat(1, 2).view(torch.float8_e4m3fn)
    identity = torch.eye(32, dtype=dtype, device=hopper)
    tiles = on(hopper, tile(packed, scale))
    found = fused_product(identity, tiles, len(scales), 1.0, Plan(32, 1, 128, 2, 1)).T
    assert torch.equal(found.cpu().float(), dequantize_reference(packed, scale, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 5, 40, 600, 2100])
def test_the_op(tokens: int, dtype: torch.dtype, device: str) -> None:
    packed, x = weight(48, 96), torch.randn(tokens, 96).to(dtype)
    tiles = on(device, tile(packed.packed, packed.scale))
    y = matmul(x.to(device), tiles.words, tiles.scale, packed.global_scale.to(device), 48)
    assert y.shape == (tokens, 48)
    if tokens:
        assert_rounded(y, exact(x, packed))
        reference = matmul_reference(x, tile(packed.packed, packed.scale), 48, packed.global_scale)
        assert_rounded(reference, exact(x, packed))


def test_the_op_is_opaque_to_the_compiler(device: str) -> None:
    packed = weight(48, 96)
    tiles = on(device, tile(packed.packed, packed.scale))
    x = torch.randn(5, 96, dtype=torch.float16, device=device)
    arguments = (x, tiles.words, tiles.scale, packed.global_scale.to(device), 48)
    torch.library.opcheck(matmul, arguments, test_utils="test_faketensor")


def test_a_remembered_scale_is_not_read_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_module, "_host_scales", {})  # by address, which another test's scale may be given
    packed, x = weight(32, 64), torch.randn(4, 64, dtype=torch.float16, device=device)
    tiles = on(device, tile(packed.packed, packed.scale))
    scale = remember_scale(packed.global_scale.to(device).clone())
    before = matmul(x, tiles.words, tiles.scale, scale, 32)
    scale.mul_(2)
    assert torch.equal(matmul(x, tiles.words, tiles.scale, scale, 32), before)


@pytest.mark.parametrize("start", [0, 1])
def test_rows_of_x_may_be_strided_and_misaligned(start: int, device: str) -> None:
    packed, x = weight(32, 64), torch.randn(4, 131, dtype=torch.float16).to(device)
    tiles, x = on(device, tile(packed.packed, packed.scale)), x[:, start : start + 64]
    arguments = (tiles.words, tiles.scale, packed.global_scale.to(device), 32)
    assert torch.equal(matmul(x, *arguments), matmul(x.contiguous(), *arguments))


@dataclass
class LoraCase:
    """A layer with adapters in 32 slots, of which the tokens use some: not slot 2, and the last."""

    packed: Nvfp4Tensor
    a: list[Tensor]
    b: list[Tensor]
    counters: Tensor
    device: str

    @staticmethod
    def make(widths: tuple[int, ...], rank: int, dtype: torch.dtype, device: str) -> LoraCase:
        packed = quantize(torch.randn(sum(widths), INPUTS) / INPUTS**0.5)
        a = [(torch.randn(32, 1, rank, INPUTS) / INPUTS**0.5).to(dtype) for _ in widths]
        b = [torch.randn(32, 1, width, rank).to(dtype) for width in widths]  # LoRA's share is the larger one
        a[0][2], b[-1][2] = torch.nan, torch.nan
        remember_scale(packed.global_scale)
        counters = torch.zeros(counters_for(300), dtype=torch.int32, device=device)
        return LoraCase(packed, a, b, counters, device)

    @cached_property
    def layer(self) -> tuple[Tensor, Tensor, Tensor, int, list[Tensor], list[Tensor]]:
        tiles = on(self.device, tile(self.packed.packed, self.packed.scale))
        a, b = ([part.to(self.device) for part in parts] for parts in (self.a, self.b))
        scale = remember_scale(self.packed.global_scale.to(self.device))
        return tiles.words, tiles.scale, scale, self.packed.shape[0], a, b

    @staticmethod
    def slots(tokens: int) -> Tensor:
        return torch.tensor([-1, 0, 1, 31])[torch.randint(0, 4, (tokens,))]

    def run(self, x: Tensor, slots: Tensor, none: bool = False) -> Tensor:
        return lora_matmul(x, *self.layer, slots, torch.tensor([none]), self.counters)

    def exact(self, x: Tensor, slots: Tensor) -> Tensor:
        rank = self.a[0].shape[2]
        low = low_rank_reference(x, self.a, slots).double()
        wanted, begin = exact(x, self.packed), 0
        for piece, up in enumerate(self.b):
            for slot in (0, 1, 31):
                columns = low[slot, :, piece * rank : piece * rank + rank]
                wanted[:, begin : begin + up.shape[2]] += columns @ up[slot, 0].double().T
            begin += up.shape[2]
        return wanted


LORA_LAYERS = [(8, (48,)), (32, (64, 128, 330)), (64, (128, 392)), (128, (256, 64)), (16, (40, 30)), (32, (100, 64))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "widths"), LORA_LAYERS)
@pytest.mark.parametrize(("tokens", "few"), [(1, None), (7, 1), (17, 2), (64, 3), (130, 1), (300, 2)])
def test_with_lora(
    tokens: int,
    few: int | None,
    rank: int,
    widths: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_multiprocessors(monkeypatch, few)
    case, x = LoraCase.make(widths, rank, dtype, device), torch.randn(tokens, INPUTS).to(dtype)
    for slots in (case.slots(tokens), torch.full((tokens,), -1)):
        assert_rounded(case.run(x.to(device), slots.to(device)), case.exact(x, slots))
    assert_rounded(case.run(x.to(device), slots.to(device), none=True), exact(x, case.packed))
    assert case.counters.count_nonzero() == 0


def test_more_tokens_with_lora_than_one_launch_takes(device: str) -> None:
    case = LoraCase.make((48,), 8, torch.float16, device)
    x, slots = torch.randn(MOST_SHARED + 1, INPUTS).half(), case.slots(MOST_SHARED + 1)
    assert_rounded(case.run(x.to(device), slots.to(device)), case.exact(x, slots))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("splits", "parts"), [(1, 1), (2, 2), (3, 1 << 16), (99, 2)])
@pytest.mark.parametrize("few", FEW)
def test_with_lora_however_the_launch_is_shared(
    few: int | None, splits: int, parts: int, share: float, hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_multiprocessors(monkeypatch, few)
    way = Plan(32, 2, 128, 3, 1), Sharing(splits, parts, share)
    monkeypatch.setattr(matmul_module, "lora_plan", lambda *_size: way)
    case = LoraCase.make((192, 330), 32, torch.float16, hopper)
    x, slots = torch.randn(70, INPUTS).half(), case.slots(70)
    for _ in range(3):
        assert_rounded(case.run(x.to(hopper), slots.to(hopper)), case.exact(x, slots))
    assert case.counters.count_nonzero() == 0


@pytest.mark.parametrize(("shape", "tokens"), [(shape, most) for shape, ways in SHARINGS.items() for most, _ in ways])
def test_with_lora_on_layers_that_keep_the_gpu_busy(shape: tuple[int, int], tokens: int, hopper: str) -> None:
    """As tuned; two adapters in a batch; the results of a run are those of the next."""
    outputs, inputs = shape
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=hopper)
    scale = torch.randint(0x20, 0x60, (outputs, inputs // 16), dtype=torch.uint8, device=hopper)
    tiles, x = tile(packed, scale.view(torch.float8_e4m3fn)), torch.randn(tokens, inputs, device=hopper).bfloat16()
    widths = {4608: (3584, 512, 512), 37888: (18944, 18944)}.get(outputs, (outputs,))
    a = [torch.randn(2, 1, 32, inputs, device=hopper).bfloat16() for _ in widths]
    b = [torch.randn(2, 1, width, 32, device=hopper).bfloat16() for width in widths]
    slots = torch.randint(-1, 2, (tokens,), device=hopper)
    factor = remember_scale(torch.ones((), device=hopper))
    counters = torch.zeros(counters_for(tokens), dtype=torch.int32, device=hopper)
    wanted = lora_reference(matmul_reference(x, tiles, outputs, factor).float(), x.float(), a, b, slots)
    found = [
        lora_matmul(x, tiles.words, tiles.scale, factor, outputs, a, b, slots, torch.tensor([False]), counters)
        for _ in range(10)
    ]
    assert all(torch.equal(found[0], again) for again in found)
    assert (found[0] - wanted).abs().max() <= 8 * torch.finfo(x.dtype).eps * wanted.abs().max()


def test_a_captured_graph_serves_other_batches(hopper: str) -> None:
    """And beside its neighbours, as in a model: the buffers of one layer are the next one's."""
    case = LoraCase.make((64, 456), 32, torch.bfloat16, hopper)
    x, slots = torch.randn(40, INPUTS).bfloat16().to(hopper), case.slots(40).to(hopper)
    case.run(x, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [case.run(x * scale, slots) for scale in (1, 2, 4)]
    for drawn in (case.slots(40), torch.full((40,), -1), torch.full((40,), 31)):
        x.copy_(torch.randn(40, INPUTS))
        slots.copy_(drawn)
        for _ in range(50):
            graph.replay()
        for scale, one in zip((1, 2, 4), found, strict=True):
            assert_rounded(one, case.exact(x.cpu() * scale, drawn))


REFUSED: list[tuple[str, Callable[[Tensor, Tiles], tuple[Tensor, Tiles]]]] = [
    (r"x: must be bf16 or fp16 \[M, K\]", lambda x, t: (x.float(), t)),
    (r"x: must be bf16 or fp16 \[M, K\]", lambda x, t: (x[0], t)),
    (r"words: must be contiguous torch.int64 \[1, 2, 256\]", lambda x, t: (torch.cat([x, x], 1), t)),
    (r"scale: must be contiguous torch.int32 \[1, 1, 64\]", lambda x, t: (x, Tiles(t.words, t.scale[..., :8]))),
]


@pytest.mark.parametrize(("message", "spoil"), REFUSED)
def test_what_does_not_fit_is_refused(
    message: str, spoil: Callable[[Tensor, Tiles], tuple[Tensor, Tiles]], device: str
) -> None:
    packed = weight(32, 64)
    fitting = torch.randn(4, 64, dtype=torch.float16, device=device), on(device, tile(packed.packed, packed.scale))
    x, tiles = spoil(*fitting)
    with pytest.raises(ValueError, match=message):
        matmul(x, tiles.words, tiles.scale, torch.ones((), device=device), 32)


@pytest.mark.parametrize("programs", [2, 3, 5, 12])
@pytest.mark.parametrize(("with_slices", "their_parts"), [(0, 0), (1, 0), (2, 3), (2, 12)])
@pytest.mark.parametrize("scaled_head", [False, True])
def test_pieces_of_shared_tiles_are_added(
    programs: int, with_slices: int, their_parts: int, scaled_head: bool, device: str
) -> None:
    """Two rows of tiles and two of tokens, three parts each; part s of tile t adds 10 t + s + 1."""
    groups, width, rows, tokens, outputs, steps = 2, 16, 2, 30, 250, 3
    tiles = rows * 2
    work = tiles * steps
    pieces = torch.full((programs, 2, groups, 64, width), torch.nan)
    pattern = torch.randn(groups, 64, width)
    others = programs - with_slices
    their_parts = work if others == 0 else their_parts
    bounds = [at * their_parts // with_slices for at in range(with_slices)] if with_slices else []
    bounds += [their_parts + at * (work - their_parts) // max(1, others) for at in range(others)] + [work]
    whole = set()
    for program in range(programs):
        for at in range(tiles):
            mine = range(max(bounds[program], at * steps), min(bounds[program + 1], at * steps + steps))
            if len(mine) == steps:
                whole.add(at)
            elif mine:
                factor = 0.5 if scaled_head and mine[0] == at * steps else 1.0
                amount = factor * sum(10 * at + unit % steps + 1 for unit in mine)
                pieces[program, int(mine[0] == at * steps)] = amount * pattern
    y = torch.full((tokens, outputs), -1.0, dtype=torch.float16, device=device)
    add_pieces[(tiles, groups)](
        pieces.to(device), y, 0.5, tokens, outputs, steps, 2, programs, work, with_slices, their_parts,
        PDL=False, SCALED_HEAD=scaled_head, GROUPS=groups, TOKENS=width, ROWS=width,
    )  # fmt: skip
    wanted = torch.full((2 * width, rows * groups * 64), -1.0)
    for at in set(range(tiles)) - whole:
        block = 0.5 * (30 * at + 6) * pattern.reshape(groups * 64, width).T
        wanted[at % 2 * width :][:width, at // 2 * groups * 64 :][:, : groups * 64] = block
    torch.testing.assert_close(y.cpu(), wanted[:tokens, :outputs].half(), rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles it anyway")
def test_the_fused_kernel_compiles_for_hopper() -> None:
    """To PTX, by the Triton at hand: without a GPU that is as far as one gets, and Gluon's names change."""
    script = Path(__file__).with_name("compile_fused.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # Of a tile four for each 64 of a step's inputs, twice over (the last step is apart); of A as many for a step, of B
    # four for 64 ranks.
    counts = [[int(count) for count in line.split()[2:]] for line in done.stdout.splitlines()]
    # Who loads x waits for the kernel before, who counts slices, and who resets the counters.
    assert counts == 2 * [[32, 1, 52, 4]] + 2 * [[16, 1, 28, 4]]


@pytest.mark.parametrize(("inputs", "stages"), [(64, 4), (128, 1), (192, 3), (256, 1)])
def test_plans_that_would_hang_or_reuse_registers_are_refused(inputs: int, stages: int) -> None:
    with pytest.raises(ValueError, match="a plan needs steps of 128 or 256 inputs and 2 stages"):
        Plan(16, 1, inputs, stages, 1)


def test_plans_of_other_layers_and_tokens_are_the_nearest() -> None:
    outputs, inputs = max(PLANS)
    (least, first), *_, (most, last) = PLANS[outputs, inputs]
    assert plan(1, outputs, inputs) == plan(least, outputs, inputs) == first
    assert plan(most, 2 * outputs, inputs) == last
    assert plan(most + 1, outputs, inputs) is None


def test_slices_cover_k_and_share_the_product() -> None:
    for steps, splits, programs, share in product((1, 14, 148), (1, 5, 400), (1, 7, 132), (0.0, 0.5, 1.0)):
        made = slices(Sharing(splits, share=share), 4, steps, programs, 1000)
        assert made.splits * made.steps >= steps > (made.splits - 1) * made.steps
        assert made.count == 4 * made.splits
        assert made.programs == min(made.count, programs)
        others = programs - made.programs
        if others == 0:
            assert made.parts == 1000
        else:
            assert abs(made.parts / made.programs - share * (1000 - made.parts) / others) <= 2


def test_plans_with_lora_are_those_without_but_for_many_tokens() -> None:
    for outputs, inputs in PLANS:
        for tokens in (1, 64, 300):
            assert lora_plan(tokens, outputs, inputs)[0] == plan(tokens, outputs, inputs)
        assert lora_plan(10**6, outputs, inputs) == (PLANS[outputs, inputs][-1][1], SHARINGS[outputs, inputs][-1][1])


def test_every_table_is_in_order_and_ends_where_the_weight_is_dequantised() -> None:
    for plans in PLANS.values():
        tokens = [most for most, _ in plans]
        assert tokens == sorted(set(tokens))
        assert tokens[-1] >= 512, "captured graphs of vLLM have up to 512 tokens"
