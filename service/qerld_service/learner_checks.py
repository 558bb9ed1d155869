"""What `qerld doctor --target` asks a running learner: its policy servers, and those that it refused."""

from __future__ import annotations

from collections.abc import Iterator

from qerld.v1 import run_pb2
from qerld_client import Client, QerldError

from qerld_service.checks import Check

DEADLINE = 10.0


def check_learner(target: str) -> Iterator[Check]:
    """Check that a learner answers and that a policy server is attached to it; one finding a server."""
    try:
        with Client(target, timeout=DEADLINE) as client:
            replicas = client.list_replicas()
    except QerldError as error:
        yield Check("learner", "fail", str(error), f"start it, or give the --target that it serves on, not {target}")
        return
    attached = sum(not replica.refused_reason for replica in replicas)
    advice = "" if attached else "start a policy server with this --learner: without one nothing is sampled"
    yield Check("learner", "ok" if attached else "warn", f"{target}, {attached} policy server(s) attached", advice)
    yield from map(check_replica, replicas)


def check_replica(replica: run_pb2.Replica) -> Check:
    """Check one policy server as the learner sees it."""
    name = f"policy server {replica.endpoint}"
    if replica.refused_reason:
        advice = "give it the learner's model, dtype and enough max_loras and max_lora_rank; it tries again by itself"
        return Check(name, "fail", f"refused: {replica.refused_reason}", advice)
    if replica.quarantine_reason:
        return Check(name, "fail", replica.quarantine_reason, "look into its log, then start it again")
    versions = ", ".join(f"{policy.run}@{policy.version}" for policy in replica.loaded) or "nothing yet"
    if not replica.reconciled:
        return Check(name, "warn", f"serves {versions} and is loading", "wait; its log says what fails, if anything")
    return Check(name, "ok", f"serves {versions}")
