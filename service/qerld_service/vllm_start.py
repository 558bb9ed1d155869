"""How the policy engine starts vLLM: the arguments, each with its reason. vLLM is imported in the calls, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from qerld_kernels.checkpoint import CheckpointReader

from qerld_service.engine_types import LORA_RANKS, EngineConfig, EngineSettingsError
from qerld_service.vllm_plugin import traced_choices

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["engine_arguments", "import_vllm", "start_vllm"]


def import_vllm() -> None:
    """Import what `start_vllm` needs, in a call of its own.

    A module among those keeps an exception, and with it the frames of whoever imports it first. Were that `start_vllm`,
    its result would live until the interpreter has half ended, and vLLM's destructor would fail with a TypeError.
    """
    import vllm.engine.arg_utils
    import vllm.v1.engine.async_llm  # noqa: F401


def start_vllm(config: EngineConfig, model: CheckpointReader, on_cpu: bool) -> AsyncLLM:
    """AsyncLLM with our settings; blocks. Without `set_environment` before it the norms are stock, without noise."""
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        return AsyncLLM.from_engine_args(engine_arguments(config, model, on_cpu))
    except ValueError as error:  # pydantic's, too
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise EngineSettingsError(f"settings: vLLM refuses them or the model: {' '.join(problem.split())}") from error


def engine_arguments(config: EngineConfig, model: CheckpointReader, on_cpu: bool) -> AsyncEngineArgs:
    """vLLM's arguments for our settings, and for the kernels that `set_environment` has named."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from qerld_service.nf4_loader import LOAD_FORMAT, stock_vllm_serves_nf4

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
    traced = traced_choices()
    loading: dict[str, Any] = {}
    if model.layout == "bitsandbytes" and not stock_vllm_serves_nf4(on_cpu):
        loading = {"load_format": LOAD_FORMAT, "hf_overrides": {"quantization_config": None}}
    return AsyncEngineArgs(
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
        worker_extension_cls="qerld_service.worker.AdapterWorkerExtension",
        enable_prefix_caching=True,
        **(cpu_arguments if on_cpu else {}),
        **loading,
        generation_config="vllm",  # the model's own sampling defaults would change the behaviour distribution
        logprobs_mode="processed_logprobs",  # the raw ones ignore temperature
        additional_config={"qerld": traced} if traced else {},  # part of the key of vLLM's cache of compiled code
    )
