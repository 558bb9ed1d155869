"""Adapter folders without a learner: what the disk refuses is a failed download, not the server's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from qerld_kernels.noise import Noise
from qerld_service.desired import DesiredAdapter
from qerld_service.downloads import AdapterFolders, DownloadError


async def test_a_folder_that_cannot_be_made_is_a_failed_download(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path, 1.0, lambda _count: None)
    adapter = DesiredAdapter("../run", 1, "a" * 64, Noise(0.0, 0), live=True)
    assert folders.path(adapter).parent == tmp_path
    folders.path(adapter).write_text("in the way")
    stub: Any = None
    with pytest.raises(DownloadError, match="free space or set cache_dir"):
        await folders.fetch(stub, adapter)
    folders.close()
