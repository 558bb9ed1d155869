"""Check, by reading source and without importing it, that a vLLM has the names and signatures our modules use.

    python scripts/check_vllm_contract.py FOLDER_OR_WHEEL [...]     an installed `vllm` folder, or a wheel

Exit status 1 and one line a breach. docs/vllm.md names the modules that use them.
"""

from __future__ import annotations

import argparse
import ast
import zipfile
from collections.abc import Callable
from pathlib import Path

Reader = Callable[[str], str]

# file → class ("" for the module) → name → parameters that we pass or override, by name
CONTRACT: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "v1/engine/async_llm.py": {
        "AsyncLLM": {
            "from_engine_args": ("engine_args",),
            "generate": ("prompt", "sampling_params", "request_id", "lora_request"),
            "abort": ("request_id",),
            "collective_rpc": ("method", "args"),
            "check_health": (),
            "shutdown": (),
            "errored": (),
        }
    },
    "v1/engine/exceptions.py": {"": {"EngineDeadError": ()}},
    "lora/request.py": {"LoRARequest": {"lora_name": (), "lora_int_id": (), "lora_path": ()}},
    "sampling_params.py": {
        "": {"RequestOutputKind": ()},
        "SamplingParams": dict.fromkeys(
            ("n", "temperature", "max_tokens", "seed", "stop", "stop_token_ids", "logprobs", "prompt_logprobs",
             "output_kind", "detokenize"), ()
        ),
    },
    "outputs.py": {
        "CompletionOutput": dict.fromkeys(("index", "text", "token_ids", "logprobs", "finish_reason"), ()),
    },
    "engine/arg_utils.py": {
        "": {"AsyncEngineArgs": ()},
        "EngineArgs": dict.fromkeys(
            ("model", "dtype", "seed", "max_model_len", "max_num_seqs", "gpu_memory_utilization",
             "tensor_parallel_size", "enforce_eager", "distributed_executor_backend", "enable_lora", "max_loras",
             "max_cpu_loras", "max_lora_rank",
                "lora_target_modules", "worker_extension_cls", "enable_prefix_caching", "generation_config",
             "logprobs_mode", "additional_config"), ()
        ),
    },
    "lora/model_manager.py": {
        "LRUCacheLoRAModelManager": {"activate_adapter": ("lora_id",)},
        "LoRAModelManager": {
            "activate_adapter": ("lora_id",), "_deactivate_adapter": ("lora_id",), "remove_adapter": ("adapter_id",),
            "_create_merged_loras_inplace": ("lora_model",), "lora_slots": (), "lora_index_to_id": (),
            "punica_wrapper_mapping": (), "modules": (), "device": (), "_registered_adapters": (),
            "_active_adapters": (),
        },
    },
    "lora/lora_model.py": {"LoRAModel": {"get_lora": ("module_name",)}},
    "lora/layers/base.py": {
        "BaseLayerWithLoRA": {"set_lora": ("index", "lora_a", "lora_b"), "reset_lora": ("index",)}
    },
    "lora/worker_manager.py": {
        "WorkerLoRAManager": {"_adapter_manager": (), "_load_adapter": ("lora_request",)},
        "LRUCacheWorkerLoRAManager": {"_manager_cls": ()},
    },
    "model_executor/layers/vocab_parallel_embedding.py": {
        "UnquantizedEmbeddingMethod": {"apply": ("layer", "x", "bias")}
    },
    "lora/punica_wrapper/punica_cpu.py": {
        "PunicaWrapperCPU": {
            "add_lora_linear": ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
        }
    },
    "platforms/cpu.py": {"CpuPlatform": {"get_punica_wrapper": ()}},
    "lora/punica_wrapper/punica_gpu.py": {
        "PunicaWrapperGPU": {
            "add_lora_linear": ("y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices"),
            "token_mapping_meta": (),
        }
    },
    "lora/layers/base_linear.py": {"BaseLinearLayerWithLoRA": {"_apply_sync": ("x", "bias")}},
    "lora/ops/triton_ops/lora_kernel_metadata.py": {"LoRAKernelMeta": {"no_lora_flag_cpu": ()}},
    "platforms/cuda.py": {"CudaPlatformBase": {"get_punica_wrapper": ()}},
    "model_executor/layers/utils.py": {
        "": {"dispatch_cpu_unquantized_gemm": ("layer", "remove_weight"), "cpu_linear": ()}
    },
    "lora/punica_wrapper/punica_base.py": {
        "PunicaWrapperBase": {"_token_lora_indices": (), "token_lora_indices": (), "update_metadata": ()}
    },
    "v1/worker/lora_model_runner_mixin.py": {"LoRAModelRunnerMixin": {"lora_manager": ()}},
    "model_executor/custom_op.py": {"CustomOp": {"register_oot": ("name",)}},
    "model_executor/layers/layernorm.py": {
        name: {"forward_native": ("x", "residual"), "forward_cuda": ("x", "residual"), "weight": (),
               "variance_epsilon": ()}
        for name in ("RMSNorm", "GemmaRMSNorm")
    },
    "model_executor/layers/quantization/compressed_tensors/compressed_tensors.py": {
        "": {"CompressedTensorsW4A4Fp4": ()}
    },
    "model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py": {
        "CompressedTensorsW4A4Fp4": {
            "__init__": ("use_a16",),
            "create_weights": ("layer", "output_partition_sizes", "input_size_per_partition", "params_dtype",
                               "weight_loader"),
            "process_weights_after_loading": ("layer",),
            "apply_weights": ("layer", "x", "bias"),
        }
    },
    "model_executor/parameter.py": {
        "": dict.fromkeys(("GroupQuantScaleParameter", "ModelWeightParameter", "PerTensorScaleParameter"), ())
    },
}  # fmt: skip


