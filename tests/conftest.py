"""Fixtures that are expensive to make and safe to share: one tiny model and one running vLLM engine a session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from qerld_service.engine import PolicyEngine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(bf16 folder, NVFP4 folder) of a tiny random Llama with a tokenizer."""
    from support.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tiny_model: tuple[Path, Path]) -> AsyncIterator[PolicyEngine]:
    """A running engine on the NVFP4 tiny model with 6 slots. Unload what you load."""
    from qerld_service.engine import EngineConfig, PolicyEngine

    started = await PolicyEngine.start(
        EngineConfig(model=tiny_model[1], dtype="float32", max_loras=6, max_lora_rank=8, max_model_len=256)
    )
    yield started
    await started.stop()
