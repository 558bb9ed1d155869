"""Compile the fused product for Hopper as far as PTX, without a GPU.

Prints how many `wgmma` and waits for the kernel before each variant has, without LoRA and with.
"""

from __future__ import annotations

from typing import Any

from qerld_kernels.fused_product import _LOADER_REGISTERS, Plan, _kernel
from qerld_kernels.matmul import plan
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

TARGET = GPUTarget("cuda", 90, 32)


def ptx(chosen: Plan, dtype: str, pieces: int) -> str:
    """With LoRA of so many pieces. The steps of `triton.compile` before ptxas, which not every Triton brings along."""
    chunk = chosen.inputs // 64
    swizzled, wide, narrow = (gl.NVMMASharedLayout(*a) for a in ((128, 16, 2), (0, 64, 1), (0, 32, 1)))
    signature: dict[str, str] = dict.fromkeys(_kernel.arg_names, "constexpr")
    signature |= dict.fromkeys(
        ("tokens", "inputs", "outputs", "columns", "token_tiles", "part", "parts", "begin1", "begin2", "loras"), "i32"
    )
    signature |= dict.fromkeys(("slice_count", "splits", "slice_steps", "with_slices", "their_parts"), "i32")
    adapters = [f"{matrix}{piece}_ptr" for matrix in "ab" for piece in range(3)]
    signature |= dict.fromkeys(("y_ptr", "low_ptr", *adapters), f"*{dtype}")
    signature |= {"slots_ptr": "*i64", "counters_ptr": "*i32"}
    signature |= dict.fromkeys(("pieces_ptr", "sums_ptr"), "*fp32") | {"factor": "fp32"}
    signature |= dict.fromkeys(("x_desc", "low_desc"), f"tensordesc<{dtype}[{chosen.tokens}, 64],{swizzled!r}>")
    signature["words_desc"] = f"tensordesc<i64[{chunk * 256}],{wide!r}>"
    signature["scale_desc"] = f"tensordesc<i32[{chunk * 64}],{narrow!r}>"
    constants = {
        "PIECES": pieces,
        "RANK": 32 if pieces else 0,
        "LOW_STEPS": -(-pieces * 32 // 64),
        "GROUPS": chosen.groups,
        "TOKENS": chosen.tokens,
        "CHUNK": chunk,
        "STAGES": chosen.stages,
        "LOADER_REGISTERS": _LOADER_REGISTERS,
    }
    places = {(_kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(_kernel, signature, places, {})
    backend = make_backend(TARGET)
    options = backend.parse_options(
        {"num_warps": 4 * chosen.groups, "maxnreg": chosen.registers, "ptx_version": 86, **source.parse_options()}
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module: Any = source.make_ir(TARGET, options, functions, modules, context)
    metadata = {"target": TARGET, **options.__dict__}
    for name, stage in stages.items():
        if name == "cubin":
            break
        module = stage(module, metadata)
    return str(module)


if __name__ == "__main__":
    for tokens in (16, 256):
        for dtype in ("bf16", "fp16"):
            chosen = plan(tokens, 4096, 4096)
            assert chosen is not None
            made = [ptx(chosen, dtype, pieces) for pieces in (0, 3)]
            counts = [code.count(what) for code in made for what in ("wgmma.mma_async", "griddepcontrol.wait")]
            print(tokens, dtype, *counts)