def breaches(read: Reader) -> list[str]:
    """One line for each name or parameter of CONTRACT that the sources lack."""
    found = []
    for file, scopes in CONTRACT.items():
        try:
            tree = ast.parse(read(file))
        except (FileNotFoundError, KeyError):
            found.append(f"{file}: no such file")
            continue
        for scope, names in scopes.items():
            known = _names(tree, scope)
            for name, parameters in names.items():
                if name not in known:
                    found.append(f"{file}: {scope or 'module'} has no {name}")
                elif missing := set(parameters) - known[name]:
                    found.append(f"{file}: {scope or 'module'}.{name} has no parameter {', '.join(sorted(missing))}")
    return found


def _names(tree: ast.Module, scope: str) -> dict[str, set[str]]:
    """Names bound in a module, or in a class (self.x = … included), each with its parameters when a function."""
    body: ast.AST = tree
    if scope:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == scope]
        if not classes:
            return {}
        body = classes[0]
    names: dict[str, set[str]] = {}
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names[node.name] = {argument.arg for argument in arguments}
        elif isinstance(node, ast.ClassDef):
            names[node.name] = set()
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name: set() for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, set())
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.attr, set())
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            names.setdefault(node.target.attr, set())
    return names


def reader_of(path: Path) -> Reader:
    """Reads files below `vllm/` of an installed folder or of a wheel."""
    if path.is_dir():
        return lambda name: (path / name).read_text("utf-8")
    archive = zipfile.ZipFile(path)
    return lambda name: archive.read(f"vllm/{name}").decode()


def main() -> int:
    """Check every argument."""
    parser = argparse.ArgumentParser(description="Check that vLLM has the names and signatures that qerld uses.")
    parser.add_argument("source", nargs="+", type=Path, help="a wheel, or the installed folder vllm/")
    status = 0
    for argument in parser.parse_args().source:
        found = breaches(reader_of(argument))
        print(f"{argument}: {'ok' if not found else ''}")
        for line in found:
            print(f"  {line}")
        status |= bool(found)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
