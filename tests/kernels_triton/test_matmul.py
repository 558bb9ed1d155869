"""Products with packed weights against float64: odd shapes, every plan's parts, gradients, refused layouts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from qerld_kernels.dequantize import dequantize_reference
from qerld_kernels.jit import INTERPRETED
from qerld_kernels.matmul import Plan, fused_product, matmul, matmul_backward, matmul_reference, remember_scale
from qerld_kernels.nvfp4 import Nvfp4Tensor, quantize
from torch import Tensor

# The interpreter has no products in bf16: it flushes its subnormal numbers.
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
SHAPES = [(1, 64, 256), (3, 20, 64), (17, 130, 576), (123, 70, 112)]
PLANS = [Plan(16, 64, 128, 1, 4, 2), Plan(16, 64, 64, 3, 4, 2), Plan(32, 64, 64, 2, 4, 3), Plan(64, 128, 64, 1, 8, 2)]


def weight(outputs: int, inputs: int) -> Nvfp4Tensor:
    return quantize(torch.randn(outputs, inputs) * torch.logspace(-2, 0, outputs)[:, None])


def exact(x: Tensor, packed: Nvfp4Tensor) -> Tensor:
    wide = dequantize_reference(packed.packed, packed.scale, dtype=torch.float32).double()
    return x.cpu().double() @ wide.T * packed.global_scale.double()


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Within a few roundings to the dtype, relative to the largest value: sums cancel."""
    tolerance = 4 * torch.finfo(found.dtype).eps * wanted.abs().max()
    assert (found.cpu().double() - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chosen", PLANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_against_float64(shape: tuple[int, int, int], chosen: Plan, dtype: torch.dtype, device: str) -> None:
    tokens, outputs, inputs = shape
    packed, x = weight(outputs, inputs), torch.randn(tokens, inputs).to(dtype)
    found = fused_product(
        x.to(device), packed.packed.to(device), packed.scale.to(device), float(packed.global_scale), chosen
    )
    assert found.dtype == dtype
    assert_rounded(found, exact(x, packed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_and_scale_in_the_tile(dtype: torch.dtype, device: str) -> None:
    """x is the identity, so y is W̃ itself: exact in fp16 and bf16 but for what overflows or underflows fp16."""
    scales = torch.tensor([0, *range(0x08, 0x7F)], dtype=torch.uint8)
    packed = (torch.arange(16, dtype=torch.uint8) * 17).repeat(len(scales), 1)
    scale = scales[:, None].repeat(1, 2).view(torch.float8_e4m3fn)
    identity = torch.eye(32, dtype=dtype, device=device)
    found = fused_product(identity, packed.to(device), scale.to(device), 1.0, Plan(32, 64, 64, 1, 4, 2)).T
    wanted = dequantize_reference(packed, scale, dtype=torch.float32)
    assert torch.equal(found.cpu().float(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 5, 40, 600])
def test_the_op_and_its_gradient(tokens: int, dtype: torch.dtype, device: str) -> None:
    packed = weight(48, 96)
    bytes_ = (packed.packed.to(device), packed.scale.to(device), packed.global_scale.to(device))
    x = torch.randn(tokens, 96).to(dtype).to(device).requires_grad_()
    y = matmul(x, *bytes_)
    assert y.shape == (tokens, 48)
    grad = torch.randn(tokens, 48).to(dtype)
    y.backward(grad.to(device))
    assert x.grad is not None
    if tokens:
        assert_rounded(y.detach(), exact(x.detach(), packed))
        wide = dequantize_reference(packed.packed, packed.scale, dtype=torch.float32).double()
        assert_rounded(x.grad, grad.double() @ wide * packed.global_scale.double())
        assert_rounded(
            matmul_reference(x.detach().cpu(), packed.packed, packed.scale, packed.global_scale), exact(x, packed)
        )


def test_ops_are_opaque_to_the_compiler(device: str) -> None:
    packed = weight(48, 96)
    bytes_ = (packed.packed.to(device), packed.scale.to(device), packed.global_scale.to(device))
    x = torch.randn(5, 96, dtype=torch.float16, device=device)
    for op, one in ((matmul, x), (matmul_backward, x[:, :48].contiguous())):
        torch.library.opcheck(op, (one, *bytes_), test_utils="test_faketensor")


def test_a_remembered_scale_is_not_read_again(device: str) -> None:
    packed, x = weight(32, 64), torch.randn(4, 64, dtype=torch.float16, device=device)
    scale = remember_scale(packed.global_scale.to(device).clone())
    before = matmul(x, packed.packed.to(device), packed.scale.to(device), scale)
    scale.mul_(2)
    assert torch.equal(matmul(x, packed.packed.to(device), packed.scale.to(device), scale), before)


def test_bfloat16_under_the_interpreter(device: str) -> None:
    packed, x = weight(32, 64), torch.randn(4, 64, dtype=torch.bfloat16)
    bytes_ = (packed.packed.to(device), packed.scale.to(device), packed.global_scale.to(device))
    assert_rounded(matmul(x.to(device), *bytes_), exact(x, packed))


def test_rows_of_x_may_be_strided(device: str) -> None:
    packed, x = weight(32, 64), torch.randn(4, 128, dtype=torch.float16)
    bytes_ = (packed.packed.to(device), packed.scale.to(device), packed.global_scale.to(device))
    assert torch.equal(matmul(x.to(device)[:, :64], *bytes_), matmul(x[:, :64].contiguous().to(device), *bytes_))


REFUSED: list[tuple[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]]] = [
    (r"x: must be bf16 or fp16 \[M, 64\]", lambda x, p, s: (x.float(), p, s)),
    (r"x: must be bf16 or fp16 \[M, 64\]", lambda x, p, s: (x[:, :32], p, s)),
    (r"x: must be bf16 or fp16 \[M, 64\]", lambda x, p, s: (x.T.contiguous().T, p, s)),
    (r"packed: must be uint8 \[N, K / 2\] with K a multiple of 16", lambda x, p, s: (x, p[:, :31], s)),
    (r"not empty, got torch.uint8 \(32, 0\)", lambda x, p, s: (x[:, :0], p[:, :0], s[:, :0])),
    (r"packed: must be contiguous", lambda x, p, s: (x, p.T.contiguous().T, s)),
    (r"scale: must be e4m3 \[32, 4\]", lambda x, p, s: (x, p, s.view(torch.uint8))),
    (r"scale: must be e4m3 \[32, 4\]", lambda x, p, s: (x, p, s[:8])),
]


@pytest.mark.parametrize(("message", "spoil"), REFUSED)
def test_what_does_not_fit_is_refused(
    message: str, spoil: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], device: str
) -> None:
    packed = weight(32, 64)
    fitting = torch.randn(4, 64, dtype=torch.float16, device=device), packed.packed.to(device), packed.scale.to(device)
    with pytest.raises(ValueError, match=message):
        matmul(*spoil(*fitting), torch.ones((), device=device))
