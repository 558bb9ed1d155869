"""Products with a packed NVFP4 weight: y = (x · W̃ᵀ) · g and dX = (dY · W̃) · g, with W̃ = e2m1 · e4m3.

Two ways, chosen by the number of tokens M (`plan`):
- fused, for small and middle M: a tile of W̃ is decoded into registers, where it is the left operand of the tensor
  cores, and never written anywhere. The result is computed transposed, W̃ · xᵀ, since only the left operand may come
  from registers. With few tokens K is split among programs (split-K), whose partial sums a second kernel adds.
- dequantised, for large M and the backward: W̃ into a scratch, then the library's product.

The bytes are read as 16-bit words of four weights. A word's top nibble s·eem becomes a number of x's format by moving
its magnitude bits to where exponent and mantissa meet: in bf16 (fp16) that is e2m1 · 2⁻¹²⁶ (2⁻¹⁴), subnormals included,
and the block scale brings 2¹¹⁹ (2⁷) along. The tile is W̃ · 2⁻⁷, exact; the end multiplies by g · 2⁷. Shifts bring the
other nibbles to the top. Two words fill a register, so two weights cost four instructions and a product. Word by word
the weights k ≡ 0, 1, 2, 3 (mod 4) form a tile each, which meets the same columns of x: x is taken apart once, by a
kernel of its own.

Legend: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerld_kernels.dequantize import dequantize_reference, dequantize_unscaled
from qerld_kernels.jit import INTERPRETED, can_launch, constant, jit, next_power_of_2, tl

__all__ = ["Plan", "fused_product", "matmul", "matmul_backward", "matmul_reference", "plan", "remember_scale"]

BLOCK = 16
WORD = 4  # weights of a 16-bit word


@dataclass(frozen=True)
class Plan:
    """Tile sizes of the fused kernel: tokens, outputs, inputs; into how many parts K is split; warps and stages."""

    tokens: int
    outputs: int
    inputs: int
    split: int
    warps: int
    stages: int


def plan(tokens: int, outputs: int, inputs: int) -> Plan | None:
    """Return how to compute a product of this size; None: dequantise."""
    if tokens > 512:
        return None
    if tokens <= 32:
        return Plan(max(16, next_power_of_2(tokens)), 64, 256, 4, 4, 4)
    return Plan(64, 128, 128, 1, 4, 4)


def matmul_reference(x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """y [M, N] in plain torch, in fp32 until the one rounding."""
    weight = dequantize_reference(packed, scale, dtype=torch.float32)
    return ((x.float() @ weight.T) * global_scale).to(x.dtype)


_host_scales: dict[int, float] = {}


def remember_scale(global_scale: Tensor) -> Tensor:
    """Read a global scale fp32 [] once, so that products need not ask the device; it must live as long as the process.

    A Python number would do, were it not a constant to torch.compile, which would compile each layer by itself.
    """
    _host_scales[global_scale.data_ptr()] = float(global_scale)
    return global_scale


@torch.library.custom_op("qerld::nvfp4_matmul", mutates_args=())
def matmul(x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return y [M, N] of x [M, K] bf16 or fp16.

    packed: uint8 [N, K / 2]; scale: e4m3 [N, K / 16], each 0 or at least 2⁻⁶; global_scale: fp32 [].

    One opaque op: the way is chosen when it runs, so a captured CUDA graph keeps the one for its M. Capturing needs
    `remember_scale`.

    Raises:
        ValueError: a shape, dtype or layout does not fit.
    """
    _check(x, packed, scale, packed.shape[1] * 2)
    chosen = plan(x.shape[0], packed.shape[0], x.shape[1])
    # The interpreter flushes bf16's subnormal numbers, which the fused kernel decodes by.
    if chosen is None or not can_launch(x) or (INTERPRETED and x.dtype == torch.bfloat16):
        return _scaled_product(x, dequantize_unscaled(packed, scale, dtype=x.dtype).T, global_scale)
    return fused_product(x, packed, scale, _on_host(global_scale), chosen)


@torch.library.custom_op("qerld::nvfp4_matmul_backward", mutates_args=())
def matmul_backward(grad: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """dX [M, K] of dY [M, N], from the same bytes. Raises as `matmul`."""
    _check(grad, packed, scale, packed.shape[0])
    return _scaled_product(grad, dequantize_unscaled(packed, scale, dtype=grad.dtype), global_scale)


@matmul.register_fake
def _(x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], packed.shape[0])


