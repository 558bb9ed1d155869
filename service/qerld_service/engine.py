"""The policy engine: vLLM's AsyncLLM with immutable adapter instances, each with its own noise.

Of the server process only this module and `vllm_start` import vLLM, and not before `PolicyEngine.start`: vLLM reads its
environment variables when imported. The engine core is a child process.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.noise import Noise

from qerld_service.adapters import AdapterError, AdapterKey, Slot, SlotTable, check_adapter, linear_shapes
from qerld_service.engine_types import (
    Delta,
    EngineConfig,
    EngineDiedError,
    EngineSettingsError,
    EngineStats,
    RequestError,
    Sampling,
)
from qerld_service.resting import resting
from qerld_service.vllm_plugin import set_environment
from qerld_service.vllm_start import import_vllm, start_vllm

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = [
    "Delta",
    "EngineConfig",
    "EngineDiedError",
    "EngineSettingsError",
    "EngineStats",
    "PolicyEngine",
    "RequestError",
    "Sampling",
]

_POLL_SECONDS = 0.01  # an answer costs the engine's loop a fraction of a millisecond


class PolicyEngine:
    """Made by `start`; belongs to the event loop that started it."""

    def __init__(self, llm: AsyncLLM, config: EngineConfig, model: CheckpointReader) -> None:
        self._llm = llm
        self._vocab_size = int(llm.model_config.get_vocab_size())
        self._max_len = int(llm.model_config.max_model_len) - 1
        self._max_rank = config.max_lora_rank
        self._shapes = linear_shapes(model)
        self._slots = SlotTable(config.max_loras)
        self._realised: dict[AdapterKey, float] = {}
        # Only on the CPU, where computing a prompt takes longer than a round trip to the engine.
        self._share_prompts = not torch.cuda.is_available()
        self._prompts: dict[AdapterKey, asyncio.Lock] = {}

    @classmethod
    async def start(cls, config: EngineConfig) -> PolicyEngine:
        """Load the model; about 20 s for a tiny one on a CPU, 2 min for 7B on a GPU (compilation, CUDA graphs).

        Raises:
            CheckpointError: the model folder is broken or of an unknown architecture.
            EngineSettingsError: vLLM refuses the model or a setting.
            RuntimeError: vLLM could not start; its log says why.
        """
        model = CheckpointReader(config.model)
        on_cpu = not torch.cuda.is_available()
        set_environment(on_cpu, config.cpu_kv_cache_gib, config.nvfp4_kernel, config.lora_kernel)
        # In threads, so that health checks of this process are answered meanwhile.
        await asyncio.to_thread(import_vllm)
        llm = await asyncio.to_thread(start_vllm, config, model, on_cpu)
        return cls(llm, config, model)

    @property
    def errored(self) -> bool:
        """The engine process has died."""
        return bool(self._llm.errored)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and completion; one less than vLLM's own limit, so that every completion can be scored."""
        return self._max_len

    @property
    def loaded(self) -> frozenset[AdapterKey]:
        """Adapters that accept requests."""
        return self._slots.loaded

    @property
    def stats(self) -> EngineStats:
        """Numbers for metrics; costs nothing."""
        return EngineStats(self._slots.capacity, self._slots.in_flight, dict(self._realised))

    @property
    def core_pids(self) -> list[int]:
        """Process ids of vLLM's engine core."""
        manager = self._llm.engine_core.resources.engine_manager
        return [process.pid for process in manager.processes]

    async def load(self, key: AdapterKey, folder: Path, noise: Noise | None) -> float:
        """Load a PEFT folder under `key`, its noise fixed; returns seconds. Running requests are not disturbed.

        The folder is read once and must stay as it is until the adapter is unloaded.

        Raises:
            AdapterError: a bad adapter, one already loaded, or noise on a clean key; the engine stays usable.
            SlotsFullError: all max_loras slots are in use.
        """
        if noise is not None and not key.noisy:
            raise AdapterError(f"{key.name}: a clean instance cannot carry noise; use AdapterKey(…, noisy=True)")
        started = time.monotonic()
        slot = self._slots.reserve(key, folder)
        try:
            await asyncio.to_thread(resting()(check_adapter), folder, self._shapes, self._max_rank)
            self._realised[key] = await self._add(slot, noise)
        except BaseException:
            self._slots.free(slot)
            raise
        slot.loaded = True
        return time.monotonic() - started

    async def unload(self, key: AdapterKey) -> None:
        """Refuse new requests on `key`, wait for the running ones (never aborted), and free its slot.

        Raises:
            AdapterNotLoadedError: no such adapter is loaded.
        """
        slot = await self._slots.drain(key)
        try:
            await self._remove(slot)
        finally:
            self._slots.free(slot)
            self._realised.pop(key)
            self._prompts.pop(key, None)

    async def generate(
        self, key: AdapterKey, request_id: str, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Delta, None]:
        """Sample `sampling.n` completions of one prompt; closing the iterator aborts them.

        max_tokens is cut to what fits into `max_model_len`; the finish reason is then "length".

        Raises:
            AdapterNotLoadedError: the adapter is not loaded.
            RequestError: a prompt that is empty, too long or out of the vocabulary, or bad sampling.
            EngineDiedError: the engine died, also amid the stream.
        """
        params = self._sampling_params(prompt_ids, sampling)
        async with self._request(key) as slot:
            if self._share_prompts and sampling.n > 1:
                await self._compute_prompt(slot, request_id, prompt_ids)
            stream = self._llm.generate(_prompt(prompt_ids, slot), params, request_id, lora_request=_lora_request(slot))
            with _engine_errors():
                async with contextlib.aclosing(stream):
                    async for output in stream:
                        for completion in output.outputs:
                            yield _delta(completion)

    async def _compute_prompt(self, slot: Slot, request_id: str, prompt_ids: Sequence[int]) -> None:
        """Put a prompt into the prefix cache before its completions start; what prompts share is computed once, too.

        Completions that start in one step would each compute the prompt: vLLM shares only blocks that are there.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, detokenize=False)
        async with self._prompts.setdefault(slot.key, asyncio.Lock()):
            stream = self._llm.generate(
                _prompt(prompt_ids, slot), params, f"{request_id}-prompt", lora_request=_lora_request(slot)
            )
            with _engine_errors():
                async with contextlib.aclosing(stream):
                    async for _ in stream:
                        pass

    async def score(self, key: AdapterKey, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        """Log-probability of each completion token after those before it, at temperature 1.

        Raises:
            AdapterNotLoadedError, RequestError, EngineDiedError: as `generate`.
        """
        from vllm import SamplingParams

        self._check_ids(prompt_ids, len(completion_ids))
        ids = [*prompt_ids, *completion_ids]
        self._check_ids(ids, 0)
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        async with self._request(key) as slot:
            stream = self._llm.generate(
                _prompt(ids, slot), params, f"score-{uuid.uuid4().hex}", lora_request=_lora_request(slot)
            )
            with _engine_errors():
                async with contextlib.aclosing(stream):
                    async for output in stream:
                        logprobs = output.prompt_logprobs
        return [_logprob(logprobs[at], ids[at]) for at in range(len(prompt_ids), len(ids))]

    async def abort(self, request_id: str) -> None:
        """End a running request; its stream finishes with the reason "abort". Unknown ids are ignored."""
        with _engine_errors():
            await self._llm.abort(request_id)

    async def check_health(self) -> None:
        """Raises EngineDiedError when the engine process has died."""
        with _engine_errors():
            await self._llm.check_health()

    async def stop(self) -> None:
        """End the engine process; open requests end with EngineDiedError."""
        if not any(self._slots.in_flight.values()) and self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # else it logs the engine's end as an error
        await asyncio.to_thread(self._llm.shutdown)

    async def _add(self, slot: Slot, noise: Noise | None) -> float:
        """Load into the workers' slots; returns realised σ / intended σ. Nothing is left of it when it fails."""
        try:
            values = (noise.sigma, noise.seed, noise.relative, noise.dtype) if noise is not None else None
            await self._ask("qerld_start_loading", slot.adapter_id, slot.name, str(slot.folder), values)
            shares = await self._poll("qerld_finish_loading", slot.adapter_id)
        except EngineDiedError:
            raise
        except asyncio.CancelledError:
            await self._remove(slot)
            raise
        except Exception as error:  # vLLM's core wraps whatever the loader raised in a bare Exception
            await self._remove(slot)
            raise AdapterError(f"{slot.key.name}: vLLM refused {slot.folder}: {error}") from error
        return float(min(shares))

    async def _remove(self, slot: Slot) -> None:
        await self._poll("qerld_unload", slot.adapter_id)

    async def _poll(self, method: str, adapter_id: int) -> list[Any]:
        """Ask until no worker answers None, which says that its thread works on the adapter."""
        while None in (answers := await self._ask(method, adapter_id)):  # noqa: ASYNC110 they have no event to set
            await asyncio.sleep(_POLL_SECONDS)
        return answers

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        """The answers of all workers, given between two steps of the engine."""
        with _engine_errors():
            return list(await self._llm.collective_rpc(method, args=args))

    @contextlib.asynccontextmanager
    async def _request(self, key: AdapterKey) -> AsyncIterator[Slot]:
        slot = self._slots.acquire(key)
        try:
            yield slot
        finally:
            await self._slots.release(slot)

    def _sampling_params(self, prompt_ids: Sequence[int], sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._check_ids(prompt_ids, 1)
        _check_sampling(sampling)
        return SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            max_tokens=min(sampling.max_tokens, self._max_len - len(prompt_ids)),
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            stop=list(sampling.stop),
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )

    def _check_ids(self, ids: Sequence[int], more: int) -> None:
        if not 1 <= len(ids) <= self._max_len - more:
            raise RequestError(f"prompt_ids: must have from 1 to {self._max_len - more} tokens, got {len(ids)}")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            bad = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise RequestError(f"prompt_ids: must be from 0 to {self._vocab_size - 1}, got {bad}")


