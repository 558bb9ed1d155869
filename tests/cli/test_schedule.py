"""`qerld schedule`: what it prints is what a run gets, and what a run would be refused for it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from qerld_learner.records import RunConfig
from qerld_learner.run_options import noise_of
from qerld_learner.schedule import BAR, bar, main

ROW = re.compile(r"│ *(\d+) *│ *(\d+)–(\d+) *│ *([\d.e-]+) *│ (.*?) *│")


def run(*flags: str) -> int:
    return main(["--schedule-steps", "25", "--stages", "4", *flags])


@pytest.mark.parametrize("schedule", ["exponential", "exponential_paper", "linear", "cosine", "logarithmic"])
def test_it_prints_the_sigma_of_every_step_of_a_run(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--schedule", schedule) == 0
    rows = ROW.findall(capsys.readouterr().out)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    config = RunConfig(
        noise_schedule=schedule, sigma_start=1e-2, sigma_end=5e-4, noise_stages=4, schedule_steps=25, max_steps=99
    )
    steps = {step: float(row[3]) for row in rows for step in range(int(row[1]), int(row[2]) + 1)}
    assert list(steps) == list(range(1, 26))
    for step, sigma in steps.items():
        assert sigma == pytest.approx(noise_of(config, step, step).sigma, rel=1e-3)
    bars = [len(row[4]) for row in rows]
    assert bars[0] == 0 < bars[3] < bars[1] == BAR


def test_a_bar_shows_its_share_to_an_eighth() -> None:
    assert [bar(share) for share in (0.0, 1e-9, 1 / BAR, 1.5 / BAR)] == ["", "▏", "█", "█▌"]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_it_plots(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"sigma{suffix}"
    assert run("--relative", "--plot", str(path)) == 0
    assert path.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")
    assert f"written: {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--sigma-end", "0.5"), "noise.sigma_end must be at most sigma_start = 0.01, got 0.5; noise decays"),
        (("--schedule", "square"), "noise.schedule must be one of none, exponential"),
        (("--schedule-steps", "0"), "schedule_steps must be at least 1 with noise.schedule exponential, got 0"),
        (("--stages", "1"), "noise.stages must be at least 2"),
        (("--plot", "sigma.jpeg"), "--plot: must end with one of .svg, .png, .pdf, got 'sigma.jpeg'"),
        (("--plot", "/nowhere/sigma.svg"), "--plot: must be in a folder that exists, got /nowhere"),
    ],
)
def test_what_a_run_would_be_refused_for(flags: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
