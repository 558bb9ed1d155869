"""The reward client of the quickstart, a process of its own: samples groups, scores them strictly, submits rewards.

    python -m qerld_service.quickstart.client --target 127.0.0.1:50051 --run quickstart --task next --seed 0

It needs only the SDK: no torch, no vLLM, no inbound port.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from qerld.v1 import common_pb2
from qerld_client import Client, QerldError, Task

from qerld_service.quickstart import tasks


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Sample and reward one of the quickstart's tasks until its run is done."
    )
    parser.add_argument("--target", required=True, help="learner's gRPC endpoint")
    parser.add_argument("--run", required=True, help="name of the run, which exists")
    parser.add_argument("--task", choices=tasks.TASKS, required=True, help="what to reward")
    parser.add_argument("--seed", type=int, required=True, help="seed of the split and of the order of prompts")
    parser.add_argument("--in-flight", type=int, default=8, help="groups sampled or scored at the same time")
    given = parser.parse_args(argv)
    task = tasks.make_task(given.task, given.seed)
    try:
        with Client(given.target) as client:
            for report in client.train(given.run, prompts(task, given.seed), score, concurrency=given.in_flight):
                sys.stdout.write(f"step {report.step}: mean reward {report.metrics.get('reward_mean', 0):.3f}\n")
                sys.stdout.flush()
    except QerldError as error:
        sys.stderr.write(f"reward client: {error}\n")
        return 1
    return 0


def prompts(task: tasks.Task, seed: int) -> Iterator[Task]:
    """Training prompts without end; each carries its answer as a label, so that scoring needs no memory."""
    for item in task.prompts(seed):
        yield Task(task.messages(item), labels={"answer": item.answer})


def score(rollout: common_pb2.Rollout) -> float:
    stopped = rollout.finish_reason == common_pb2.FINISH_REASON_STOP
    return tasks.reward(rollout.labels["answer"], rollout.text, stopped)


if __name__ == "__main__":
    sys.exit(main())
