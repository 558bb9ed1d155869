"""A policy server that can never start says why in one line and ends with status 2, before the engine is loaded."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from qerld_kernels.exclusive import FolderLock
from qerld_service import policy

pytestmark = pytest.mark.engine


def refusal(model: Path, cache: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The one line on standard error."""
    ports = [flag for name in ("port", "openai-port", "metrics-port") for flag in (f"--{name}", "0")]
    arguments = ["--model", str(model), "--cache-dir", str(cache), "--dtype", "float32", *ports, *more]
    assert policy.main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("flag", ["port", "openai-port", "metrics-port"])
def test_a_taken_port(
    flag: str, tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(tiny_model[1], tmp_path, capsys, f"--{flag}", str(port))
    assert line == (
        f"qerld policy: {flag.replace('-', '_')}: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "give another, 0 takes a free one"
    )


def test_a_held_cache(tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FolderLock(tmp_path, "cache_dir", "qerld policy"):
        line = refusal(tiny_model[1], tmp_path, capsys)
    assert line.startswith(f"qerld policy: cache_dir: {tmp_path} is in use by qerld policy, process {os.getpid()};")


def test_a_cache_that_cannot_be_made(
    tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    line = refusal(tiny_model[1], tmp_path / "file" / "cache", capsys)
    assert line == f"qerld policy: cache_dir: {tmp_path}/file/cache: Not a directory; give another folder"


def test_a_setting_that_vllm_refuses(
    tiny_model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(tiny_model[1], tmp_path, capsys, "--max-num-seqs", "1000000")
    assert line.startswith("qerld policy: settings: vLLM refuses them or the model: ")
    assert "max_num_seqs (1000000)" in line
