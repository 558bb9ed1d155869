"""LoRA by our op inside vLLM's own layers and wrapper, on the CPU, where the op's reference runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from qerld_kernels.nvfp4 import quantize
from qerld_service.fp4_scheme import TiledNvfp4
from qerld_service.gpu_lora import SlotLora, fits, register_gpu_lora

pytest.importorskip("vllm")

HIDDEN, WIDTHS, RANK, MAX_LORAS, TOKENS = 64, (64, 32, 32), 8, 3, 6
LORA_IDS = {11: 0, 12: 1, 14: 2}  # adapter id → slot
WHERE_VLLM_LOOKS = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
Adapter = tuple[list[torch.Tensor], list[torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def vllm_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vLLM's parallel layers ask for: a configuration and a group of one process."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    meeting = tmp_path_factory.mktemp("group") / "file"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        parallel_state.init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The wrapper that vLLM finds by name on a GPU once ours is registered, with buffers on the CPU."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.utils.import_utils import resolve_obj_by_qualname

    monkeypatch.setattr(punica_gpu, "LoRAKernelMeta", LoRAKernelMeta, raising=False)  # imported with Triton only
    for where, name in ((punica_gpu, "PunicaWrapperGPU"), (BaseLinearLayerWithLoRA, "_apply_sync")):
        monkeypatch.setattr(where, name, getattr(where, name))  # put back afterwards
    register_gpu_lora()
    found = resolve_obj_by_qualname(WHERE_VLLM_LOOKS)
    made = found(32, 8, torch.device("cpu"), max_loras=MAX_LORAS, lora_config=lora_config())
    made._token_lora_indices.fill_(-1)  # as NoiseSlots does
    return made


def lora_config(**other: Any) -> Any:
    from vllm.config import LoRAConfig

    return LoRAConfig(max_loras=MAX_LORAS, max_cpu_loras=8, max_lora_rank=RANK, lora_dtype=torch.bfloat16, **other)


def qkv_layer(wrapper: Any) -> Any:
    """vLLM's fused q, k, v projection with LoRA on it."""
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import QKVParallelLinear

    base = QKVParallelLinear(HIDDEN, 32, 2, 1, bias=False, params_dtype=torch.bfloat16)
    return with_lora(MergedQKVParallelLinearWithLoRA(base), wrapper)


def gate_up_layer(wrapper: Any) -> Any:
    from vllm.lora.layers import MergedColumnParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    base = MergedColumnParallelLinear(HIDDEN, [96, 96], bias=False, params_dtype=torch.bfloat16)
    return with_lora(MergedColumnParallelLinearWithLoRA(base), wrapper)


def down_layer(wrapper: Any) -> Any:
    from vllm.lora.layers import RowParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import RowParallelLinear

    base = RowParallelLinear(HIDDEN, 48, bias=False, params_dtype=torch.bfloat16)
    return with_lora(RowParallelLinearWithLoRA(base), wrapper)


def tiled_layer(wrapper: Any) -> Any:
    """`gate_up_layer` with its weight as we serve NVFP4."""
    layer = gate_up_layer(wrapper)
    base, tensor = layer.base_layer, quantize(torch.randn(192, HIDDEN) / HIDDEN**0.5)
    for name, value in (("packed", tensor.packed), ("scale", tensor.scale), ("global_scale", 1 / tensor.global_scale)):
        base.register_parameter(f"weight_{name}", torch.nn.Parameter(value, requires_grad=False))
    base.scheme = TiledNvfp4()
    base.scheme.process_weights_after_loading(base)
    base.quant_method.apply = lambda layer, x, bias=None: layer.scheme.apply_weights(layer, x, bias)
    return layer


LAYERS = {
    "qkv": (qkv_layer, WIDTHS),
    "gate_up": (gate_up_layer, (96, 96)),
    "down": (down_layer, (48,)),
    "tiled": (tiled_layer, (96, 96)),
}


def with_lora(layer: Any, wrapper: Any) -> Any:
    torch.manual_seed(1)
    layer.base_layer.weight.data.normal_(std=HIDDEN**-0.5)
    layer.base_layer.quant_method.process_weights_after_loading(layer.base_layer)
    layer.create_lora_weights(MAX_LORAS, lora_config())
    layer.set_mapping(wrapper)
    return layer


def fill(layer: Any, widths: tuple[int, ...]) -> dict[int, Adapter]:
    """A random adapter in each slot, of half the slots' rank in one; returned by id."""
    adapters = {}
    for lora_id, slot in LORA_IDS.items():
        rank = RANK // 2 if slot == 1 else RANK
        a = [torch.randn(rank, HIDDEN) / HIDDEN**0.5 for _ in widths]
        b = [torch.randn(width, rank) for width in widths]
        layer.set_lora(slot, a if len(a) > 1 else a[0], b if len(b) > 1 else b[0])
        adapters[lora_id] = (a, b)
    return adapters


def set_batch(wrapper: Any, ids: list[int]) -> None:
    """As vLLM does when the adapters of a batch's tokens change; 0 is none."""
    from vllm.lora.layers import LoRAMapping

    slots: list[int | None] = [None] * MAX_LORAS
    for lora_id, slot in LORA_IDS.items():
        slots[slot] = lora_id
    wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids)), slots, MAX_LORAS + 1, 512)


