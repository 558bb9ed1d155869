"""The names and signatures of vLLM that our modules use exist in every release we claim; read from source."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from check_vllm_contract import CONTRACT, breaches, reader_of

ROOT = Path(__file__).parents[2]
RELEASES = ("0.25.1", "0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_the_installed_vllm_has_what_we_use() -> None:
    assert breaches(reader_of(installed())) == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("lora/punica_wrapper/punica_base.py", "_token_lora_indices", "_renamed"),
        ("lora/worker_manager.py", "_manager_cls", "_renamed"),
        ("v1/engine/async_llm.py", "lora_request", "renamed"),
        ("model_executor/layers/layernorm.py", "class RMSNorm(", "class Renamed("),
    ],
)
def test_a_renamed_attribute_is_found(file: str, old: str, new: str) -> None:
    read = reader_of(installed())
    assert breaches(lambda name: read(name).replace(old, new) if name == file else read(name))


def test_a_moved_file_is_found() -> None:
    read = reader_of(installed())
    gone = next(iter(CONTRACT))

    def without(name: str) -> str:
        if name == gone:
            raise FileNotFoundError(name)
        return read(name)

    assert breaches(without) == [f"{gone}: no such file"]


def imports_vllm(source: Path) -> bool:
    """Whether a file imports vLLM anywhere, also in its functions."""
    modules = []
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    return any(module.split(".")[0] == "vllm" for module in modules)


def test_vllm_is_imported_where_the_documentation_says() -> None:
    where = (ROOT / "docs" / "vllm.md").read_text("utf-8").split("##")[0]
    documented = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", where)}
    packages = ("service", "learner", "kernels", "clients")
    importing = {file.name for name in packages for file in (ROOT / name).rglob("*.py") if imports_vllm(file)}
    assert importing == documented


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_what_we_use(release: str, tmp_path: Path) -> None:
    """Downloads one wheel of about half a gigabyte, without its dependencies."""
    platforms = [f"--platform=manylinux{name}_x86_64" for name in ("_2_35", "_2_34", "_2_31", "_2_28", "2014", "1")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    where = ["--python-version=3.12", *platforms, "-d", str(tmp_path), f"vllm=={release}"]
    downloaded = subprocess.run([*command, *where], capture_output=True, text=True, check=False)
    if "No matching distribution" in downloaded.stderr:
        pytest.skip(f"vllm {release} is not offered by the package registry")
    assert downloaded.returncode == 0, downloaded.stderr
    [wheel] = tmp_path.glob("*.whl")
    found = breaches(reader_of(wheel))
    wheel.unlink()
    assert found == []
