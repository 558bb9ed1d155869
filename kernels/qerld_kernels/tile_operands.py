"""Tiles of NVFP4 weights as left operands of `wgmma`, in Gluon: out of shared memory and into bf16 or fp16 registers.

A nibble's bits, where sign, exponent and mantissa of a bf16 (fp16) number are, are e2m1 · 2⁻¹²⁶ (2⁻¹⁴), subnormals
included; a scale's are e4m3 · 2⁻¹²⁰ (2⁻⁸), to which 239 (15) is added in the exponent. The product of both is W̃ · 2⁻⁷,
exact. `tiles.py` says where the bits are.
"""

from __future__ import annotations

from qerld_kernels.jit import constant, gl, gluon_jit

__all__ = ["decode", "fetch"]


def _decoding(bf16: bool) -> str:
    """PTX: two words in $4; their plane j times the scales of $(5 + 2 j) in $j."""
    if bf16:
        planes = """
            and.b32 $0, $4, 0x81C081C0;
            shl.b32 t, $4, 3; and.b32 $1, t, 0x81C081C0;
            shl.b32 t, $4, 6; and.b32 $2, t, 0x81C081C0;
            shr.u32 t, $4, 6; and.b32 m, t, 0x01800180;
            shl.b32 t, $4, 4; lop3.b32 m, t, 0x80008000, m, 0xEA;
            shr.u32 t, $4, 4; lop3.b32 $3, t, 0x00400040, m, 0xEA;"""
    else:
        planes = """
            shl.b32 t, $4, 3; and.b32 m, t, 0x0E000E00; lop3.b32 $0, $4, 0x80008000, m, 0xEA;
            shl.b32 u, $4, 6; and.b32 m, u, 0x0E000E00; lop3.b32 $1, t, 0x80008000, m, 0xEA;
            shl.b32 t, $4, 9; and.b32 m, t, 0x0E000E00; lop3.b32 $2, u, 0x80008000, m, 0xEA;
            shr.u32 t, $4, 3; and.b32 m, t, 0x0C000C00;
            shl.b32 t, $4, 4; lop3.b32 m, t, 0x80008000, m, 0xEA;
            shr.u32 t, $4, 1; lop3.b32 $3, t, 0x02000200, m, 0xEA;"""  # lop3 0xEA: (a & b) | c
    kind = "bf16x2" if bf16 else "f16x2"
    products = " ".join(f"mul.rn.{kind} ${plane}, ${plane}, ${5 + 2 * plane};" for plane in range(4))
    return f"{{ .reg .b32 t, u, m; {planes} {products} }}"


def _scaling(bf16: bool) -> str:
    """PTX: byte j of $4, an e4m3 number, as two bf16 or fp16 numbers times 2¹¹⁹ or 2⁷ in $j."""
    times, plus = ("0x00100010", "0x77807780") if bf16 else ("0x00800080", "0x3C003C00")
    planes = (f"prmt.b32 t, $4, 0, 0x444{plane}; mad.lo.u32 ${plane}, t, {times}, {plus};" for plane in range(4))
    return f"{{ .reg .b32 t; {' '.join(planes)} }}"


_DECODE_BF16, _DECODE_FP16 = constant(_decoding(True)), constant(_decoding(False))
_SCALE_BF16, _SCALE_FP16 = constant(_scaling(True)), constant(_scaling(False))
# Triton 3.6 has it under a private name.
_PUBLIC_REINTERPRET = constant(gl is not None and hasattr(gl.shared_memory_descriptor, "reinterpret"))
_DECODE_REGISTERS = constant("=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r")
_SCALE_REGISTERS = constant("=&r,=&r,=&r,=&r,r")


