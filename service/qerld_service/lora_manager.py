"""vLLM's LoRA manager with noise by slot, and with adapters that enter their slot beside the engine's loop.

vLLM's own `add_lora` reads, converts and copies an adapter between two steps: about 50 ms for SmolLM2 on a CPU, 200 ms
for 7B on an H200, in which no request gets a token. Here a thread does that, with rests, since it shares Python's lock
and perhaps the memory's bandwidth with the loop. It writes only rows of a slot that no request uses yet, noise
included; vLLM knows of the adapter when `finish_loading`, in the loop again, has entered it.

Runs inside vLLM's worker process; loaded by `vllm_plugin`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from qerld_kernels.noise import Noise
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from qerld_service.norms import NoiseSlots, find_noisy_norms
from qerld_service.resting import resting

__all__ = ["NoisyLoRAModelManager", "register_lora_manager"]


class NoisyLoRAModelManager(LRUCacheLoRAModelManager):  # type: ignore[misc]
    """All methods are called in the engine's loop; only `_fill` runs in the thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise_slots = NoiseSlots(
            find_noisy_norms(self.model),
            self.lora_slots,
            next(iter(self.punica_wrapper_mapping.values()))._token_lora_indices,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="qerld-load")
        self._loads: dict[int, Future[tuple[LoRAModel, float]]] = {}

    def start_loading(self, adapter_id: int, read: Callable[[], LoRAModel], noise: Noise | None) -> None:
        """Give the adapter a free slot, and fill it in the thread with what `read` returns and with the noise."""
        slot = self.lora_index_to_id.index(None)
        self.lora_index_to_id[slot] = adapter_id
        if noise is not None:
            self.noise_slots.register(adapter_id, noise)
        stream = _stream_after_this_one(self.device)
        self._loads[adapter_id] = self._thread.submit(self._fill, slot, adapter_id, read, stream)

    def finish_loading(self, adapter_id: int) -> float | None:
        """None while the thread works; then requests may use the adapter. Returns realised σ / intended σ.

        Raises what `read` raised; the adapter must then be unloaded, too.
        """
        load = self._loads[adapter_id]
        if not load.done():
            return None
        lora, share = load.result()
        self._registered_adapters[adapter_id] = lora
        self._active_adapters[adapter_id] = None
        return share

    def unload(self, adapter_id: int) -> bool:
        """Free the slot of an adapter, loaded or failed; False, and nothing done, while the thread works on it."""
        load = self._loads.get(adapter_id)
        if load is None:
            return True  # asked again, since another rank was still at work
        if not load.done():
            return False
        del self._loads[adapter_id]
        self.remove_adapter(adapter_id)
        self._deactivate_adapter(adapter_id)  # one that never became active holds its slot still
        self.noise_slots.forget(adapter_id)
        return True

    def activate_adapter(self, lora_id: int) -> bool:
        """As vLLM's, which calls it for its warm-up; True when the adapter was given a slot by this call."""
        activated = bool(super().activate_adapter(lora_id))
        if activated:
            self.noise_slots.write(self.lora_index_to_id.index(lora_id), lora_id)
        return activated

    def _fill(
        self, slot: int, adapter_id: int, read: Callable[[], LoRAModel], stream: torch.cuda.Stream | None
    ) -> tuple[LoRAModel, float]:
        with torch.no_grad(), _completed_on(stream), resting():
            lora = read()
            self._create_merged_loras_inplace(lora)
            for name, module in self.modules.items():
                weights = lora.get_lora(name)
                if weights is None:
                    module.reset_lora(slot)
                else:
                    module.set_lora(slot, weights.lora_a, weights.lora_b)
            self._refuse_infinite(slot)
            self.noise_slots.write(slot, adapter_id)
            share = self.noise_slots.realised_share(slot, adapter_id)
        return lora, share

    def _refuse_infinite(self, slot: int) -> None:
        """Finite values in the file can overflow when they are cast to the slots' dtype and B is scaled by alpha / r.

        In one kernel with the base product, 0 · ∞ would reach tokens of other adapters.
        """
        stacks = [
            stack
            for module in self.modules.values()
            for name in ("lora_a_stacked", "lora_b_stacked")
            for stack in getattr(module, name)
        ]
        if not torch.stack([torch.isfinite(stack[slot]).all() for stack in stacks]).all():
            raise ValueError(
                f"adapter: not finite once it is scaled by alpha / r and cast to {stacks[0].dtype}; lower lora_alpha"
            )


def _stream_after_this_one(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for the thread: kernels that are queued by now may still read the slot for the adapter before."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@contextlib.contextmanager
def _completed_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on the stream, of whose device a new thread knows nothing, and wait for what it queued."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


def register_lora_manager() -> None:
    """Replace vLLM's LoRA manager in this process."""
    LRUCacheWorkerLoRAManager._manager_cls = NoisyLoRAModelManager
