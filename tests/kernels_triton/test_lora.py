"""LoRA by slot against float64: odd shapes, ranks, mixed slots, every plan's parts, what must stay as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from qerld_kernels.jit import INTERPRETED
from qerld_kernels.lora import Plan, add_lora, lora_reference, plan, planned_lora
from torch import Tensor

# The interpreter's products take the bits of bf16 for integers; there the op runs the reference.
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
SLOTS = 4
PLANS = [
    Plan(16, 64, 16, 4, 2, 16, 64, 264, 4),
    Plan(32, 128, 3, 4, 3, 16, 32, 1, 4),
    Plan(16, 32, 2, 4, 2, 64, 64, 8, 8),
    Plan(64, 128, 1, 4, 3, 32, 128, 528, 4),
]


@dataclass
class Case:
    """Arguments of `add_lora`. The slot buffer is longer than the batch, as vLLM's, with a live slot beyond it."""

    y: Tensor
    x: Tensor
    a: list[Tensor]
    b: list[Tensor]
    slots: Tensor
    none: Tensor

    def run(self) -> Tensor:
        y = self.y.clone()
        add_lora(y, self.x, self.a, self.b, self.slots, self.none)
        return y

    def run_planned(self, chosen: Plan) -> Tensor:
        y = self.y.clone()
        planned_lora(y, self.x, self.a, self.b, self.slots, chosen)
        return y

    @property
    def own(self) -> Tensor:
        """Which rows have an adapter."""
        slots = self.slots[: len(self.x)]
        return (slots >= 0) & (slots < self.a[0].shape[0])


def make(
    tokens: int,
    inputs: int,
    widths: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    device: str,
    slots: list[int] | None = None,
) -> Case:
    drawn = torch.randint(-1, SLOTS, (tokens,)) if slots is None else torch.tensor(slots)
    return Case(
        torch.randn(tokens, sum(widths)).to(dtype).to(device),
        torch.randn(tokens, inputs).to(dtype).to(device),
        [(torch.randn(SLOTS, 1, rank, inputs) / inputs**0.5).to(dtype).to(device) for _ in widths],
        [torch.randn(SLOTS, 1, width, rank).to(dtype).to(device) for width in widths],
        torch.cat([drawn, torch.tensor([SLOTS - 1, 0])]).to(device),
        torch.tensor([False]),
    )


