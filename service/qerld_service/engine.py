"""The policy engine: vLLM's AsyncLLM with immutable adapter instances, each with its own noise.

The only module of the server process that imports vLLM, and it does so at `PolicyEngine.start`: vLLM reads its
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
from pydantic import ValidationError
from qerld_kernels.checkpoint import CheckpointReader
from qerld_kernels.noise import Noise

from qerld_service.adapters import AdapterError, AdapterKey, Slot, SlotTable, check_adapter, linear_shapes
from qerld_service.engine_types import (
    LORA_RANKS,
    Delta,
    EngineConfig,
    EngineDiedError,
    EngineSettingsError,
    EngineStats,
    RequestError,
    Sampling,
)
from qerld_service.vllm_plugin import set_environment

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
        self._loading = asyncio.Lock()
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
        set_environment(on_cpu, config.cpu_kv_cache_gib)
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
            await asyncio.to_thread(check_adapter, folder, self._shapes, self._max_rank)
            async with self._loading:
                await self._add(slot, noise)
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
        with _engine_errors():
            await self._llm.remove_lora(slot.adapter_id)
            await self._llm.collective_rpc("qerld_forget_noise", args=(slot.adapter_id,))
        self._slots.free(slot)
        self._realised.pop(key, None)
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

    async def _add(self, slot: Slot, noise: Noise | None) -> None:
        try:
            with _engine_errors():
                if noise is not None:
                    args = (slot.adapter_id, noise.sigma, noise.seed, noise.relative)
                    await self._llm.collective_rpc("qerld_set_noise", args=args)
                await self._llm.add_lora(_lora_request(slot))
                shares = await self._llm.collective_rpc("qerld_realised_share", args=(slot.adapter_id,))
        except EngineDiedError:
            raise
        except Exception as error:  # vLLM's core wraps whatever the loader raised in a bare Exception
            await self._llm.collective_rpc("qerld_forget_noise", args=(slot.adapter_id,))
            raise AdapterError(f"{slot.key.name}: vLLM refused {slot.folder}: {error}") from error
        if noise is not None:
            self._realised[slot.key] = min(shares)

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


def import_vllm() -> None:
    """Import what `start_vllm` needs, in a call of its own.

    A module among those keeps an exception, and with it the frames of whoever imports it first. Were that `start_vllm`,
    its result would live until the interpreter has half ended, and vLLM's destructor would fail with a TypeError.
    """
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm  # noqa: F401


def start_vllm(config: EngineConfig, model: CheckpointReader, on_cpu: bool) -> AsyncLLM:
    """AsyncLLM with our settings; blocks. Without `set_environment` before it the norms are stock, without noise."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    dtype = config.dtype if config.dtype != "auto" else ("float32" if on_cpu else "bfloat16")
    positions = model.config.get("max_position_embeddings")
    limit = config.max_model_len + 1 if config.max_model_len is not None else None
    if limit is not None and isinstance(positions, int):
        limit = min(limit, positions)
    # A seeded request whose prompt is split makes vLLM rewind its generator, which the CPU's cannot: the engine dies.
    # Blocks of 32 tokens instead of 128: only full ones are shared between completions and prompts.
    cpu_arguments: dict[str, Any] = {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(2048, limit or positions or 0),
        "block_size": 32,
    }
    args = AsyncEngineArgs(
        model=str(config.model),
        dtype=dtype,
        seed=config.seed,
        max_model_len=limit,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=on_cpu if config.enforce_eager is None else config.enforce_eager,
        distributed_executor_backend="uni" if on_cpu else None,
        enable_lora=True,
        max_loras=config.max_loras,
        max_cpu_loras=config.max_cpu_loras or config.max_loras + 2,
        max_lora_rank=next(rank for rank in LORA_RANKS if rank >= config.max_lora_rank),
        # Without lm_head: vLLM's LoRA on the logits takes scored prompts for sampled tokens, and two of them at once
        # kill the engine (0.32 on the CPU). Adapters never have it.
        lora_target_modules=list(model.architecture.target_modules),
        worker_extension_cls="qerld_service.worker.NoiseWorkerExtension",
        enable_prefix_caching=True,
        **(cpu_arguments if on_cpu else {}),
        generation_config="vllm",  # the model's own sampling defaults would change the behaviour distribution
        logprobs_mode="processed_logprobs",  # the raw ones ignore temperature
    )
    try:
        return AsyncLLM.from_engine_args(args)
    except ValueError as error:  # pydantic's, too
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise EngineSettingsError(f"settings: vLLM refuses them or the model: {' '.join(problem.split())}") from error


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
