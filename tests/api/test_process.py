"""`python -m qerld_learner`: help, settings and their errors, ready file, SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from qerld_client import Client
from qerld_learner.settings import LearnerSettings, SettingsError


def learner(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qerld_learner", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_describes_every_setting() -> None:
    text = " ".join(learner("--help").stdout.split())
    for name, info in LearnerSettings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert info.description
        assert " ".join(info.description.split())[:40] in text


def test_file_then_environment_then_flags(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "learner.toml"
    file.write_text(f'model = "{tiny_model[1]}"\nport = 1\nlease = 2.0\nreflection = true\n')
    shown = learner("--config", str(file), "--print-config", "--lease", "4", QERLD_LEARNER_PORT="3")
    settings = json.loads(shown.stdout)
    assert (settings["port"], settings["lease"], settings["reflection"]) == (3, 4.0, True)


@pytest.mark.parametrize(
    ("flags", "environment", "text"),
    [
        ((), {}, "model: missing; give --model or QERLD_LEARNER_MODEL"),
        (("--port", "70000"), {}, "less than or equal to 65535 (got '70000')"),
        (("--replica-timeout", "5"), {}, "greater than 10"),
        (("--config", "nowhere.toml"), {}, "--config nowhere.toml"),
        ((), {"QERLD_LEARNER_PROT": "1"}, "unknown environment variables QERLD_LEARNER_PROT"),
    ],
)
def test_wrong_settings_end_with_status_2(flags: tuple[str, ...], environment: dict[str, str], text: str) -> None:
    done = learner(*flags, **environment)
    assert done.returncode == 2
    assert text in done.stderr


def test_an_unknown_setting_in_the_file_is_refused(tiny_model: tuple[Path, Path]) -> None:
    with pytest.raises(SettingsError, match="prot: Extra inputs"):
        LearnerSettings.layered({"model": str(tiny_model[1]), "prot": 1}, {})


def test_a_learner_serves_until_sigterm(tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "qerld_learner", "--model", str(tiny_model[1]), "--state-dir", str(tmp_path / "s")]
    command += ["--port", "0", "--metrics-port", "0", "--ready-file", str(ready), "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ports = json.loads(ready.read_text())
        assert ports["pid"] == process.pid
        with Client(f"127.0.0.1:{ports['port']}") as client:
            assert client.list_runs() == []
        second = learner("--model", str(tiny_model[1]), "--state-dir", str(tmp_path / "s"), "--port", "0")
        assert second.returncode == 2
        said = f"qerld learner: state_dir: {tmp_path / 's'} is in use by qerld learner, process {process.pid};"
        assert second.stderr.startswith(said)
        third = learner("--model", str(tiny_model[1]), "--state-dir", str(tmp_path / "t"), "--port", str(ports["port"]))
        assert third.returncode == 2
        assert third.stderr.startswith(
            f"qerld learner: port: cannot listen on 127.0.0.1:{ports['port']} (Address already"
        )
        assert not (tmp_path / "t").exists()
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert not ready.exists()


def test_the_api_process_imports_no_torch() -> None:
    program = "import sys, qerld_learner.app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