def exact(case: Case) -> Tensor:
    """In float64 but for the rounding of the low-rank product, row by row."""
    y = case.y.cpu().double()
    for row, slot in enumerate(case.slots[: len(y)].tolist()):
        if 0 <= slot < SLOTS:
            x = case.x[row].cpu().double()
            parts = []
            for a, b in zip(case.a, case.b, strict=True):
                low = (a[slot, 0].cpu().double() @ x).to(case.x.dtype).double()
                parts.append(b[slot, 0].cpu().double() @ low)
            y[row] += torch.cat(parts)
    return y


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Within a few roundings to the dtype, relative to the largest value: sums cancel."""
    tolerance = 2 * torch.finfo(found.dtype).eps * wanted.abs().max()
    assert (found.cpu().double() - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "inputs", "widths", "rank"),
    [
        (1, 256, (64,), 8),
        (3, 300, (96, 32, 32), 16),
        (17, 384, (130,), 32),
        (17, 70, (72, 200), 64),
        (123, 640, (200, 33), 32),
        (40, 129, (65,), 128),
        (5, 64, (64,), 1),
        (300, 96, (40, 24, 24), 24),
    ],
    ids=str,
)
def test_against_float64(
    tokens: int, inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype, device: str
) -> None:
    case = make(tokens, inputs, widths, rank, dtype, device)
    found = case.run()
    assert_rounded(found, exact(case))
    assert_rounded(lora_reference(case.y, case.x, case.a, case.b, case.slots), exact(case))
    assert torch.equal(found[~case.own], case.y[~case.own])


@pytest.mark.parametrize("chosen", PLANS, ids=str)
@pytest.mark.parametrize("tokens", [3, 17, 70])
def test_every_plan_computes_the_same(tokens: int, chosen: Plan, device: str) -> None:
    case = make(tokens, 330, (150, 40), 32, torch.float16, device)
    assert_rounded(case.run_planned(chosen), exact(case))


@pytest.mark.parametrize("slots", [[0] * 17, [3] * 17, [2, -1] * 8 + [1], [-1] * 16 + [1], [9, -7, 4] * 5 + [0, 9]])
def test_slots_one_mixed_none_and_nonsense(slots: list[int], device: str) -> None:
    case = make(17, 96, (48, 16, 16), 16, torch.float16, device, slots)
    found = case.run()
    assert_rounded(found, exact(case))
    assert torch.equal(found[~case.own], case.y[~case.own])
    assert not torch.equal(found[case.own], case.y[case.own])


def test_a_batch_without_adapters_is_left_alone(device: str) -> None:
    case = make(5, 64, (32,), 16, torch.float16, device, [-1] * 5)
    assert torch.equal(case.run(), case.y)
    flagged = replace(make(5, 64, (32,), 16, torch.float16, device, [0] * 5), none=torch.tensor([True]))
    assert torch.equal(flagged.run(), flagged.y)
    empty = make(0, 64, (32,), 16, torch.float16, device)
    assert empty.run().shape == (0, 32)


def test_an_adapter_full_of_nan_stays_with_its_tokens(device: str) -> None:
    slots = [0, 1, -1, 2, 1, 0, 3, -1]
    case = make(8, 96, (48, 40), 16, torch.float16, device, slots)
    before = case.run()
    for tensor in (*case.a, *case.b):
        tensor[1] = torch.nan
    case.x[3] = torch.inf
    after = case.run()
    others = torch.tensor([slot != 1 and row != 3 for row, slot in enumerate(slots)])
    assert torch.equal(after[others], before[others])
    assert after[1].isnan().all()


def test_neighbours_do_not_change_a_row(device: str) -> None:
    """Bit by bit, at the same T: what shares the batch only adds passes over other rows."""
    alone = make(40, 330, (70,), 32, torch.float16, device, [2] * 40)
    beside = replace(alone, slots=alone.slots.clone())
    beside.slots[:40:2] = torch.tensor([0, 1, -1, 3] * 5, device=device)
    rows = torch.arange(1, 40, 2, device=device)
    assert torch.equal(alone.run()[rows], beside.run()[rows])


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("chosen", PLANS, ids=str)
def test_scratch_that_held_nan_does_no_harm(chosen: Plan, device: str) -> None:
    """The low-rank sums of rows without an adapter are never written, and must not reach y."""
    assert torch.empty(2).isnan().all()
    case = make(37, 200, (90, 30), 16, torch.float16, device)
    assert_rounded(case.run_planned(chosen), exact(case))


def test_columns_and_rows_beyond_are_not_touched(device: str) -> None:
    """y and x may be cut from larger tensors."""
    case = make(17, 96, (50,), 16, torch.float16, device)
    held = torch.full((20, 64), torch.nan, dtype=torch.float16, device=device)
    held[:17, 8:58] = case.y
    wide = torch.cat([case.x, case.x], dim=1)
    add_lora(held[:17, 8:58], wide[:, :96], case.a, case.b, case.slots, case.none)
    assert torch.equal(held[:17, 8:58], case.run())
    assert held[17:].isnan().all()
    assert held[:, :8].isnan().all()
    assert held[:, 58:].isnan().all()


def test_bfloat16(device: str) -> None:
    case = make(9, 96, (48, 16), 16, torch.bfloat16, device)
    assert_rounded(case.run(), exact(case))


def test_the_op_is_opaque_to_the_compiler(device: str) -> None:
    case = make(5, 64, (32, 16), 16, torch.float16, device)
    arguments = (case.y, case.x, case.a, case.b, case.slots, case.none)
    torch.library.opcheck(add_lora, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("inputs", [576, 18944])
@pytest.mark.parametrize("rank", [8, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 256, 257, 2048, 8192])
def test_plans_fit_the_machine(tokens: int, rank: int, inputs: int) -> None:
    """Shared memory of a program of the shrink on an H100 or H200 is at most 227 KiB."""
    chosen, padded = plan(tokens, rank, inputs), max(16, rank)
    assert chosen.stages * 2 * chosen.inputs * (chosen.shrink_rows + padded) <= 227 * 1024
    assert chosen.shrink_rows >= min(16, tokens)


SPOILT: list[tuple[str, Callable[[Case], Case]]] = [
    (r"x: must be bf16 or fp16 \[T, K\]", lambda c: replace(c, x=c.x.float())),
    (r"x: must be bf16 or fp16 \[T, K\]", lambda c: replace(c, x=c.x.T.contiguous().T)),
    (r"a: must be \[4, 1, 16, 60\] each, for x, got \(4, 1, 16, 64\)", lambda c: replace(c, x=c.x[:, :60])),
    (r"y: must be torch\.float16 \[5, 48\]", lambda c: replace(c, y=c.y[:, :40])),
    (r"y: must be torch\.float16 \[5, 48\]", lambda c: replace(c, y=c.y.float())),
    (r"y: must be torch\.float16 \[5, 48\]", lambda c: replace(c, y=c.y.T.contiguous().T)),
    (r"a, b: must be as many tensors each, 1 to 3, got 2 and 1", lambda c: replace(c, b=c.b[:1])),
    (r"a, b: must be as many tensors each, 1 to 3, got 4 and 4", lambda c: replace(c, a=c.a * 2, b=c.b * 2)),
    (r"a: must be \[L, 1, R, K\] with R from 1 to 128", lambda c: replace(c, a=[a.repeat(1, 1, 9, 1) for a in c.a])),
    (r"a: must be \[4, 1, 16, 64\] each", lambda c: replace(c, a=[c.a[0], c.a[1][:3]])),
    (r"a: must be contiguous torch\.float16", lambda c: replace(c, a=[c.a[0].bfloat16(), c.a[1]])),
    (r"b: must be \[4, 1, width, 16\] each", lambda c: replace(c, b=[b.transpose(2, 3) for b in c.b])),
    (r"b: must be contiguous torch\.float16", lambda c: replace(c, b=[b.repeat(1, 1, 1, 2)[..., ::2] for b in c.b])),
    (r"slots: must be contiguous int64 with at least 5", lambda c: replace(c, slots=c.slots[:4])),
    (r"slots: must be contiguous int64 with at least 5", lambda c: replace(c, slots=c.slots.int())),
    (r"none: must be bool \[1\] on the host", lambda c: replace(c, none=torch.tensor([0]))),
]


@pytest.mark.parametrize(("message", "spoil"), SPOILT)
def test_what_does_not_fit_is_refused(message: str, spoil: Callable[[Case], Case], device: str) -> None:
    with pytest.raises(ValueError, match=message):
        spoil(make(5, 64, (32, 16), 16, torch.float16, device)).run()