def _check_sampling(sampling: Sampling) -> None:
    if sampling.n < 1 or sampling.max_tokens < 1:
        raise RequestError(
            f"sampling: n and max_tokens must be at least 1, got n = {sampling.n}, max_tokens = {sampling.max_tokens}"
        )
    if not sampling.temperature >= 0 or (sampling.temperature == 0 and sampling.n > 1):
        raise RequestError(
            f"sampling.temperature: must be at least 0, and 0 (greedy) needs n = 1, got {sampling.temperature} "
            f"with n = {sampling.n}"
        )


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """vLLM's EngineDeadError as ours."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError("vLLM's engine process has died; its log says why. Start the engine again") from error


def _prompt(ids: Sequence[int], slot: Slot) -> Any:
    return {"prompt_token_ids": list(ids), "cache_salt": slot.name}


def _lora_request(slot: Slot) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=slot.name, lora_int_id=slot.adapter_id, lora_path=str(slot.folder))


def _delta(completion: Any) -> Delta:
    ids = list(completion.token_ids)
    logprobs = [_logprob(entry, token) for entry, token in zip(completion.logprobs or [], ids, strict=True)]
    return Delta(completion.index, ids, logprobs, completion.finish_reason, completion.text)


def _logprob(entry: Any, token: int) -> float:
    return float(entry[token].logprob)
