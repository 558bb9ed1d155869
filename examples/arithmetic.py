"""Teach the live policy to add: the whole loop of a reward author, against a running `qerld serve`.

    qerld serve --model FOLDER            # in one terminal
    python examples/arithmetic.py         # in another

Sampling, rewards and training all happen at the same time: while this script scores some rollouts, the learner trains
on others, and the policy server swaps in each new version without stopping.
"""

import argparse
import itertools
import random
from collections.abc import Iterator

from qerld_client import AdaptiveNoise, Client, NoiseSchedule, Optimizer, Rollout, RunConfig, RunReport, Task

SHOTS = [(2, 3), (4, 1), (3, 3)]


def question(a: int, b: int) -> str:
    return f"What is {a} plus {b}?"


def chat(a: int, b: int) -> list[dict[str, str]]:
    """Return the sum as a chat, after three solved ones: a small model needs to see the form of the answer."""
    turns = []
    for x, y in SHOTS:
        turns.append({"role": "user", "content": question(x, y)})
        turns.append({"role": "assistant", "content": f"The answer is {x + y}."})
    return [*turns, {"role": "user", "content": question(a, b)}]


def tasks(seed: int) -> Iterator[Task]:
    """Yield sums without end. Labels come back with each rollout, so the reward function needs no memory."""
    draw = random.Random(seed)
    while True:
        a, b = draw.randint(0, 9), draw.randint(0, 9)
        yield Task(chat(a, b), labels={"answer": f"The answer is {a + b}."})


def reward(rollout: Rollout) -> float:
    """Return 1 for exactly the right answer, else 0. If this raised, the service would store an error, not a zero."""
    return float(rollout.text.strip() == rollout.labels["answer"])


def run_config(steps: int) -> RunConfig:
    """Return GRPO with adaptive quantisation noise; everything not named here has its default."""
    return RunConfig(
        optimizer=Optimizer(learning_rate=3e-4),
        noise=AdaptiveNoise(
            schedule=NoiseSchedule.NOISE_SCHEDULE_EXPONENTIAL, sigma_start=1e-2, sigma_end=5e-4, relative=True
        ),
        group_size=8,
        groups_per_step=4,
        max_tokens=12,
        max_steps=steps,
    )


def show(report: RunReport) -> None:
    numbers = report.metrics
    print(
        f"step {report.step:3d}  version {report.version:3d}  reward {numbers['reward_mean']:.2f}"
        f"  entropy {numbers['entropy']:.2f}  sigma {numbers['sigma']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="localhost:50051", help="host:port of the learner")
    parser.add_argument("--run", default="arithmetic", help="name of the run; an existing one goes on")
    parser.add_argument("--steps", type=int, default=30, help="learner steps of a new run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sums")
    arguments = parser.parse_args()

    with Client(arguments.target) as client:
        client.create_run(arguments.run, run_config(arguments.steps), exist_ok=True)

        # One group by hand: sample it, score it, reward it.
        first = next(tasks(arguments.seed))
        group = client.sample(arguments.run, first.prompt, labels=first.labels)
        for rollout in group.rollouts:
            print(f"{reward(rollout):.0f}  {rollout.text.strip()!r}")
        client.submit_rewards(arguments.run, {rollout.rollout_id: reward(rollout) for rollout in group.rollouts})

        # And the loop: several groups in flight, one report a learner step, until max_steps.
        rewards = []
        for report in client.train(arguments.run, itertools.islice(tasks(arguments.seed), 1, None), reward):
            show(report)
            rewards.append(report.metrics["reward_mean"])

        folder = client.download_adapter(arguments.run, f"runs/{arguments.run}/adapter")
        print(f"first steps {mean(rewards[:5]):.2f}, last steps {mean(rewards[-5:]):.2f}; adapter in {folder}")


def mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


if __name__ == "__main__":
    main()