@gluon_jit
def fetch(words_ring, scale_ring, stage, GROUPS: gl.constexpr, CHUNK: gl.constexpr):
    """The words and scales of a step's tiles, each a tuple of `CHUNK`, in registers."""
    # A thread's eight words, or two scales, of a tile are side by side; four lanes hold the same scales.
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [4]] + ([] if CHUNK == 1 else [[1024]] if CHUNK == 2 else [[1024], [2048]]),
        [[8], [16], [32], [64], [128]],
        [[256], [512]] + ([] if GROUPS == 1 else [[1024 * CHUNK]] if GROUPS == 2 else [[1024 * CHUNK], [2048 * CHUNK]]),
        [], [1024 * GROUPS * CHUNK],
    )  # fmt: skip
    scale_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1]] + ([] if CHUNK == 1 else [[64]] if CHUNK == 2 else [[64], [128]]),
        [[0], [0], [2], [4], [8]],
        [[16], [32]] + ([] if GROUPS == 1 else [[64 * CHUNK]] if GROUPS == 2 else [[64 * CHUNK], [128 * CHUNK]]),
        [], [64 * GROUPS * CHUNK],
    )  # fmt: skip
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 16, 1)
    if _PUBLIC_REINTERPRET:
        words = words_ring.index(stage).reinterpret(gl.uint16, [1024 * GROUPS * CHUNK], flat)
    else:
        words = words_ring.index(stage)._reinterpret(gl.uint16, [1024 * GROUPS * CHUNK], flat)
    scales = scale_ring.index(stage).load(scale_layout)
    return _parts(words.load(words_layout), GROUPS, CHUNK), _parts(scales, GROUPS, CHUNK)


@gluon_jit
def _parts(values, GROUPS: gl.constexpr, CHUNK: gl.constexpr):
    """[GROUPS · CHUNK · n] as a tuple of CHUNK times [GROUPS · n]."""
    n: gl.constexpr = values.shape[0] // (GROUPS * CHUNK)
    if CHUNK == 1:
        return (values,)
    elif CHUNK == 2:  # noqa: RET505 - Gluon compiles what follows a return too
        a, b = gl.split(gl.permute(gl.reshape(values, [GROUPS, 2, n]), (0, 2, 1)))
        return (gl.reshape(a, [GROUPS * n]), gl.reshape(b, [GROUPS * n]))
    else:
        low, high = gl.split(gl.permute(gl.reshape(values, [GROUPS, 2, 2, n]), (0, 3, 2, 1)))
        a, b = gl.split(low)
        c, d = gl.split(high)
        return (
            gl.reshape(a, [GROUPS * n]), gl.reshape(b, [GROUPS * n]),
            gl.reshape(c, [GROUPS * n]), gl.reshape(d, [GROUPS * n]),
        )  # fmt: skip


@gluon_jit
def decode(words, scales, mma: gl.constexpr, BF16: gl.constexpr):
    """W̃ · 2⁻⁷ [outputs, 64] as a left operand. No value moves between threads: the layouts say so, and are checked."""
    dot: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    GROUPS: gl.constexpr = words.shape[0] // 1024
    words = gl.reshape(words, [GROUPS, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    words = gl.reshape(gl.permute(words, (0, 1, 2, 9, 3, 4, 5, 8, 6, 7, 10)), [64 * GROUPS, 16])
    words = gl.convert_layout(words, dot, assert_trivial=True)
    scales = gl.permute(gl.reshape(scales, [GROUPS, 2, 2, 2, 2, 2, 2]), (0, 1, 2, 6, 3, 4, 5))
    scales = gl.convert_layout(gl.reshape(scales, [64 * GROUPS]), gl.SliceLayout(1, dot), assert_trivial=True)
    s0, s1, s2, s3 = gl.inline_asm_elementwise(
        _SCALE_BF16 if BF16 else _SCALE_FP16, _SCALE_REGISTERS, [scales],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    operands = [words, gl.expand_dims(s0, 1), gl.expand_dims(s1, 1), gl.expand_dims(s2, 1), gl.expand_dims(s3, 1)]
    if BF16:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            _DECODE_BF16, _DECODE_REGISTERS, operands,
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            _DECODE_FP16, _DECODE_REGISTERS, operands,
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    planes = gl.join(gl.join(p0, p2), gl.join(p1, p3))  # [outputs, 16, plane // 2, plane % 2]
    weight = gl.reshape(gl.permute(planes, (0, 2, 3, 1)), [64 * GROUPS, 64])
    return gl.convert_layout(weight, dot, assert_trivial=True)
