"""What `qerld watch` draws, from reports and replicas; the connection's failures."""

from __future__ import annotations

import io

import pytest
from qerld.v1 import common_pb2, run_pb2
from qerld_service import watch
from rich.console import Console


def report(step: int, seconds: int, **metrics: float) -> run_pb2.RunReport:
    made = run_pb2.RunReport(run="r", step=step, version=step, metrics=metrics)
    made.at.FromSeconds(1000 + seconds)
    return made


def text_of(view: watch.View, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(watch.render(view, console.width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sparkline_shows_the_latest_values_between_their_extremes() -> None:
    assert watch.sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert watch.sparkline([5, 5]) == "▁▁"
    assert watch.sparkline(list(range(100)), width=3) == "▁▅█"


def test_token_rate_is_tokens_after_the_first_report_over_the_time_between() -> None:
    reports = [report(1, 0, tokens=999), report(2, 2, tokens=100), report(3, 4, tokens=300)]
    assert watch.token_rate(reports) == pytest.approx(100.0)
    assert watch.token_rate(reports[:1]) == 0.0


def test_view_shows_run_metrics_and_servers() -> None:
    run = run_pb2.Run(name="r", step=2, live_version=2, state=run_pb2.RUN_STATE_PAUSED, reason="disk full")
    run.config.max_steps = 30
    view = watch.View(run)
    view.reports.extend([report(1, 0, reward_mean=0.25, sigma=0.0), report(2, 1, reward_mean=0.5, sigma=0.03)])
    replica = run_pb2.Replica(replica_id="policy-1", endpoint="127.0.0.1:1", engine_version="0.32.0", reconciled=True)
    replica.loaded.append(common_pb2.Policy(run="r", version=2))
    view.replicas = [replica]
    text = text_of(view)
    for part in ("paused", "step 2 of 30", "disk full", "0.500", "3.00e-02", "policy-1", "r@2", "reconciled"):
        assert part in text


def test_a_narrow_terminal_shows_the_newest_steps() -> None:
    view = watch.View(run_pb2.Run(name="r", step=40))
    view.reports.extend(report(step, step, mismatch_kl=step * 1e-3, grad_norm=-float(step)) for step in range(1, 41))
    for width in (80, 100, 160):
        rows = {line.split()[0]: line for line in text_of(view, width).splitlines() if line}
        assert rows["mismatch"].rstrip().endswith("█"), (width, rows)
        assert rows["gradient"].rstrip().endswith("▁"), (width, rows)


def test_a_refused_server_is_shown_with_the_reason() -> None:
    refused = run_pb2.Replica(replica_id="policy-1", endpoint="127.0.0.1:1", refused_reason="dtype is 'bfloat16'")
    text = text_of(watch.View(run_pb2.Run(name="r"), [refused]))
    assert "refused: dtype is 'bfloat16'" in text


def test_without_servers_it_says_so() -> None:
    assert "no policy server is attached" in text_of(watch.View(run_pb2.Run(name="r")))


def test_unreachable_learner_is_a_clear_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main(["--target", "127.0.0.1:1", "--once"]) == 1
    assert "127.0.0.1:1: UNAVAILABLE" in capsys.readouterr().err
