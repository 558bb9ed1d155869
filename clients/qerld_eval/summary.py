"""From judged completions to what is reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from .statistics import Estimate, average, interval, pass_at_k


@dataclass(frozen=True)
class Completion:
    """One judged completion. `right` is None when it could not be judged; `problem` is the problem's position."""

    problem: int
    right: bool | None
    tokens: int
    truncated: bool


@dataclass(frozen=True)
class Summary:
    """Means over problems. With one sample each, avg@1 is pass@1.

    Attributes:
        problems: Problems evaluated.
        samples: Samples of each.
        average: avg@n, the estimate of pass@1 from n samples.
        passes: pass@k by k.
        truncated_share: Completions cut off by max_tokens or the context.
        unjudged: Completions that could not be judged in time; they count as wrong.
        mean_tokens: Tokens of a completion.
    """

    problems: int
    samples: int
    average: Estimate
    passes: dict[int, Estimate]
    truncated_share: float
    unjudged: int
    mean_tokens: float

    @property
    def estimates(self) -> dict[str, Estimate]:
        """The estimates by name: "pass@1", of n samples "avg@n" (the same number), and the other "pass@k"."""
        named = {"pass@1": self.average} if self.samples == 1 else {f"avg@{self.samples}": self.average}
        return named | {f"pass@{k}": estimate for k, estimate in self.passes.items()}


def summarise(completions: Iterable[Completion], samples: int, ks: Sequence[int] = ()) -> Summary:
    """Return the summary of `samples` completions of each problem; `ks` are those of pass@k, each at most `samples`.

    Raises:
        ValueError: A problem has another number of completions, or a k does not fit.
    """
    found = list(completions)
    by_problem: dict[int, list[Completion]] = defaultdict(list)
    for completion in found:
        by_problem[completion.problem].append(completion)
    counts = {problem: len(members) for problem, members in by_problem.items() if len(members) != samples}
    if counts or not found:
        raise ValueError(f"want {samples} completions of each problem, got others: {counts or 'none at all'}")
    right = [sum(one.right is True for one in members) for members in by_problem.values()]
    return Summary(
        problems=len(by_problem),
        samples=samples,
        average=interval([average(samples, c) for c in right]),
        passes={k: interval([pass_at_k(samples, c, k) for c in right]) for k in sorted(set(ks))},
        truncated_share=fmean(one.truncated for one in found),
        unjudged=sum(one.right is None for one in found),
        mean_tokens=fmean(one.tokens for one in found),
    )
