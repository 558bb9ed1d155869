"""How long version changes took."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.request import urlopen

from qerld.v1 import policy_pb2

METRIC = "qerld_policy_swap_seconds"


def swap_milliseconds(versions: Sequence[policy_pb2.PolicyVersion], metrics_port: int) -> dict[str, float | None]:
    """Means in milliseconds: download and load as the policy server measured them, and commit to live."""
    live = [version for version in versions if version.policy.version and version.HasField("live_at")]
    waits = [(v.live_at.ToNanoseconds() - v.created_at.ToNanoseconds()) / 1e6 for v in live]
    return {
        "load_mean": load_milliseconds(metrics_port),
        "commit_to_live_mean": sum(waits) / len(waits) if waits else None,
        "commit_to_live_max": max(waits, default=None),
    }


def load_milliseconds(metrics_port: int) -> float | None:
    with urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    total, count = (
        sum(float(value) for value in re.findall(rf"^{METRIC}_{part}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))
        for part in ("sum", "count")
    )
    return 1000 * total / count if count else None
