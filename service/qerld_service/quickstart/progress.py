"""Follows a run to its end: a line a step, a bar, and a clear end when something stands still."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from qerld.v1 import run_pb2
from qerld_client import Client, QerldError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qerld_service.quickstart.session import LoggedProcess, QuickstartError

STALL_SECONDS = 180.0
POLL_SECONDS = 1.0


def follow(
    client: Client, run: str, steps: int, processes: Sequence[LoggedProcess], console: Console
) -> list[run_pb2.RunReport]:
    """Return the reports of all steps; raises QuickstartError when a process ends, the run pauses or nothing moves."""
    arrived: queue.Queue[run_pb2.RunReport | QerldError] = queue.Queue()
    threading.Thread(target=collect, args=(client, run, arrived), daemon=True).start()
    reports: list[run_pb2.RunReport] = []
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        job = bar.add_task("training", total=steps)
        moved = time.monotonic()
        while len(reports) < steps:
            try:
                item = arrived.get(timeout=POLL_SECONDS)
            except queue.Empty:
                check_progress(client, run, processes, moved)
                continue
            if isinstance(item, QerldError):
                raise item
            moved = time.monotonic()
            reports.append(item)
            bar.update(job, completed=len(reports))
            bar.console.print(line_of(item), highlight=False, soft_wrap=True)
    return reports


def collect(client: Client, run: str, arrived: queue.Queue[run_pb2.RunReport | QerldError]) -> None:
    try:
        for report in client.watch_run(run, after_step=0):
            arrived.put(report)
    except QerldError as error:
        arrived.put(error)


def check_progress(client: Client, run: str, processes: Sequence[LoggedProcess], moved: float) -> None:
    for process in processes:
        process.check()
    state = client.get_run(run)
    logs = "\n".join(process.tail() for process in processes)
    if state.state == run_pb2.RUN_STATE_PAUSED:
        raise QuickstartError(f"the run was paused at step {state.step}: {state.reason}\n{logs}")
    if time.monotonic() - moved > STALL_SECONDS:
        raise QuickstartError(f"no step for {STALL_SECONDS:.0f} s, at step {state.step}\n{logs}")


def line_of(report: run_pb2.RunReport) -> str:
    """One step in one line."""
    metric = report.metrics
    return (
        f"step {report.step:3}  reward {metric.get('reward_mean', 0):.2f}  entropy {metric.get('entropy', 0):.2f}  "
        f"σ {metric.get('sigma', 0):.4f}  lag {metric.get('lag_max', 0):.0f}  KL {metric.get('mismatch_kl', 0):.1e}  "
        f"gap {metric.get('behaviour_gap', 0):.1e}  {sum(report.phase_seconds.values()):.1f} s"
    )
