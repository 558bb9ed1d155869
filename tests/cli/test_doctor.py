"""`qerld doctor` on good and broken model folders."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from qerld.v1 import common_pb2, run_pb2
from qerld_service import doctor
from qerld_service.checks import Check
from qerld_service.learner_checks import check_learner, check_replica
from qerld_service.model_checks import check_model
from support.bad_models import BAD_MODELS, assert_one_clear_line, make_bad_model


@pytest.fixture
def model(tiny_model: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model[1], tmp_path / "model"))


def by_name(folder: Path) -> dict[str, Check]:
    return {check.name: check for check in check_model(folder)}


def test_a_good_model_has_no_findings(model: Path) -> None:
    assert [check for check in check_model(model) if check.status != "ok"] == []
    assert by_name(model)["weights"].found.startswith("NVFP4 (compressed-tensors), 1 file(s)")


def test_exit_status_follows_the_worst_finding(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = str(model.parent / "state")
    assert doctor.main(["--model", str(model), "--port", "0", "--state-dir", state]) == 0
    (model / "config.json").unlink()
    assert doctor.main(["--model", str(model), "--port", "0", "--state-dir", state]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text
    assert "…" not in text  # in 80 columns the path is folded, not cut


@pytest.mark.parametrize("kind", BAD_MODELS)
def test_a_bad_model_is_one_finding_with_its_way_out(kind: str, tiny_model: tuple[Path, Path], tmp_path: Path) -> None:
    (check,) = check_model(make_bad_model(kind, tiny_model[1], tmp_path))
    assert check.status == "fail"
    assert_one_clear_line(f"{check.found}; {check.advice}", kind)


def test_an_unquantised_model_is_a_warning(tiny_model: tuple[Path, Path]) -> None:
    assert by_name(tiny_model[0])["weights"].status == "warn"
    assert "qerld quantize" in by_name(tiny_model[0])["weights"].advice


def test_a_model_without_a_chat_template_is_a_warning(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert by_name(model)["chat template"].status == "warn"


def test_taken_port_is_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert doctor.check_port(taken.getsockname()[1]).status == "fail"
    assert doctor.check_port(99999999).found == "not a port"


def test_package_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"vllm": "0.25.0"}
    monkeypatch.setattr(doctor, "version", found.__getitem__)
    assert doctor.check_package("vllm").status == "fail"
    for good in ("0.25.1", "0.32.0+cpu", "0.33.0"):
        found["vllm"] = good
        assert doctor.check_package("vllm").status == "ok"
    found["vllm"] = "0.34.0"
    check = doctor.check_package("vllm")
    assert (check.status, check.advice) == ("fail", "pip install 'vllm>=0.25.1,<0.34'")


def test_a_learner_that_does_not_answer_is_a_failure() -> None:
    (check,) = check_learner("127.0.0.1:1")
    assert (check.name, check.status) == ("learner", "fail")
    assert "UNAVAILABLE" in check.found


@pytest.mark.parametrize(
    ("replica", "status", "found"),
    [
        (run_pb2.Replica(refused_reason="base_sha256 is 'a', the learner has 'b'"), "fail", "refused: base_sha256 is"),
        (run_pb2.Replica(quarantine_reason="canary failed: gap 0.5"), "fail", "canary failed: gap 0.5"),
        (run_pb2.Replica(), "warn", "serves nothing yet and is loading"),
        (run_pb2.Replica(reconciled=True, loaded=[common_pb2.Policy(run="r", version=3)]), "ok", "serves r@3"),
    ],
)
def test_policy_servers_as_the_learner_sees_them(replica: run_pb2.Replica, status: str, found: str) -> None:
    replica.endpoint = "127.0.0.1:9"
    check = check_replica(replica)
    assert (check.name, check.status) == ("policy server 127.0.0.1:9", status)
    assert check.found.startswith(found)
    assert bool(check.advice) == (status != "ok")


def test_disk_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert doctor.check_disk(tmp_path / "a" / "b").status == "ok"
