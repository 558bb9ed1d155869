"""What the policy engine may ask of vLLM's worker process, through `collective_rpc`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from qerld_kernels.noise import Noise

from qerld_service.vllm_plugin import register

__all__ = ["AdapterWorkerExtension"]


# vLLM imports this module in the worker before it loads the model. Its plugin loader has registered by then, unless
# qerld runs from a source folder that was never installed, or VLLM_PLUGINS leaves it out.
register()


class AdapterWorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); every name starts with qerld_ so that none collides.

    The calls run between two steps of the engine's loop and return at once; see `lora_manager`.
    """

    model_runner: Any

    def qerld_start_loading(
        self, adapter_id: int, name: str, folder: str, noise: tuple[float, int, bool, str] | None
    ) -> None:
        """Read a PEFT folder into a free slot; `noise`: the fields of `Noise`."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(lora_name=name, lora_int_id=adapter_id, lora_path=folder)
        read = partial(self.model_runner.lora_manager._load_adapter, request)
        self._qerld_manager().start_loading(adapter_id, read, Noise(*noise) if noise is not None else None)

    def qerld_finish_loading(self, adapter_id: int) -> float | None:
        """None while the adapter is being loaded, then realised σ / intended σ; raises what vLLM refuses it for."""
        share: float | None = self._qerld_manager().finish_loading(adapter_id)
        return share

    def qerld_unload(self, adapter_id: int) -> Literal[True] | None:
        """Free an adapter's slot; None, and nothing done, while it is being loaded."""
        return True if self._qerld_manager().unload(adapter_id) else None

    def _qerld_manager(self) -> Any:
        manager = self.model_runner.lora_manager._adapter_manager
        if not hasattr(manager, "noise_slots"):
            raise RuntimeError("vLLM runs without qerld's plugin: is the entry point `qerld` of the package installed?")
        return manager
