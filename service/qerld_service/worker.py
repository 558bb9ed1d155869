"""What the policy engine may ask of vLLM's worker process, through `collective_rpc`."""

from __future__ import annotations

from typing import Any

from qerld_kernels.noise import Noise

from qerld_service.vllm_plugin import register

__all__ = ["NoiseWorkerExtension"]


# vLLM imports this module in the worker before it loads the model. Its plugin loader has registered by then, unless
# qerld runs from a source folder that was never installed, or VLLM_PLUGINS leaves it out.
register()


class NoiseWorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); every name starts with qerld_ so that none collides."""

    model_runner: Any

    def qerld_set_noise(self, adapter_id: int, sigma: float, seed: int, relative: bool) -> None:
        """Fix the noise of an adapter that is not added yet."""
        self._qerld_manager().noise_slots.register(adapter_id, Noise(sigma, seed, relative))

    def qerld_forget_noise(self, adapter_id: int) -> None:
        """Drop the noise of an adapter that was removed or could not be added."""
        self._qerld_manager().noise_slots.forget(adapter_id)

    def qerld_realised_share(self, adapter_id: int) -> float:
        """Realised σ / intended σ of an adapter that holds a slot."""
        manager = self._qerld_manager()
        return float(manager.noise_slots.realised_share(manager.lora_index_to_id.index(adapter_id), adapter_id))

    def _qerld_manager(self) -> Any:
        manager = self.model_runner.lora_manager._adapter_manager
        if not hasattr(manager, "noise_slots"):
            raise RuntimeError("vLLM runs without qerld's plugin: is the entry point `qerld` of the package installed?")
        return manager
