"""TOML file < environment < flags, and errors that name the field."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest
from qerld_service import config, flags
from qerld_service.serve import ServeSettings, child_specs


def loaded(*argv: str) -> ServeSettings:
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, ServeSettings)
    return flags.load(ServeSettings, parser.parse_args(argv))


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "qerld.toml"
    file.write_text('model = "m"\nport = 1\nopenai_port = 1\nhost = "file"\n[policy]\nmax_loras = 4\n')
    monkeypatch.setenv("QERLD_SERVE_OPENAI_PORT", "2")
    monkeypatch.setenv("QERLD_SERVE_PORT", "2")
    settings = loaded("--config", str(file), "--port", "3")
    assert (settings.host, settings.openai_port, settings.port) == ("file", 2, 3)
    assert settings.policy == {"max_loras": 4}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "m", "--port", "x"], "port"),
        (["--model", "m", "--port", "70000"], "70000"),
        ([], "model: missing; give --model"),
        (["--model", "m", "--device", "tpu"], "device"),
    ],
)
def test_wrong_settings_name_the_field(argv: list[str], message: str) -> None:
    with pytest.raises(flags.SettingsError, match=message):
        loaded(*argv)


def test_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "qerld.toml"
    file.write_text('model = "m"\nprot = 1\n')
    with pytest.raises(flags.SettingsError, match="prot"):
        loaded("--config", str(file))


@pytest.mark.parametrize("content", [b"model = \n", b"\xff\xfe"])
def test_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "qerld.toml"
    file.write_bytes(content)
    with pytest.raises(flags.SettingsError, match=r"qerld\.toml"):
        loaded("--config", str(file))


def test_a_table_in_the_environment_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QERLD_SERVE_POLICY", "max_loras=4")
    with pytest.raises(flags.SettingsError, match=r'"policy".*must be a JSON object'):
        loaded("--model", "m")


def test_config_prints_toml_that_gives_the_same_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", 'a "quoted" \\ name', "--port", "7", "--policy", "max_loras=4"]
    assert config.main(["serve", *argv]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed)["policy"] == {"max_loras": "4"}
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    assert loaded("--config", str(file)).model_dump() == loaded(*argv).model_dump()


@pytest.mark.parametrize("role", config.ROLES)
def test_every_setting_is_described(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = config.settings_model(role)
    assert all(info.description for info in model.model_fields.values())
    assert config.main([role, "--describe"]) == 0
    table = capsys.readouterr().out
    assert all(f"| `{name}` |" in table for name in model.model_fields)


def test_passed_through_settings_become_flags_of_the_child(tmp_path: Path) -> None:
    settings = loaded("--model", "m", "--state-dir", str(tmp_path), "--learner", "keep_versions=3", "--port", "0")
    learner, policy = child_specs(settings)
    at = learner.command.index("--keep-versions")
    assert learner.command[at + 1] == "3"
    port = learner.command[learner.command.index("--port") + 1]
    assert policy.command[policy.command.index("--learner") + 1] == f"127.0.0.1:{port}"
