"""One finding of `qerld doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """`advice` says what to do when the status is not ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""
