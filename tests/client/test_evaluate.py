"""Evaluation with everything real: versions without noise through Evaluate, inside a run, and by `qerld eval`."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from qerld.v1 import common_pb2, policy_pb2
from qerld_client import (
    AdaptiveNoise,
    AsyncClient,
    HeldOutEvaluation,
    InvalidRequestError,
    LoraConfig,
    NoiseSchedule,
    NotFoundError,
    Optimizer,
    QerldError,
    Rollout,
    RunConfig,
    RunReport,
    Sampling,
    Task,
)
from qerld_eval import chat, read_problems
from qerld_learner.metrics import EVALUATION_GAUGES
from qerld_service import cli
from support.policy import until

from .conftest import Target, loop_of, policy_of, serving_learner

if TYPE_CHECKING:
    from qerld_service.engine import PolicyEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]
STEPS = 3
STOP = common_pb2.FINISH_REASON_STOP
RIGHT, WRONG = 5, 3
TOKENS = 24
QUESTIONS = [f"What comes after {number}?" for number in range(600)]


def config(**changes: object) -> RunConfig:
    """A run whose weights hardly change, under noise that changes what a policy says."""
    wanted: dict[str, object] = {
        "lora": LoraConfig(rank=8),
        "optimizer": Optimizer(learning_rate=1e-12),
        "noise": AdaptiveNoise(
            schedule=NoiseSchedule.NOISE_SCHEDULE_EXPONENTIAL, sigma_start=0.5, sigma_end=0.5, stages=2, relative=True
        ),
        "group_size": 4,
        "groups_per_step": 2,
        "max_tokens": TOKENS,
        "max_steps": STEPS,
        "canary_tolerance": 1.0,
    }
    return RunConfig(**wanted | changes)  # type: ignore[arg-type]


def reward(rollout: Rollout) -> float:
    return -sum(rollout.completion.ids) / (512.0 * len(rollout.completion.ids))


async def train(client: AsyncClient, run: str) -> list[RunReport]:
    tasks = [Task([{"role": "user", "content": f"question {i}"}]) for i in range(200)]
    async with asyncio.timeout(240):
        return [report async for report in client.train(run, tasks, reward)]


async def completions(
    client: AsyncClient, run: str, version: int, prompts: list[list[dict[str, str]]], **more: object
) -> dict[tuple[int, int], policy_pb2.EvaluateResponse]:
    stream = client.evaluate(run, version, prompts, timeout=120, **more)  # type: ignore[arg-type]
    return {(one.prompt_index, one.sample_index): one async for one in stream}


@dataclass(frozen=True, repr=False)
class World:
    """A service, a run "held-out" that was trained to its end, and its problems: greedy gets `RIGHT` of them right."""

    target: Target
    client: AsyncClient
    engine: PolicyEngine
    file: Path
    prompts: list[list[dict[str, str]]]
    reports: list[RunReport]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("evaluation")
    file = folder / "problems.jsonl"
    loop = loop_of(engine, tiny_model[1], folder, evaluation_dir=folder)
    async with loop as target, AsyncClient(target.address) as client:
        # A random model answers nothing, but what it says is known: with hardly any training all versions say the same.
        # Right can only be what is not cut off, which is rare.
        await client.create_run("first", config())
        plain = [[{"role": "user", "content": question}] for question in QUESTIONS]
        said = await completions(client, "first", 0, plain, greedy=True)
        await client.delete_run("first")
        ended = [i for i in range(len(QUESTIONS)) if said[i, 0].finish_reason == STOP and said[i, 0].text.strip()]
        right = [json.dumps({"prompt": QUESTIONS[i], "answer": said[i, 0].text}) for i in ended[:RIGHT]]
        wrong = [json.dumps({"prompt": QUESTIONS[i], "answer": "123456789"}) for i in ended[-WRONG:]]
        assert len(set(right) | set(wrong)) == RIGHT + WRONG
        lines = right + wrong
        file.write_text("\n".join(lines), encoding="utf-8")
        evaluation = HeldOutEvaluation(every_steps=2, file=file.name)
        await client.create_run("held-out", config(evaluation=evaluation))
        reports = await train(client, "held-out")
        yield World(target, client, engine, file, [chat(p) for p in read_problems(file)], reports)


async def test_every_second_and_the_last_step_are_evaluated_without_noise(world: World) -> None:
    found = [{k: v for k, v in report.metrics.items() if k.startswith("eval_")} for report in world.reports]
    assert [bool(metrics) for metrics in found] == [False, True, True]
    for metrics in found[1:]:
        assert metrics["eval_accuracy"] == RIGHT / (RIGHT + WRONG) == metrics["eval_pass_at_k"]
        assert metrics["eval_accuracy_low"] < metrics["eval_accuracy"] < metrics["eval_accuracy_high"]
        assert (metrics["eval_problems"], metrics["eval_samples"], metrics["eval_unjudged"]) == (8, 1, 0)
        assert 0 < metrics["eval_tokens_mean"] <= TOKENS
        assert metrics["eval_failed"] == 0
    assert world.reports[-1].metrics["sigma"] == 0.5  # under which a policy says something else
    assert ["evaluate" in report.phase_seconds for report in world.reports] == [False, True, True]


async def test_the_gauges_are_those_of_the_last_report(world: World) -> None:
    url = f"http://127.0.0.1:{world.target.metrics_port}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read())).decode()
    values = dict(line.rpartition(" ")[::2] for line in text.splitlines())
    last = world.reports[-1].metrics
    for name in EVALUATION_GAUGES:
        assert float(values[f'qerld_{name}{{run="held-out"}}']) == last[name], name


async def test_greedy_is_the_same_each_time_and_whatever_the_noise(world: World) -> None:
    first = await completions(world.client, "held-out", 0, world.prompts, greedy=True, samples=9)
    assert sorted(first) == [(i, 0) for i in range(len(world.prompts))]
    last = await completions(world.client, "held-out", STEPS, world.prompts, greedy=True)
    for key, one in first.items():
        assert list(one.completion.ids) == list(last[key].completion.ids)
        assert one.text == last[key].text
        assert len(one.logprobs) == len(one.completion.ids) <= TOKENS
        assert one.finish_reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)


async def test_samples_depend_on_their_seed_alone(world: World) -> None:
    sampling = Sampling(temperature=1.5, max_tokens=5, seed=7)
    three = await completions(world.client, "held-out", STEPS, world.prompts, samples=3, sampling=sampling)
    assert sorted(three) == [(i, s) for i in range(len(world.prompts)) for s in range(3)]
    assert len({tuple(one.completion.ids) for one in three.values()}) > len(world.prompts)
    alone = Sampling(temperature=1.5, max_tokens=5, seed=7 + 2 * 3 + 1)
    one = await completions(world.client, "held-out", STEPS, [world.prompts[2]], sampling=alone)
    assert list(one[0, 0].completion.ids) == list(three[2, 1].completion.ids)


async def test_an_old_version_is_loaded_for_its_evaluation_only(world: World) -> None:
    """And one beyond the slots, while others are needed, is refused with the way out."""

    async def loaded() -> set[int]:
        (replica,) = await world.client.list_replicas()
        return {policy.version for policy in replica.loaded if policy.run == "held-out"}

    async def only_the_live_one() -> None:
        async with asyncio.timeout(60):
            while await loaded() != {STEPS}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    await only_the_live_one()
    assert await completions(world.client, "held-out", 1, world.prompts[:1], greedy=True)
    await only_the_live_one()
    # Three versions fit: hold two old ones beside the live one.
    long = Sampling(max_tokens=200, temperature=2.0)
    held = [world.client.evaluate("held-out", v, world.prompts * 50, sampling=long, timeout=200) for v in (0, 1)]
    for stream in held:
        await anext(aiter(stream))
    with pytest.raises(QerldError, match="max_loras"):
        await anext(aiter(world.client.evaluate("held-out", 2, world.prompts[:1], timeout=20)))
    for stream in held:
        await stream.aclose()
    await until(lambda: sum(world.engine.stats.in_flight.values()) == 0)
    await only_the_live_one()


async def test_closing_the_stream_ends_the_sampling(world: World) -> None:
    long = Sampling(max_tokens=200, temperature=2.0)
    stream = world.client.evaluate("held-out", STEPS, world.prompts * 100, samples=4, sampling=long, timeout=200)
    await anext(aiter(stream))
    assert sum(world.engine.stats.in_flight.values()) > 0
    await stream.aclose()
    await until(lambda: sum(world.engine.stats.in_flight.values()) == 0)


async def test_a_deadline_ends_the_sampling_too(world: World) -> None:
    long = Sampling(max_tokens=200, temperature=2.0)
    with pytest.raises(QerldError):
        async for _ in world.client.evaluate("held-out", STEPS, world.prompts * 100, sampling=long, timeout=1.0):
            pass
    await until(lambda: sum(world.engine.stats.in_flight.values()) == 0)


async def test_wrong_requests_name_the_field(world: World) -> None:
    prompt = world.prompts[:1]
    for field, call in {
        "prompts": world.client.evaluate("held-out", 0, []),
        "prompts[1].ids.ids[0]": world.client.evaluate("held-out", 0, [*prompt, [99_999]]),
        "prompts[0].text": world.client.evaluate("held-out", 0, ["word " * 5000]),
        "samples": world.client.evaluate("held-out", 0, prompt, samples=5000),
        "sampling.temperature": world.client.evaluate("held-out", 0, prompt, sampling=Sampling(temperature=3.0)),
        "sampling.max_tokens": world.client.evaluate("held-out", 0, prompt, sampling=Sampling(max_tokens=0)),
    }.items():
        with pytest.raises(InvalidRequestError) as caught:
            await anext(aiter(call))
        assert [violation.field for violation in caught.value.violations] == [field]
    for run, version in (("nobody", 0), ("held-out", 99), ("first", 0)):
        with pytest.raises(NotFoundError):
            await anext(aiter(world.client.evaluate(run, version, prompt)))


@pytest.mark.parametrize(
    ("evaluation", "field", "text"),
    [
        (HeldOutEvaluation(file="problems.jsonl"), "every_steps", "must be in [1,"),
        (HeldOutEvaluation(every_steps=1), "file", "must name a file"),
        (HeldOutEvaluation(every_steps=1, file="none.jsonl"), "file", "cannot be read"),
        (HeldOutEvaluation(every_steps=1, file="../../etc/passwd"), "file", "must be within"),
        (HeldOutEvaluation(every_steps=1, file="/etc/passwd"), "file", "must be within"),
        (HeldOutEvaluation(every_steps=1, file="problems.jsonl", samples=2, greedy=True), "greedy", "must be false"),
        (HeldOutEvaluation(every_steps=1, file="problems.jsonl", temperature=9), "temperature", "must be in [0.01"),
    ],
)
async def test_a_wrong_evaluation_is_refused_when_the_run_is_made(
    world: World, evaluation: HeldOutEvaluation, field: str, text: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await world.client.create_run("refused", config(evaluation=evaluation))
    (violation,) = caught.value.violations
    assert violation.field == f"config.evaluation.{field}"
    assert text in violation.description


async def test_an_evaluation_that_takes_too_long_does_not_stop_the_run(world: World) -> None:
    evaluation = HeldOutEvaluation(every_steps=1, file=world.file.name, max_tokens=200)
    evaluation.time_limit.FromMilliseconds(1)
    await world.client.create_run("hurried", config(evaluation=evaluation, max_steps=1))
    (report,) = await train(world.client, "hurried")
    assert {k: v for k, v in report.metrics.items() if k.startswith("eval_")} == {"eval_failed": 1}
    await world.client.delete_run("hurried")


async def test_several_samples_and_a_prompt_beyond_the_context(world: World) -> None:
    """Such a prompt counts as wrong and cut off; the others are evaluated."""
    long = world.file.with_name("long.jsonl")
    lines = [json.dumps({"problem": "word " * words, "answer": "123456789"}) for words in (1, 5000)]
    long.write_text("\n".join(lines))
    evaluation = HeldOutEvaluation(every_steps=5, file=long.name, samples=3, temperature=0.5, max_tokens=4)
    await world.client.create_run("long", config(evaluation=evaluation, max_steps=1))
    (report,) = await train(world.client, "long")  # the last step's, whatever every_steps
    metrics = report.metrics
    assert (metrics["eval_problems"], metrics["eval_samples"], metrics["eval_accuracy"]) == (2, 3, 0)
    assert metrics["eval_truncated_share"] >= 0.5
    assert 0 < metrics["eval_tokens_mean"] <= 2
    await world.client.delete_run("long")


async def test_a_pause_ends_the_evaluation_and_the_run_goes_on_with_it(world: World) -> None:
    many = world.file.with_name("many.jsonl")
    lines = [json.dumps({"question": f"What comes after {i}?", "answer": f"#### {i + 1}"}) for i in range(200)]
    many.write_text("\n".join(lines))
    evaluation = HeldOutEvaluation(
        every_steps=1, file=many.name, samples=4, max_tokens=60, temperature=2.0, problems=200
    )
    await world.client.create_run("paused", config(evaluation=evaluation, max_steps=1))
    training = asyncio.create_task(train(world.client, "paused"))
    # No rollout is sampled with version 1 before it is live: only its evaluation is.
    await until(lambda: any(key.version == 1 and count for key, count in world.engine.stats.in_flight.items()), 120)
    await world.client.pause_run("paused")
    await until(lambda: sum(world.engine.stats.in_flight.values()) == 0)
    assert (await world.client.get_run("paused")).live_version == 0
    await world.client.resume_run("paused")
    (report,) = await training
    assert (report.metrics["eval_problems"], report.metrics["eval_samples"]) == (200, 4)
    await world.client.delete_run("paused")


async def test_a_run_that_is_deleted_ends_its_evaluation(world: World) -> None:
    await world.client.create_run("doomed", config())
    long = Sampling(max_tokens=200, temperature=2.0)
    stream = world.client.evaluate("doomed", 0, world.prompts * 100, samples=4, sampling=long, timeout=200)
    await anext(aiter(stream))
    await world.client.delete_run("doomed")
    with pytest.raises(NotFoundError, match="doomed"):
        async for _ in stream:
            pass
    await until(lambda: sum(world.engine.stats.in_flight.values()) == 0)


async def test_a_server_that_goes_away_costs_nothing_but_time(
    engine: PolicyEngine, tiny_model: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(300)]
    sampling = Sampling(max_tokens=60, temperature=2.0)
    learner = serving_learner(tiny_model[1], tmp_path / "learner")
    async with learner as target, AsyncClient(target.address) as client:
        found: list[tuple[int, int]] = []

        async def collect() -> None:
            stream = client.evaluate("run", 0, prompts, samples=2, sampling=sampling, timeout=240)
            async for one in stream:
                found.append((one.prompt_index, one.sample_index))

        await client.create_run("run", config())
        collecting = asyncio.create_task(collect())
        async with policy_of(engine, tiny_model[1], target, tmp_path / "one"):
            await until(lambda: bool(found))
        assert len(found) < 2 * len(prompts)  # else nothing was lost
        async with policy_of(engine, tiny_model[1], target, tmp_path / "two"):
            async with asyncio.timeout(240):
                await collecting
    assert sorted(found) == [(i, s) for i in range(len(prompts)) for s in range(2)]


async def run_cli(*argv: str) -> int:
    """In a thread: the learner's event loop is this one."""
    return await asyncio.to_thread(cli.main, ["eval", *argv])


