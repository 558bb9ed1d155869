"""`qerld watch`: a live view of one run, from the learner's reports alone."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from qerld.v1 import run_pb2
from qerld_client import Client, QerldError
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

HISTORY = 400
SPARK_WIDTH = 40
NUMBERS_WIDTH = 51  # of the columns beside the bars
BARS = "▁▂▃▄▅▆▇█"
# Of one call, retries included: a learner that restarts is waited for, one that is not there is told of.
DEADLINE = 10.0
REFRESH_SECONDS = 1.0
# Title, metric, number format.
CURVES = (
    ("reward", "reward_mean", ".3f"),
    ("held-out accuracy", "eval_accuracy", ".3f"),
    ("entropy", "entropy", ".3f"),
    ("σ", "sigma", ".2e"),
    ("lag (max)", "lag_max", ".0f"),
    ("mismatch KL", "mismatch_kl", ".2e"),
    ("server/trainer gap", "logprob_gap", ".2e"),
    ("gradient norm", "grad_norm", ".3f"),
)


class WatchError(RuntimeError):
    """The learner cannot be reached, or does not know the run."""


@dataclass
class View:
    """What is shown: the run, its policy servers, the latest reports."""

    run: run_pb2.Run
    replicas: list[run_pb2.Replica] = field(default_factory=list)
    reports: deque[run_pb2.RunReport] = field(default_factory=lambda: deque(maxlen=HISTORY))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="qerld watch",
        description="Live view of a run: step, reward, entropy, σ, lag, mismatch, tokens a second. Ctrl-C ends it.",
    )
    parser.add_argument("run", nargs="?", help="name of the run (default: the newest)")
    parser.add_argument("--target", default="127.0.0.1:50051", help="learner's gRPC endpoint (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print the state once and end")
    arguments = parser.parse_args(argv)
    console = Console()
    with Client(arguments.target, timeout=DEADLINE) as client:
        try:
            watch(client, arguments.run, arguments.once, console)
        except WatchError as error:
            sys.stderr.write(f"qerld watch: {error}\n")
            return 1
        except QerldError as error:
            sys.stderr.write(f"qerld watch: {arguments.target}: {error}\n")
            return 1
    return 0


def watch(client: Client, name: str | None, once: bool, console: Console) -> None:
    """Show a run until interrupted; raises WatchError, QerldError."""
    view = View(pick_run(client, name))
    if once:
        view.reports.extend(stored_reports(client, view.run))
        view.replicas = client.list_replicas()
        console.print(render(view, console.width))
        return
    threading.Thread(target=collect, args=(client.watch_run(view.run.name, after_step=0), view), daemon=True).start()
    with Live(render(view, console.width), console=console, refresh_per_second=4) as live:
        while True:
            view.run = client.get_run(view.run.name)
            view.replicas = client.list_replicas()
            live.update(render(view, console.width))
            time.sleep(REFRESH_SECONDS)


def pick_run(client: Client, name: str | None) -> run_pb2.Run:
    if name is not None:
        return client.get_run(name)
    runs = client.list_runs()
    if not runs:
        raise WatchError("the learner has no run yet; create one, or run `qerld quickstart`")
    return runs[-1]


def stored_reports(client: Client, run: run_pb2.Run) -> list[run_pb2.RunReport]:
    """Reports of the steps taken so far."""
    reports: list[run_pb2.RunReport] = []
    if run.step == 0:
        return reports
    with client.watch_run(run.name, after_step=0, timeout=DEADLINE) as stream:
        for report in stream:
            reports.append(report)
            if report.step >= run.step:
                break
    return reports


def collect(reports: Iterable[run_pb2.RunReport], view: View) -> None:
    """Append reports as they come; the polling in `watch` notices when the learner is gone."""
    with contextlib.suppress(QerldError):
        for report in reports:
            view.reports.append(report)


def render(view: View, width: int) -> Group:
    """What fits into `width` characters."""
    reports = list(view.reports)  # a copy: another thread appends
    return Group(headline(view, reports), curves(reports, width - NUMBERS_WIDTH), replica_table(view.replicas))


def headline(view: View, reports: Sequence[run_pb2.RunReport]) -> Text:
    run = view.run
    limit = f" of {run.config.max_steps}" if run.config.max_steps else ""
    state = run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
    text = Text.assemble(
        (run.name, "bold"),
        f"  {state}  step {run.step}{limit}  live version {run.live_version}  {token_rate(reports):.0f} tokens/s",
    )
    if run.reason:
        text.append(f"  ({run.reason})", "yellow")
    return text


def token_rate(reports: Sequence[run_pb2.RunReport]) -> float:
    """Trained tokens a second over the latest ten reports."""
    latest = reports[-10:]
    if len(latest) < 2:
        return 0.0
    seconds = latest[-1].at.ToNanoseconds() - latest[0].at.ToNanoseconds()
    tokens = sum(report.metrics.get("tokens", 0.0) for report in latest[1:])
    return tokens / (seconds / 1e9) if seconds > 0 else 0.0


def curves(reports: Sequence[run_pb2.RunReport], spark_width: int) -> Table:
    table = Table("", *(Column(name, no_wrap=True) for name in ("latest", "min", "max")), "", box=None, pad_edge=False)
    for title, name, style in CURVES:
        values = [report.metrics[name] for report in reports if name in report.metrics]
        if values:
            numbers = (format(value, style) for value in (values[-1], min(values), max(values)))
            table.add_row(title, *numbers, sparkline(values, min(max(spark_width, 1), SPARK_WIDTH)))
    return table


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """The latest values as bars, the lowest at the bottom."""
    shown = list(values)[-width:]
    low, high = min(shown), max(shown)
    if high <= low:
        return BARS[0] * len(shown)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in shown)


def replica_table(replicas: Sequence[run_pb2.Replica]) -> Table | Text:
    if not replicas:
        return Text("no policy server is attached", "yellow")
    table = Table("policy server", "endpoint", "vLLM", "versions", "in flight", "state", box=None, pad_edge=False)
    for replica in replicas:
        versions = ", ".join(f"{policy.run}@{policy.version}" for policy in replica.loaded)
        refused = f"refused: {replica.refused_reason}" if replica.refused_reason else ""
        state = refused or replica.quarantine_reason or ("reconciled" if replica.reconciled else "loading")
        row = (replica.replica_id, replica.endpoint, replica.engine_version, versions, str(replica.in_flight), state)
        table.add_row(*row)
    return table
