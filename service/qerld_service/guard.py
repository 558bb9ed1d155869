"""Ends the supervisor's children when the supervisor is killed without a chance to do so itself.

    python -m qerld_service.guard GRACE_SECONDS     (standard input: a line "+PID" or "-PID" a child; its end = act)

The supervisor holds the other end of standard input, so end of file means that it is gone, however it went. Each child
leads its own process group: it gets SIGTERM and, after the grace, its whole group gets SIGKILL: grandchildren included,
which no parent-death signal would reach.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

POLL_SECONDS = 0.05


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_groups(watched_groups(), float(sys.argv[1]))


def watched_groups() -> set[int]:
    """Process groups that were still watched when the supervisor's end of the pipe closed."""
    groups: set[int] = set()
    for line in sys.stdin:
        action, pid = line[0], int(line[1:])
        (groups.add if action == "+" else groups.discard)(pid)
    return groups


def end_groups(groups: set[int], grace: float) -> None:
    for group in groups:
        # Only the leader: it ends its own children in its own order.
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(map(group_exists, groups)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for group in groups:
        kill_group(group)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def kill_group(group: int) -> None:
    """SIGKILL every process of the group; nothing happens when none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
