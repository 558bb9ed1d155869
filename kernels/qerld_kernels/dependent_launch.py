"""Programmatic dependent launch (CUDA C++ Programming Guide, 4.5): a kernel that starts before the one before it ended.

Launch it with `launch_pdl=True`, and let every program that reads what earlier kernels wrote, or writes what they may
still read, wait first. Under the interpreter there is nothing to wait for, and no such instruction: call these only
where a compile-time argument says that it is compiled.
"""

from __future__ import annotations

import torch

from qerld_kernels.jit import INTERPRETED, compute_capability, constant, gl, gluon_jit, jit, tl

__all__ = ["can_depend", "gluon_wait_for_the_kernel_before", "let_the_next_kernel_start", "wait_for_the_kernel_before"]


def can_depend(device: torch.device) -> bool:
    """Whether the GPU has it: Hopper and later."""
    return not INTERPRETED and device.type == "cuda" and compute_capability(device) >= 9


_WAIT = constant("griddepcontrol.wait; mov.u32 $0, 0;")


@jit
def wait_for_the_kernel_before():
    """For its end and all that it wrote; at once when that has been."""
    tl.inline_asm_elementwise(_WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@gluon_jit
def gluon_wait_for_the_kernel_before():
    """The same, to be called from Gluon."""
    gl.inline_asm_elementwise(_WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@jit
def let_the_next_kernel_start():
    """Once every program of this one is here."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
