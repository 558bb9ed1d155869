"""vLLM's NVFP4 layers by our kernels, without an engine: loading and products against the dequantised weight."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels.nvfp4 import Nvfp4Tensor, dequantize, global_scale_for, quantize

pytest.importorskip("vllm")


def loaded_layer(parts: list[Nvfp4Tensor]) -> torch.nn.Module:
    """A layer as vLLM's loader leaves it, of fused parts."""
    layer = torch.nn.Module()
    tensors = {
        "weight_packed": torch.cat([part.packed for part in parts]),
        "weight_scale": torch.cat([part.scale for part in parts]),
        "weight_global_scale": torch.stack([1 / part.global_scale for part in parts]),
    }
    for name, tensor in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return layer


def test_a_fused_layer_multiplies_by_the_weights_that_the_trainer_sees(caplog: pytest.LogCaptureFixture) -> None:
    from qerld_service.fp4_scheme import TiledNvfp4, _say_where_it_is_slow

    _say_where_it_is_slow.cache_clear()

    torch.manual_seed(0)
    weights = [torch.randn(rows, 64) for rows in (48, 16)]
    g = global_scale_for(weights)
    parts = [quantize(weight, global_scale=g) for weight in weights]
    layer, scheme = loaded_layer(parts), TiledNvfp4()
    scheme.process_weights_after_loading(layer)
    assert "needs a Hopper GPU" in caplog.text
    assert sum(tensor.nbytes for tensor in layer.parameters()) == 64 * 64 // 2 + 64 * 64 // 16 + 4, "one copy"
    whole = torch.cat([dequantize(part) for part in parts])
    x, bias = torch.randn(2, 3, 64).bfloat16(), torch.randn(64).bfloat16()
    wanted = x.float() @ whole.T
    for given, more in ((None, 0.0), (bias, bias.float())):
        found = scheme.apply_weights(layer, x, given)
        assert (found.shape, found.dtype) == ((2, 3, 64), torch.bfloat16)
        torch.testing.assert_close(found.float(), wanted + more, rtol=2e-2, atol=2e-2)
