"""The `qerld` command as a user meets it: real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from qerld_service import cli


def qerld(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qerld_service.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_is_instant_and_lists_every_command() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "qerld_service.cli", "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in finished.stderr.splitlines()}
    assert "argparse" in imported
    assert imported.isdisjoint({"torch", "vllm", "transformers", "grpc"})
    assert finished.returncode == 0
    for name, command in cli.COMMANDS.items():
        assert name in finished.stdout
        assert command.help in finished.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from qerld_service import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'grpc', 'pydantic', 'rich'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.endswith("[]\n")


@pytest.mark.parametrize("name", [name for name, command in cli.COMMANDS.items() if not command.process])
def test_each_command_has_a_help_text(name: str) -> None:
    finished = qerld(name, "--help")
    assert finished.returncode == 0, finished.stderr
    assert f"usage: qerld {name}" in finished.stdout


def test_unknown_command_names_the_known_ones() -> None:
    finished = qerld("serv")
    assert finished.returncode == 2
    assert "serve" in finished.stderr


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["learner"]) == 2
    assert "pip install 'qerld[learner]'" in capsys.readouterr().err
    assert cli.main(["policy"]) == 2
    assert "qerld[gpu]" in capsys.readouterr().err