def exact(base: torch.Tensor, x: torch.Tensor, adapters: dict[int, Adapter], ids: list[int]) -> torch.Tensor:
    y = base.double()
    for row, lora_id in enumerate(ids):
        if lora_id:
            parts = [
                b.bfloat16().double() @ (a.bfloat16().double() @ x[row].double())
                for a, b in zip(*adapters[lora_id], strict=True)
            ]
            y[row] += torch.cat(parts)
    return y


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ids", [[11, 12, 0, 14, 12, 11], [12] * 6, [0] * 6], ids=["mixed", "one", "none"])
def test_vllms_layers_add_each_tokens_adapter(name: str, ids: list[int], wrapper: Any) -> None:
    make, widths = LAYERS[name]
    layer = make(wrapper)
    adapters = fill(layer, widths)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    set_batch(wrapper, [0] * TOKENS)
    base = layer(x)[0]
    set_batch(wrapper, ids)
    found = layer(x)[0]
    assert (found.shape, found.dtype) == ((TOKENS, sum(widths)), torch.bfloat16)
    torch.testing.assert_close(found.double(), exact(base, x, adapters, ids), rtol=2e-2, atol=5e-2)
    for row, lora_id in enumerate(ids):
        assert torch.equal(found[row], base[row]) == (lora_id == 0)


def test_the_flag_that_no_token_has_an_adapter_is_obeyed(wrapper: Any) -> None:
    """The slots' buffer keeps what it held beyond and from before; the flag alone says that the batch has none."""
    layer = down_layer(wrapper)
    fill(layer, (48,))
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    set_batch(wrapper, [11] * TOKENS)
    with_adapter = layer(x)[0]
    wrapper.token_mapping_meta.no_lora_flag_cpu[0] = True
    assert torch.equal(layer(x)[0], layer.base_layer(x)[0])
    set_batch(wrapper, [11] * TOKENS)
    assert not wrapper.token_mapping_meta.no_lora_flag_cpu
    assert torch.equal(layer(x)[0], with_adapter)


def test_a_layer_of_ours_is_one_op(wrapper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tiled_layer(wrapper)
    fill(layer, (96, 96))
    set_batch(wrapper, [11] * TOKENS)
    monkeypatch.setattr(wrapper, "add_lora_linear", None)
    layer(torch.randn(TOKENS, HIDDEN).bfloat16())


@pytest.mark.parametrize("make", [gate_up_layer, tiled_layer])
def test_compiled_once_it_reads_slots_and_flag_at_each_call(make: Any, wrapper: Any) -> None:
    layer = make(wrapper)
    adapters = fill(layer, (96, 96))
    compiled = torch.compile(lambda x: layer(x)[0] * 1.0, fullgraph=True, dynamic=True, backend="aot_eager")
    for count, ids in ((6, [11, 12, 0, 14, 12, 11]), (6, [0] * 6), (4, [14, 14, 12, 0])):
        x = torch.randn(count, HIDDEN).bfloat16()
        set_batch(wrapper, [0] * count)
        base = layer(x)[0]
        set_batch(wrapper, ids)
        with torch.compiler.set_stance("fail_on_recompile" if count < 6 else "default"):
            found = compiled(x)
        torch.testing.assert_close(found.double(), exact(base, x, adapters, ids), rtol=2e-2, atol=5e-2)


def test_vllm_looks_where_ours_is_put() -> None:
    """Read, not imported: the module needs CUDA's libraries."""
    spec = find_spec("vllm.platforms")
    assert spec is not None
    assert spec.origin is not None
    assert f'return "{WHERE_VLLM_LOOKS}"' in Path(spec.origin).with_name("cuda.py").read_text("utf-8")


class Stock:
    """Notes what is left to vLLM."""

    _token_lora_indices = torch.zeros(1)

    def __init__(self, **_: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def add_lora_linear(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append((*args, kwargs))


class Both(SlotLora, Stock):
    pass


def tensors(pieces: int = 2, rank: int = 16, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """y, x, a, b of a layer."""
    a = tuple(torch.zeros(2, 1, rank, 32, dtype=dtype) for _ in range(pieces))
    b = tuple(torch.zeros(2, 1, 24, rank, dtype=dtype) for _ in range(pieces))
    return [torch.zeros(3, 24 * pieces, dtype=dtype), torch.zeros(3, 32, dtype=dtype), a, b]


REFUSED = {
    "fp32": (tensors(dtype=torch.float32), 1.0),
    "rank": (tensors(rank=256), 1.0),
    "pieces": (tensors(pieces=4), 1.0),
    "scale": (tensors(), 0.5),
    "adapters in another dtype": ([*tensors()[:2], *tensors(dtype=torch.float16)[2:]], 1.0),
    "wider outputs": ([torch.zeros(3, 50).bfloat16(), *tensors()[1:]], 1.0),
    "another rank in b": ([*tensors()[:3], tensors(rank=8)[3]], 1.0),
}


@pytest.mark.parametrize(("given", "scale"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_goes_to_vllm_whole(given: list[Any], scale: float) -> None:
    both = Both(lora_config=SimpleNamespace(max_lora_rank=16))
    slices = tuple(b.shape[2] for b in given[3])
    y, x, a, b = given
    assert scale != 1.0 or not fits(x, a, b, y.shape[1])
    both.add_lora_linear(*given, scale, slices, add_inputs=False)
    assert both.calls == [(*given, scale, slices, {"add_inputs": False})]


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [8, 128])
def test_what_fits(rank: int, dtype: torch.dtype, pieces: int) -> None:
    y, x, a, b = tensors(pieces, rank, dtype)
    assert fits(x, a, b, y.shape[1])


def test_too_large_a_rank_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    Both(lora_config=SimpleNamespace(max_lora_rank=128))
    assert not caplog.records
    Both(lora_config=SimpleNamespace(max_lora_rank=256))
    assert "ranks up to 128, and max_lora_rank makes slots of rank 256" in caplog.text
