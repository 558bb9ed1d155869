"""The `vllm.general_plugins` entry point: vLLM calls `register` in each of its processes; and vLLM's environment."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["LORA_KERNEL", "NVFP4_KERNEL", "PARENT", "TRACED", "register", "set_environment", "traced_choices"]

PARENT = "QERLD_ENGINE_PARENT"
"""Environment variable in which the policy engine puts its process id; without it vLLM stays stock."""

NVFP4_KERNEL = "QERLD_NVFP4_KERNEL"
"""Environment variable that tells vLLM's processes what multiplies by NVFP4 weights on a GPU."""

LORA_KERNEL = "QERLD_LORA_KERNEL"
"""Environment variable that tells vLLM's processes what adds LoRA on a GPU."""

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # A forked core would inherit gRPC's threads and locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_ON_CPU = {
    # Without these a tiny model takes 46 s for its first request and three processes instead of two; see docs/vllm.md.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
TRACED = (
    "qerld_service.norms",
    "qerld_service.logits",
    "qerld_service.fp4_scheme",
    "qerld_service.gpu_lora",
    "qerld_kernels.rmsnorm",
    "qerld_kernels.matmul",
    "qerld_kernels.lora",
)
"""What torch.compile sees of ours within vLLM: called there, or an op."""


def set_environment(on_cpu: bool, cpu_kv_cache_gib: int, nvfp4_kernel: str, lora_kernel: str) -> None:
    """vLLM's settings for the policy engine, before vLLM is imported; what the user has set stays."""
    os.environ[PARENT] = str(os.getpid())
    os.environ[NVFP4_KERNEL], os.environ[LORA_KERNEL] = nvfp4_kernel, lora_kernel
    settings = dict(_ALWAYS)
    if on_cpu:
        settings |= _ON_CPU | {"VLLM_CPU_KVCACHE_SPACE": str(cpu_kv_cache_gib)}
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def traced_choices(modules: Sequence[str] = TRACED) -> dict[str, str]:
    """What `register` changes in the code that vLLM compiles; empty where vLLM stays stock.

    For the key of vLLM's cache of compiled code, which else does not know of us: a graph that stock vLLM left there,
    or another choice of kernels, would be loaded and served, without noise or with the other kernels, and no error.
    """
    if PARENT not in os.environ:
        return {}
    code = hashlib.sha256()
    for module in modules:
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        code.update(Path(spec.origin).read_bytes())
    choices = {name: os.environ.get(name, "") for name in (NVFP4_KERNEL, LORA_KERNEL)}
    return choices | {"code": code.hexdigest()}


@cache
def register() -> None:
    """Norms with noise by adapter slot, NVFP4 weights and LoRA, an engine core that ends with its parent.

    Called more than once a process: by vLLM's plugin loader and by `qerld_service.worker`.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if os.getppid() == int(parent):
        threading.Thread(target=_end_with, args=(int(parent),), name="qerld-parent", daemon=True).start()
    from vllm.platforms import current_platform

    from qerld_service.lora_manager import register_lora_manager
    from qerld_service.nf4_loader import register_nf4_loader
    from qerld_service.norms import register_norms

    register_norms()
    register_lora_manager()
    register_nf4_loader()
    if current_platform.is_cuda():
        from qerld_service.logits import register_fp32_logits

        register_fp32_logits()
        if os.environ.get(NVFP4_KERNEL) == "qerld":
            from qerld_service.fp4_scheme import register_tiled_nvfp4

            register_tiled_nvfp4()
        if os.environ.get(LORA_KERNEL) == "qerld":
            from qerld_service.gpu_lora import register_gpu_lora

            register_gpu_lora()
    if current_platform.is_cpu():
        from qerld_service.cpu_lora import register_cpu_lora
        from qerld_service.fp4_scheme import register_fp4

        register_fp4()
        register_cpu_lora()


def _end_with(parent: int) -> None:
    """vLLM's engine core outlives a killed parent (seen with 0.32) and would hold the accelerator's memory."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
