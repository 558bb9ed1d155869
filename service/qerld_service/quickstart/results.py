"""What the quickstart leaves: summary.json, curves.png, a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerld.v1 import run_pb2
from rich.table import Table

TEN = 10
CURVES = (
    ("reward_mean", "mean reward"),
    ("entropy", "entropy (nats)"),
    ("sigma", "σ"),
    ("mismatch_kl", "mismatch KL (nats)"),
    ("lag_max", "largest lag (versions)"),
)


@dataclass(frozen=True)
class Series:
    """Reports of all steps, oldest first."""

    reports: Sequence[run_pb2.RunReport]

    def of(self, name: str) -> list[float]:
        return [report.metrics[name] for report in self.reports if name in report.metrics]

    def mean(self, name: str, first: int | None = None, last: int | None = None) -> float | None:
        """Mean over the first or last steps, or over all; None when no step reported it."""
        values = self.of(name)
        chosen = values[:first] if first else values[-last:] if last else values
        return sum(chosen) / len(chosen) if chosen else None

    def ends(self, name: str) -> dict[str, float | None]:
        return {"first_ten_steps": self.mean(name, first=TEN), "last_ten_steps": self.mean(name, last=TEN)}

    def largest(self, name: str) -> float | None:
        return max(self.of(name), default=None)

    def total(self, name: str) -> float:
        return sum(self.of(name))

    def phase_seconds(self) -> dict[str, float]:
        """Seconds a phase, summed over steps."""
        totals: dict[str, float] = {}
        for report in self.reports:
            for phase, seconds in report.phase_seconds.items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        return {phase: round(seconds, 3) for phase, seconds in sorted(totals.items())}

    def summary(self) -> dict[str, Any]:
        """Numbers of the training part of summary.json."""
        return {
            "tokens": int(self.total("tokens")),
            "tokens_computed": int(self.total("tokens_computed")),
            "phase_seconds": self.phase_seconds(),
            "mean_reward": self.ends("reward_mean"),
            "entropy": self.ends("entropy"),
            "max_lag": self.largest("lag_max"),
            "mismatch_kl_mean": self.mean("mismatch_kl"),
            "mismatch_kl_max": self.largest("mismatch_kl"),
            "logprob_gap_mean": self.mean("logprob_gap"),
            "logprob_gap_max": self.largest("logprob_gap"),
            "behaviour_gap_mean": self.mean("behaviour_gap"),
            "behaviour_gap_max": self.largest("behaviour_gap"),
            "trainer_peak_rss_bytes": self.largest("peak_rss_bytes"),
        }


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def draw_curves(path: Path, series: Series, title: str) -> None:
    """One small plot a metric, over steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(CURVES), 1, figsize=(7, 2 * len(CURVES)), sharex=True, layout="constrained")
    steps = [report.step for report in series.reports]
    for axis, (name, label) in zip(axes, CURVES, strict=True):
        axis.plot(steps, [report.metrics.get(name, float("nan")) for report in series.reports], linewidth=1.5)
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
    axes[0].set_title(title, fontsize=10)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def result_table(summary: Mapping[str, Any]) -> Table:
    """Before and after on the held-out prompts, then the numbers of the run."""
    before, after = summary["held_out"]["before"], summary["held_out"]["after"]
    title = f"task {summary['task']}, seed {summary['seed']}, {summary['steps']} steps"
    table = Table("", "before", "after", title=title, title_justify="left")
    for name, label in (("exact_probability", "exact probability"), ("greedy_accuracy", "greedy accuracy")):
        table.add_row(f"held out: {label}", f"{before[name]:.3f}", f"{after[name]:.3f}")
    rewards = summary["mean_reward"]
    ends = (number(rewards["first_ten_steps"]), number(rewards["last_ten_steps"]))
    table.add_row("mean reward, first and last ten steps", *ends)
    table.add_section()
    for label, value in facts(summary):
        table.add_row(label, "", value)
    return table


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    seconds = summary["seconds"]
    return [
        ("held-out prompts, none of them trained", str(summary["held_out"]["after"]["prompts"])),
        ("versions served", str(summary["versions_served"])),
        ("trained tokens, each with a known version", str(summary["checks"]["tokens"])),
        ("largest lag, versions", number(summary["max_lag"], ".0f")),
        ("server/trainer |Δ log-probability|, mean", number(summary["behaviour_gap_mean"], ".1e")),
        ("mismatch KL, mean (noise included)", number(summary["mismatch_kl_mean"], ".1e")),
        ("swap: download and load, mean", f"{number(summary['swap_ms']['load_mean'], '.0f')} ms"),
        ("swap: commit to live, mean", f"{number(summary['swap_ms']['commit_to_live_mean'], '.0f')} ms"),
        ("seconds: prepare, start, loop", " / ".join(f"{seconds[name]:.0f}" for name in ("prepare", "start", "loop"))),
    ]


def number(value: float | None, style: str = ".3f") -> str:
    return "–" if value is None else format(value, style)
