"""`qerld schedule`: print and plot how σ goes over the learner's steps, before a run is created with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .records import RunConfig
from .run_options import check_run_config, noise_config
from .trainer import aqn
from .trainer.messages import AqnConfig

USAGE_ERROR = 2
BAR = 40
PLOTS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Stage:
    """Steps `first` to `last` of a schedule have one σ."""

    number: int
    first: int
    last: int
    sigma: float


def stages(config: AqnConfig) -> Iterator[Stage]:
    """Yield the stages that steps 1 … M reach."""
    length, end = aqn.stage_length(config), config.schedule_steps
    reached = aqn.stage_at(config, end) + 1
    for number in range(reached):
        first = number * length + 1
        last = end if number == reached - 1 else first + length - 1
        yield Stage(number, first, last, aqn.sigma_at(config, first))


def main(argv: Sequence[str]) -> int:
    """Print the schedule that the flags describe; 2 and one line a problem when a run would be refused for it."""
    parser = _parser()
    flags = parser.parse_args(argv)
    config = RunConfig(
        noise_schedule=flags.schedule,
        sigma_start=flags.sigma_start,
        sigma_end=flags.sigma_end,
        noise_stages=flags.stages,
        noise_relative=flags.relative,
        schedule_steps=flags.schedule_steps,
    )
    if problems := [f"{v.field.removeprefix('config.')} {v.description}" for v in check_run_config(config)]:
        parser.error("\n".join(problems))
    if flags.plot and (problem := _cannot_plot(flags.plot)):
        parser.error(problem)
    found = list(stages(noise_config(config)))
    unit = "σ, in units of mean |w|" if flags.relative else "σ"
    Console(file=sys.stdout, highlight=False).print(table(found, unit))
    if flags.plot:
        draw(flags.plot, found, f"{flags.schedule}, {flags.stages} stages", unit)
        print(f"written: {flags.plot}")  # noqa: T201
    return 0


def table(found: Sequence[Stage], unit: str) -> Table:
    """Return a row a stage, with a bar as long as its σ."""
    result = Table("stage", "steps", unit, "", caption="the last value holds beyond the last step")
    most = max(stage.sigma for stage in found) or 1.0
    for stage in found:
        steps = f"{stage.first}–{stage.last}"
        result.add_row(str(stage.number), steps, f"{stage.sigma:.4g}", bar(stage.sigma / most))
    return result


def bar(share: float) -> str:
    """Return a bar of `share` of the whole width, to an eighth of a character; never empty for what is above 0."""
    eighths = max(round(share * BAR * 8), 1 if share > 0 else 0)
    return f"{'█' * (eighths // 8)}{' ▏▎▍▌▋▊▉'[eighths % 8]}".rstrip()


def draw(path: Path, found: Sequence[Stage], title: str, unit: str) -> None:
    """Write a plot of σ by step; the suffix says the format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    edges = [stage.first for stage in found] + [found[-1].last + 1]
    axis.stairs([stage.sigma for stage in found], edges, baseline=None, linewidth=1.5)
    axis.set(title=title, xlabel="step", ylabel=unit)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cannot_plot(path: Path) -> str:
    if path.suffix not in PLOTS:
        return f"--plot: must end with one of {', '.join(PLOTS)}, got {path.name!r}; the ending says the format"
    if not path.parent.is_dir():
        return f"--plot: must be in a folder that exists, got {path.parent}; make it first"
    if find_spec("matplotlib") is None:
        return "--plot: needs matplotlib; install with pip install 'qerld[quickstart]', or leave it out"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qerld schedule",
        description="Print how the noise of a run goes over its steps: the fields of AdaptiveNoise as flags.",
    )
    parser.add_argument("--schedule", default="exponential", help=f"one of {', '.join(aqn.DECAYS)}")
    parser.add_argument("--sigma-start", type=float, default=1e-2, help="σ of the first noisy stage (default: 0.01)")
    parser.add_argument("--sigma-end", type=float, default=5e-4, help="σ of the last stage (default: 0.0005)")
    parser.add_argument("--stages", type=int, default=10, help="stages, the first without noise (default: 10)")
    parser.add_argument("--schedule-steps", type=int, required=True, help="steps over which it runs")
    parser.add_argument("--relative", action="store_true", help="σ is in units of each norm's mean |w|")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also write a plot: .svg, .png or .pdf")
    return parser
