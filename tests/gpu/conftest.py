"""The real model that the tests on a GPU share."""

from __future__ import annotations

from pathlib import Path

import pytest
from qerld_service.quickstart.model import ModelPackageError, prepare_smollm2


@pytest.fixture(scope="session")
def model_cache() -> Path:
    return Path(__file__).parents[2] / ".cache" / "models"


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> Path:
    """The model of the quickstart, from its cache or its package."""
    try:
        return prepare_smollm2(model_cache)
    except ModelPackageError as error:
        pytest.skip(f"no SmolLM2 here: {error}")
