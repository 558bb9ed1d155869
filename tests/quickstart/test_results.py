"""What the quickstart writes, from reports; its failures, from real processes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from qerld.v1 import common_pb2, run_pb2
from qerld_kernels.exclusive import FolderLock
from qerld_service.quickstart import main
from qerld_service.quickstart.audit import check_spans
from qerld_service.quickstart.results import Series, draw_curves, result_table, write_summary
from qerld_service.quickstart.session import QuickstartError, serving
from rich.console import Console


def reports(count: int) -> list[run_pb2.RunReport]:
    return [
        run_pb2.RunReport(
            step=step,
            version=step,
            metrics={"reward_mean": step / count, "tokens": 100, "lag_max": step % 3, "logprob_gap": 1e-5},
            phase_seconds={"forward": 0.5, "backward": 1.0},
        )
        for step in range(1, count + 1)
    ]


def test_series_means_and_totals() -> None:
    series = Series(reports(20))
    summary = series.summary()
    assert summary["mean_reward"]["first_ten_steps"] == pytest.approx(sum(range(1, 11)) / 200)
    assert summary["mean_reward"]["last_ten_steps"] == pytest.approx(sum(range(11, 21)) / 200)
    assert summary["tokens"] == 2000
    assert summary["max_lag"] == 2
    assert summary["phase_seconds"] == {"backward": 20.0, "forward": 10.0}
    assert summary["mismatch_kl_mean"] is None


def test_files_and_table(tmp_path: Path) -> None:
    series = Series(reports(12))
    draw_curves(tmp_path / "curves.png", series, "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    held_out = {"exact_probability": 0.1, "greedy_accuracy": 0.3, "prompts": 40}
    summary = {
        "task": "next",
        "seed": 0,
        "steps": 12,
        "seconds": {"prepare": 1.0, "start": 20.0, "loop": 100.0},
        "versions_served": 13,
        "held_out": {"before": held_out, "after": held_out | {"exact_probability": 0.789}},
        **series.summary(),
        "swap_ms": {"load_mean": 12.0, "commit_to_live_mean": None, "commit_to_live_max": None},
        "checks": {"rollouts": 1, "tokens": 4321, "versions_sampled": 3},
    }
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    console = Console(file=io.StringIO(), width=120)
    console.print(result_table(summary))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "0.789" in text
    assert "4321" in text


def rollout(spans: list[tuple[int, int, int]], sigma: float = 0.1) -> common_pb2.Rollout:
    return common_pb2.Rollout(
        completion=common_pb2.TokenIds(ids=[1, 2, 3]),
        logprobs=[-1.0, -1.0, -1.0],
        spans=[
            common_pb2.Span(begin=begin, end=end, version=version, noise=common_pb2.Noise(sigma=sigma))
            for begin, end, version in spans
        ],
    )


def test_spans_that_fit() -> None:
    noises = {1: common_pb2.Noise(sigma=0.1), 2: common_pb2.Noise(sigma=0.1)}
    check_spans(rollout([(0, 1, 1), (1, 3, 2)]), noises)


def test_without_noise_the_seed_does_not_matter() -> None:
    check_spans(rollout([(0, 3, 1)], 0.0), {1: common_pb2.Noise(sigma=0.0, seed=7, relative=True)})


@pytest.mark.parametrize(
    ("spans", "sigma"),
    [([(0, 2, 1)], 0.1), ([(0, 3, 7)], 0.1), ([(1, 3, 1)], 0.1), ([], 0.1), ([(0, 3, 1)], 0.2)],
    ids=["short", "unknown version", "gap", "none", "other noise"],
)
def test_spans_that_do_not_fit(spans: list[tuple[int, int, int]], sigma: float) -> None:
    with pytest.raises(QuickstartError):
        check_spans(rollout(spans, sigma), {1: common_pb2.Noise(sigma=0.1)})


def test_a_server_that_does_not_come_up_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no room for the key-value cache')"]
    with (
        pytest.raises(QuickstartError, match="no room for the key-value cache"),
        serving(command, tmp_path / "serve.log", tmp_path / "ready.json"),
    ):
        pass


def test_a_second_quickstart_does_not_remove_what_the_first_one_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "service-state" / "learner.db"
    used.parent.mkdir()
    used.touch()
    with FolderLock(tmp_path, "--out", "qerld quickstart"):
        assert main.main(["--out", str(tmp_path)]) == 2
    assert f"qerld quickstart: --out: {tmp_path} is in use by qerld quickstart, process" in capsys.readouterr().err
    assert used.exists()