@matmul_backward.register_fake
def _(grad: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], packed.shape[1] * 2)


def _keep_weight(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.weight = inputs[1:]  # not saved_tensors: the bytes of a frozen layer do not change


def _to_input(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return matmul_backward(grad.contiguous(), *ctx.weight), None, None, None


matmul.register_autograd(_to_input, setup_context=_keep_weight)


def _on_host(global_scale: Tensor) -> float:
    found = _host_scales.get(global_scale.data_ptr())
    return float(global_scale) if found is None else found


def _scaled_product(x: Tensor, weight: Tensor, global_scale: Tensor) -> Tensor:
    """The library multiplies by g in fp32 before it rounds."""
    return torch.addmm(x.new_empty(1), x, weight, beta=0, alpha=_on_host(global_scale))


def fused_product(x: Tensor, packed: Tensor, scale: Tensor, global_scale: float, chosen: Plan) -> Tensor:
    """y by the fused kernel."""
    (tokens, inputs), outputs = x.shape, packed.shape[0]
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return y
    words, factor = inputs // WORD, global_scale * 2**7
    quarters = torch.empty(WORD, tokens, words, dtype=x.dtype, device=x.device)
    _take_apart[(tokens, -(-words // 512))](x, quarters, x.stride(0), tokens, words, WORDS=512, num_warps=4)
    partial = (
        y if chosen.split == 1 else torch.empty(chosen.split, tokens, outputs, dtype=torch.float32, device=x.device)
    )
    grid = (-(-outputs // chosen.outputs), -(-tokens // chosen.tokens), chosen.split)
    _fused_kernel[grid](
        quarters, packed.view(torch.uint16), scale.view(torch.uint8), factor, partial, tokens, outputs, words,
        BF16=x.dtype == torch.bfloat16, INTERPRETED=INTERPRETED, SPLIT=chosen.split,
        BM=chosen.tokens, BN=chosen.outputs, WORDS=chosen.inputs // WORD,
        num_warps=chosen.warps, num_stages=chosen.stages,
    )  # fmt: skip
    if chosen.split > 1:
        count = tokens * outputs
        _add_parts[(-(-count // 1024),)](partial, y, factor, count, SPLIT=chosen.split, BLOCK=1024, num_warps=4)
    return y


def _check(x: Tensor, packed: Tensor, scale: Tensor, columns: int) -> None:
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.shape[1] * 2 % BLOCK or packed.numel() == 0:
        raise ValueError(
            f"packed: must be uint8 [N, K / 2] with K a multiple of {BLOCK}, not empty, "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    if x.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16) or x.shape[1] != columns or x.stride(1) != 1:
        raise ValueError(
            f"x: must be bf16 or fp16 [M, {columns}] with contiguous rows, "
            f"got {x.dtype} {tuple(x.shape)}, strides {x.stride()}"
        )
    if scale.dtype != torch.float8_e4m3fn or scale.shape != (outputs, inputs // BLOCK):
        raise ValueError(f"scale: must be e4m3 [{outputs}, {inputs // BLOCK}], got {scale.dtype} {tuple(scale.shape)}")
    for name, tensor in (("packed", packed), ("scale", scale)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {tensor.stride()}; call contiguous()")


@jit
def _take_apart(x_ptr, quarters_ptr, stride, tokens, words, WORDS: tl.constexpr):
    """Columns 0, 1, 2, 3 (mod 4) of x [M, K] → [4, M, K / 4]."""
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = places < words
    for column in tl.static_range(4):
        values = tl.load(x_ptr + token * stride + 4 * places + column, mask=inside, other=0.0)
        row = column * tl.cast(tokens, tl.int64) + token
        tl.store(quarters_ptr + row * words + places, values, mask=inside)


@jit
def _fused_kernel(
    x_ptr, packed_ptr, scale_ptr, factor, out_ptr, tokens, outputs, words,
    BF16: tl.constexpr, INTERPRETED: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One tile [BN, BM] of W̃ · xᵀ, over one part of K."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    columns = tl.program_id(1) * BM + tl.arange(0, BM)
    part = tl.program_id(2)
    # Beyond the edge the last row is read again; its results are not stored.
    row_at = tl.minimum(rows, outputs - 1).to(tl.int64)[:, None]
    column_at = tl.minimum(columns, tokens - 1).to(tl.int64)[None, :]
    plane = tl.cast(tokens, tl.int64) * words
    steps = tl.cdiv(words, WORDS)
    own = tl.cdiv(steps, SPLIT)
    total = tl.zeros([BN, BM], tl.float32)
    for step in range(part * own, tl.minimum(part * own + own, steps)):
        places = step * WORDS + tl.arange(0, WORDS)
        blocks = step * (WORDS // 4) + tl.arange(0, WORDS // 4)
        inside = places < words
        full = blocks < words // 4
        word = tl.load(packed_ptr + row_at * words + places[None, :], mask=inside[None, :], other=0)
        code = tl.load(scale_ptr + row_at * (words // 4) + blocks[None, :], mask=full[None, :], other=0)
        scale = tl.broadcast_to(_scaled_up(code, BF16)[:, :, None], BN, WORDS // 4, 4).reshape(BN, WORDS)
        x_at = x_ptr + column_at * words + places[:, None]
        if INTERPRETED:
            w0, w1 = _nibble(word, 12, BF16), _nibble(word, 8, BF16)
            w2, w3 = _nibble(word, 4, BF16), _nibble(word, 0, BF16)
        else:
            w0, w1, w2, w3 = _nibbles(word, BF16)
        total = tl.dot(w0 * scale, tl.load(x_at, mask=inside[:, None], other=0.0), total)
        total = tl.dot(w1 * scale, tl.load(x_at + plane, mask=inside[:, None], other=0.0), total)
        total = tl.dot(w2 * scale, tl.load(x_at + 2 * plane, mask=inside[:, None], other=0.0), total)
        total = tl.dot(w3 * scale, tl.load(x_at + 3 * plane, mask=inside[:, None], other=0.0), total)
    target = columns.to(tl.int64)[None, :] * outputs + rows[:, None]
    inside_out = (rows[:, None] < outputs) & (columns[None, :] < tokens)
    if SPLIT == 1:
        tl.store(out_ptr + target, (total * factor).to(out_ptr.dtype.element_ty), mask=inside_out)
    else:
        tl.store(out_ptr + part.to(tl.int64) * tokens * outputs + target, total, mask=inside_out)


@jit
def _nibble(word, shift: tl.constexpr, BF16: tl.constexpr):
    """e2m1 · 2⁻¹²⁶ in bf16, or · 2⁻¹⁴ in fp16, of the nibble that a left shift brings to the top of a uint16 word."""
    top = word << shift
    bits = (top & 0x8000) | ((top & 0x7000) >> (6 if BF16 else 3))
    return bits.to(tl.uint16).to(tl.bfloat16 if BF16 else tl.float16, bitcast=True)


def _assembly(down: int) -> str:
    """PTX: two words in $4, their nibbles from the lowest in $0 to $3; magnitudes move `down` bits."""
    lines = []
    for out in range(4):
        lines.append(f"shl.b32 t, $4, {12 - 4 * out}; and.b32 m, t, 0x70007000; shr.u32 m, m, {down};")
        lines.append(f"lop3.b32 ${out}, t, 0x80008000, m, 0xEA;")  # (t & 0x80008000) | m
    return "{ .reg .b32 t, m; " + " ".join(lines) + " }"


_BF16_NIBBLES, _FP16_NIBBLES = constant(_assembly(6)), constant(_assembly(3))


@jit
def _nibbles(words, BF16: tl.constexpr):
    """The four `_nibble` of uint16 words, two words a register, which Triton's own operators do one by one."""
    if BF16:
        return tl.inline_asm_elementwise(
            _BF16_NIBBLES, "=r,=r,=r,=r,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:  # noqa: RET505 - Triton compiles what follows a return too
        return tl.inline_asm_elementwise(
            _FP16_NIBBLES, "=r,=r,=r,=r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@jit
def _scaled_up(code, BF16: tl.constexpr):
    """e4m3 · 2¹¹⁹ in bf16, or · 2⁷ in fp16, of non-negative codes in uint8 that are 0 or ≥ 2⁻⁶."""
    wide = code.to(tl.uint16)
    if BF16:
        return tl.where(wide == 0, 0, (wide << 4) + ((127 - 7 + 119) << 7)).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 - see above
        return tl.where(wide == 0, 0, (wide << 7) + ((15 - 7 + 7) << 10)).to(tl.uint16).to(tl.float16, bitcast=True)


@jit
def _add_parts(partial_ptr, y_ptr, factor, count, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y = g · 2⁷ · Σ of the parts, in order."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(partial_ptr + part * count + places, mask=inside, other=0.0)
    tl.store(y_ptr + places, (total * factor).to(y_ptr.dtype.element_ty), mask=inside)
