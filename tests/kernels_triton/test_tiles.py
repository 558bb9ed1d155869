"""The tiled layout against the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from qerld_kernels.dequantize import dequantize_reference
from qerld_kernels.nvfp4 import unpack
from qerld_kernels.tiles import Tiles, dequantize_tiles, dequantize_tiles_reference, tile, untile
from torch import Tensor

SHAPES = [(64, 64), (100, 80), (130, 576), (3, 16)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weight(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Packed bytes and scales, every tenth of which is zero."""
    packed = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    codes = torch.randint(0x08, 0x7F, (outputs, inputs // 16), dtype=torch.uint8)
    codes[torch.rand(codes.shape) < 0.1] = 0
    return packed, codes.view(torch.float8_e4m3fn)


def on(device: str, tiles: Tiles) -> Tiles:
    return Tiles(tiles.words.to(device), tiles.scale.to(device))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiling_loses_nothing_and_pads_with_zeros(shape: tuple[int, int]) -> None:
    packed, scale = weight(*shape)
    codes, scales = untile(tile(packed, scale))
    live = (scale.float() > 0).repeat_interleave(16, 1)
    wanted = torch.stack([packed & 15, packed >> 4], -1).view(shape)
    assert torch.equal(codes[: shape[0], : shape[1]], torch.where(live, wanted, 0))
    assert torch.equal(scales[: shape[0], : shape[1] // 16].float(), scale.float())
    assert codes[shape[0] :].count_nonzero() == codes[:, shape[1] :].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantised_exactly(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    packed, scale = weight(*shape)
    wanted = dequantize_reference(packed, scale, dtype=torch.float32).to(dtype)
    tiles = tile(packed, scale)
    assert torch.equal(dequantize_tiles_reference(tiles, *shape, dtype), wanted)
    assert torch.equal(dequantize_tiles(on(device, tiles), *shape, dtype).cpu(), wanted)


def test_every_code_and_scale(device: str) -> None:
    """But those below 2⁻⁶, which the format's rules exclude, and NaN."""
    scale = torch.tensor([0, *range(0x08, 0x7F)], dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    packed = torch.arange(0, 256, 34, dtype=torch.uint8).repeat(len(scale), 1) | 0x10  # codes 0, 2, … and 1, 3, …
    assert set(unpack(packed[:1], dtype=torch.float32).flatten().tolist()) == {
        sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    }
    found = dequantize_tiles(on(device, tile(packed, scale)), len(scale), 16, torch.float32).cpu()
    assert torch.equal(found, dequantize_reference(packed, scale, dtype=torch.float32))


REFUSED: list[tuple[str, Callable[[Tiles], Tiles]]] = [
    (r"words: must be contiguous torch.int64 \[2, 1, 256\]", lambda t: Tiles(t.words[:1], t.scale)),
    (r"words: must be contiguous torch.int64", lambda t: Tiles(t.words.view(torch.float64), t.scale)),
    (r"words: .* strides", lambda t: Tiles(t.words.transpose(0, 2).contiguous().transpose(0, 2), t.scale)),
    (r"scale: must be contiguous torch.int32 \[2, 1, 64\]", lambda t: Tiles(t.words, t.scale[..., :32])),
]


@pytest.mark.parametrize(("message", "spoil"), REFUSED)
def test_what_does_not_fit_is_refused(message: str, spoil: Callable[[Tiles], Tiles]) -> None:
    with pytest.raises(ValueError, match=message):
        dequantize_tiles(spoil(tile(*weight(70, 48))), 70, 48)
