"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import os

__all__ = ["ENABLED", "register"]

ENABLED = "QERLD_VLLM_PLUGIN"
"""Environment variable that the policy engine sets: other uses of vLLM on the machine stay stock."""


def register() -> None:
    """Norms with noise by adapter slot, and on the CPU NVFP4 weights. May be called more than once a process."""
    global _registered
    if os.environ.get(ENABLED) != "1" or _registered:
        return
    from vllm.platforms import current_platform

    from qerld_service.norms import register_norms

    register_norms()
    if current_platform.is_cpu():
        from qerld_service.nvfp4_scheme import register_nvfp4

        register_nvfp4()
    _registered = True


_registered = False