async def test_the_command_prints_json(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "completions.jsonl"
    flags = ["--target", world.target.address, "--run", "held-out", "--json", "--completions", str(out)]
    assert await run_cli(str(world.file), *flags) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["run"], result["version"], result["greedy"], result["problems"]) == ("held-out", STEPS, True, 8)
    estimate, last = result["estimates"]["pass@1"], world.reports[-1].metrics
    assert estimate["value"] == last["eval_accuracy"]
    assert [estimate["low"], estimate["high"]] == [last["eval_accuracy_low"], last["eval_accuracy_high"]]
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {line["problem"]: line["right"] for line in lines} == {i: i < RIGHT for i in range(RIGHT + WRONG)}


async def test_the_command_prints_a_table(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", world.target.address, "--run", "held-out", "--version", "0", "--samples", "4"]
    assert await run_cli(str(world.file), *flags, "--pass-at", "2,4", "--limit", "6") == 0
    text = capsys.readouterr().out
    for part in ("held-out@0", "4 samples at temperature 1", "avg@4", "pass@2", "pass@4", "95% interval", "problems"):
        assert part in text


async def test_the_command_says_what_is_wrong(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--target", world.target.address]
    for argv, text in (
        ([str(tmp_path / "none.jsonl")], "cannot be read"),
        ([str(world.file), "--samples", "2", "--pass-at", "1,3"], "--samples = 2, got 3"),
        ([str(world.file), "--samples", "0"], "at least 1"),
        ([str(world.file), "--completions", str(tmp_path / "no" / "x")], "there is no folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            await run_cli(*argv, *target)
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
    for argv, text in (
        (["--run", "nobody", *target], "unknown run 'nobody'"),
        (["--run", "held-out", "--version", "77", *target], "has no version 77"),
        (["--target", "127.0.0.1:1"], "UNAVAILABLE"),
    ):
        assert await run_cli(str(world.file), *argv) == 1
        assert text in capsys.readouterr().err


async def test_without_a_policy_server_the_command_says_so_at_once(
    world: World, client: AsyncClient, learner_target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    await client.create_run("nobody-serves", RunConfig(lora=LoraConfig(rank=4)))
    flags = ["--target", learner_target.address, "--run", "nobody-serves"]
    assert await run_cli(str(world.file), *flags) == 1
    assert "no policy server is attached" in capsys.readouterr().err
