"""Evaluation without a model: problems from files, answers compared, and what the share of right ones is worth.

It imports nothing else of ours. Comparing answers needs math-verify, the rest only the standard library.
"""

from __future__ import annotations

from .judging import Judge
from .problems import INSTRUCTION, Problem, ProblemFileError, chat, read_problems
from .statistics import Estimate, average, interval, pass_at_k
from .summary import Completion, Summary, summarise

__all__ = [
    "INSTRUCTION",
    "Completion",
    "Estimate",
    "Judge",
    "Problem",
    "ProblemFileError",
    "Summary",
    "average",
    "chat",
    "interval",
    "pass_at_k",
    "read_problems",
    "summarise",
]
