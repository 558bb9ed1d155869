"""Bad input over the wire: code, field, and a message with limit, value and way out. Nothing is stored."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from qerld.v1 import common_pb2, policy_pb2, reward_pb2, rollout_pb2, run_pb2
from support.api import Api, failure, import_request, new_id, retry_seconds, reward, sample_request, segment, violations

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
Sampling = common_pb2.Sampling


def prompt(**form: Any) -> common_pb2.Prompt:
    return common_pb2.Prompt(**form)


def ids(*values: int) -> common_pb2.Prompt:
    return prompt(ids=common_pb2.TokenIds(ids=values))


def chat(*turns: tuple[str, str]) -> common_pb2.Prompt:
    messages = [common_pb2.Message(role=role, content=content) for role, content in turns]
    return prompt(messages=common_pb2.Messages(messages=messages))


def with_unknown_field(number: int) -> Sampling:
    """A Sampling as a newer client would send it: `number` as a varint field that this version does not have."""
    return Sampling.FromString(Sampling(seed=1).SerializeToString() + bytes([number << 3, 1]))


SAMPLE_CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"request_id": ""}, "request_id", "got 0"),
    ({"request_id": "x" * 129}, "request_id", "got 129"),
    ({"run": ""}, "run", "must not be empty"),
    ({"prompt": prompt()}, "prompt.form", "must not be empty"),
    ({"prompt": prompt(text="")}, "prompt.text", "must not be empty"),
    ({"prompt": chat()}, "prompt.messages", "must not be empty"),
    ({"prompt": ids()}, "prompt.ids", "must not be empty"),
    ({"prompt": ids(1, 512)}, "prompt.ids.ids[1]", "id 512 is outside the vocabulary 0..511"),
    ({"prompt": ids(-1)}, "prompt.ids.ids[0]", "id -1"),
    ({"prompt": ids(*[5] * 512)}, "prompt.ids", "context of 512 tokens, has 512"),
    ({"prompt": prompt(text="seven " * 600)}, "prompt.text", "context of 512 tokens"),
    ({"prompt": prompt(text="h" * 10_000_000)}, "prompt.text", "has 10000000 characters"),
    ({"prompt": chat(("tool", "x"))}, "prompt.messages.messages[0].role", "'tool' is not one of"),
    ({"group_size": 0}, "group_size", "from 2 to 1024, got 0"),
    ({"group_size": 1}, "group_size", "from 2 to 1024, got 1"),
    ({"group_size": 2**31}, "group_size", "from 2 to 1024, got 2147483648"),
    ({"sampling": Sampling(temperature=0)}, "sampling.temperature", "above 0, got 0"),
    ({"sampling": Sampling(temperature=-1)}, "sampling.temperature", "above 0, got -1"),
    ({"sampling": Sampling(temperature=math.nan)}, "sampling.temperature", "finite and above 0, got nan"),
    ({"sampling": Sampling(temperature=math.inf)}, "sampling.temperature", "finite and above 0, got inf"),
    ({"sampling": Sampling(temperature=0.7)}, "sampling.temperature", "must be the run's 1, at which it trains"),
    ({"sampling": Sampling(max_tokens=0)}, "sampling.max_tokens", "from 1 to 512, got 0"),
    ({"sampling": Sampling(max_tokens=513)}, "sampling.max_tokens", "got 513"),
    ({"sampling": Sampling(seed=2**64 - 1)}, "sampling.seed", "must be at most"),
    ({"sampling": Sampling(stop_ids=[600])}, "sampling.stop_ids[0]", "id 600"),
    ({"sampling": Sampling(stop_strings=[""])}, "sampling.stop_strings[0]", "got 0"),
    ({"sampling": Sampling(stop_strings=["a"] * 65)}, "sampling.stop_strings", "at most 64 entries, got 65"),
    ({"sampling": with_unknown_field(6)}, "sampling.6", "changes the behaviour distribution"),
    ({"sampling": with_unknown_field(15)}, "sampling.15", "field number 15 is not known here"),
    ({"labels": {"": "x"}}, "labels", "keys must have 1 to 63 characters, got 0"),
    ({"labels": {"k": "x" * 4097}}, "labels[k]", "at most 4096 characters, got 4097"),
    ({"labels": {str(i): "" for i in range(33)}}, "labels", "at most 32 entries, got 33"),
    ({"reward_deadline": Duration(seconds=0)}, "reward_deadline", "above 0"),
    ({"reward_deadline": Duration(seconds=10**9)}, "reward_deadline", "at most 2.592e+06"),
]


@pytest.mark.parametrize(
    ("changes", "field", "text"), SAMPLE_CASES, ids=[case[1] + str(i) for i, case in enumerate(SAMPLE_CASES)]
)
async def test_sample_refuses(api: Api, shared_run: str, changes: dict[str, Any], field: str, text: str) -> None:
    error = await failure(api.rollouts.Sample(sample_request(shared_run, **changes), timeout=60))
    assert error.code() is INVALID
    assert text in violations(error)[field]
    groups = await api.rollouts.ListGroups(rollout_pb2.ListGroupsRequest(run=shared_run), timeout=60)
    assert list(groups.groups) == []


async def test_all_problems_come_at_once(api: Api, shared_run: str) -> None:
    request = sample_request(shared_run, group_size=1, prompt=prompt(), sampling=Sampling(temperature=-1))
    error = await failure(api.rollouts.Sample(request, timeout=60))
    assert set(violations(error)) == {"group_size", "prompt.form", "sampling.temperature"}


async def test_submit_prompts_names_the_item(api: Api, shared_run: str) -> None:
    items = [rollout_pb2.PromptItem(prompt=ids(5)), rollout_pb2.PromptItem(prompt=ids(5), group_size=1)]
    request = rollout_pb2.SubmitPromptsRequest(run=shared_run, request_id=new_id(), prompts=items)
    error = await failure(api.rollouts.SubmitPrompts(request, timeout=60))
    assert set(violations(error)) == {"prompts[1].group_size"}
    many = [rollout_pb2.PromptItem(prompt=ids(5), group_size=1024)] * 17
    request = rollout_pb2.SubmitPromptsRequest(run=shared_run, request_id=new_id(), prompts=many)
    assert (
        "at most 16384 rollouts"
        in violations(await failure(api.rollouts.SubmitPrompts(request, timeout=60)))["prompts"]
    )
    empty = rollout_pb2.SubmitPromptsRequest(run=shared_run, request_id=new_id())
    assert "got 0" in violations(await failure(api.rollouts.SubmitPrompts(empty, timeout=60)))["prompts"]


SEGMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"tokens": common_pb2.TokenIds(), "logprobs": []}, ".tokens", "must not be empty"),
    ({"tokens": common_pb2.TokenIds(ids=[999] * 3)}, ".tokens.ids[0]", "id 999"),
    ({"logprobs": [-1.0]}, ".logprobs", "must have 3 entries (one a token), got 1"),
    ({"logprobs": [-1.0, math.nan, -1.0]}, ".logprobs[1]", "got nan"),
    ({"logprobs": [-1.0, 0.5, -1.0]}, ".logprobs[1]", "from -1000 to 0, got 0.5"),
    ({"logprobs": [-1.0, -1e30, -1.0]}, ".logprobs[1]", "from -1000 to 0, got -1e+30"),
    ({"logprobs": [-1.0, -1.0, -math.inf]}, ".logprobs[2]", "from -1000 to 0, got -inf"),
    ({"version": 2**64 - 1}, ".version", "got 18446744073709551615"),
    ({"trainable": False}, ".logprobs", "must have 0 entries"),
]


@pytest.mark.parametrize(("changes", "field", "text"), SEGMENTS)
async def test_import_refuses_segments(
    api: Api, shared_run: str, changes: dict[str, Any], field: str, text: str
) -> None:
    request = import_request(shared_run)
    request.trajectories[1].segments[0].CopyFrom(segment(**changes))
    error = await failure(api.rollouts.ImportTrajectories(iter([request]), timeout=60))
    assert error.code() is INVALID
    assert text in violations(error)[f"message[0].trajectories[1].segments[0]{field}"]


async def test_import_refuses_shapes_of_groups(api: Api, shared_run: str) -> None:
    request = import_request(shared_run, size=1)
    request.trajectories[0].finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
    error = await failure(api.rollouts.ImportTrajectories(iter([request]), timeout=60))
    found = violations(error)
    assert "2 to 1024 entries, got 1" in found["message[0].trajectories"]
    assert "got number 0" in found["message[0].trajectories[0].finish_reason"]


async def test_import_refuses_a_version_that_was_never_made(api: Api, shared_run: str) -> None:
    request = import_request(shared_run)
    request.trajectories[0].segments[0].version = 77
    error = await failure(api.rollouts.ImportTrajectories(iter([request]), timeout=60))
    assert error.code() in (INVALID, NOT_FOUND)
    assert "77" in str(error.details())


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"group_size": 1}, "config.group_size"),
    ({"temperature": 0.0}, "config.temperature"),
    ({"temperature": math.nan}, "config.temperature"),
    ({"temperature": 1e-30}, "config.temperature"),
    ({"temperature": 0.009}, "config.temperature"),  # vLLM would sample at 0.01 without a word
    ({"temperature": 2.1}, "config.temperature"),  # vLLM refuses it
    ({"lora": run_pb2.LoraConfig(alpha=1e300)}, "config.lora.alpha"),
    ({"lora": run_pb2.LoraConfig(target_modules=["q_proj"] * 65)}, "config.lora.target_modules"),
    ({"lora": run_pb2.LoraConfig(target_modules=["q" * 129])}, "config.lora.target_modules"),
    ({"lora": run_pb2.LoraConfig(target_modules=["q_proj", "qkv"])}, "config.lora.target_modules"),
    ({"lora": run_pb2.LoraConfig(target_modules=["lm_head"])}, "config.lora.target_modules"),
    ({"optimizer": run_pb2.Optimizer(kind=run_pb2.OPTIMIZER_KIND_ADAMW_8BIT)}, "config.optimizer.kind"),
    ({"optimizer": run_pb2.Optimizer(kind=99)}, "config.optimizer.kind"),  # type: ignore[arg-type]
    ({"optimizer": run_pb2.Optimizer(schedule=run_pb2.LEARNING_RATE_SCHEDULE_COSINE)}, "config.schedule_steps"),
    ({"noise": run_pb2.AdaptiveNoise(schedule=4, sigma_start=1, sigma_end=1)}, "config.schedule_steps"),  # type: ignore[arg-type]
    ({"noise": run_pb2.AdaptiveNoise(dtype=99)}, "config.noise.dtype"),  # type: ignore[arg-type]
    ({"max_sampling_rounds": 2**32 - 1}, "config.max_sampling_rounds"),
    ({"noise": run_pb2.AdaptiveNoise(sigma_start=math.inf)}, "config.noise.sigma_start"),
    ({"noise": run_pb2.AdaptiveNoise(schedule=2)}, "config.noise.sigma_start"),  # type: ignore[arg-type]
    ({"noise": run_pb2.AdaptiveNoise(schedule=2, sigma_start=1, sigma_end=2)}, "config.noise.sigma_end"),  # type: ignore[arg-type]
    ({"noise": run_pb2.AdaptiveNoise(schedule=2, sigma_start=1, stages=1)}, "config.noise.stages"),  # type: ignore[arg-type]
    ({"max_steps": 2**64 - 1}, "config.max_steps"),
    ({"canary_tolerance": math.nan}, "config.canary_tolerance"),
    ({"lora": run_pb2.LoraConfig(rank=100_000)}, "config.lora.rank"),
    ({"optimizer": run_pb2.Optimizer(learning_rate=math.inf)}, "config.optimizer.learning_rate"),
    ({"optimizer": run_pb2.Optimizer(beta1=1.0)}, "config.optimizer.beta1"),
    ({"algorithm": run_pb2.Algorithm(clip_low=-0.1)}, "config.algorithm.clip_low"),
    ({"algorithm": run_pb2.Algorithm(advantage=99)}, "config.algorithm.advantage"),  # type: ignore[arg-type]
    ({"algorithm": run_pb2.Algorithm(preset=99)}, "config.algorithm.preset"),  # type: ignore[arg-type]
    ({"algorithm": run_pb2.Algorithm(clip_low=0.3)}, "config.algorithm.clip_low"),  # above clip_high's default
    ({"algorithm": run_pb2.Algorithm(mini_batches=5)}, "config.algorithm.mini_batches"),
    ({"algorithm": run_pb2.Algorithm(old_policy=run_pb2.OLD_POLICY_BEHAVIOUR)}, "config.algorithm.old_policy"),
    ({"group_size": 1}, "config.group_size"),
    ({"seed": 2**64 - 1}, "config.seed"),
    ({"reward_deadline": Duration(seconds=-1)}, "config.reward_deadline"),
]


@pytest.mark.parametrize(("config", "field"), CONFIGS)
async def test_create_run_refuses(api: Api, config: dict[str, Any], field: str) -> None:
    request = run_pb2.CreateRunRequest(run="never", request_id=new_id(), config=run_pb2.RunConfig(**config))
    error = await failure(api.runs.CreateRun(request, timeout=60))
    assert error.code() is INVALID
    assert field in violations(error)
    assert (await failure(api.runs.GetRun(run_pb2.GetRunRequest(run="never")))).code() is NOT_FOUND


@pytest.mark.parametrize("name", ["", "Upper", "a b", "ä", "x" * 64, "../x"])
async def test_create_run_refuses_names(api: Api, name: str) -> None:
    error = await failure(api.runs.CreateRun(run_pb2.CreateRunRequest(run=name, request_id=new_id()), timeout=60))
    assert "a-z, 0-9" in violations(error)["run"]


async def test_create_run_refuses_an_adapter_of_another_shape(api: Api, shared_run: str) -> None:
    policy = common_pb2.Policy(run=shared_run, version=0)
    download = api.policies.DownloadAdapter(policy_pb2.DownloadAdapterRequest(policy=policy), timeout=60)
    adapter = b"".join([chunk.data async for chunk in download])
    config = run_pb2.RunConfig(lora=run_pb2.LoraConfig(rank=3))
    for weights, text in ((b"not safetensors", "cannot be read"), (adapter, "shape")):
        request = run_pb2.CreateRunRequest(run="shape", request_id=new_id(), config=config, initial_adapter=weights)
        error = await failure(api.runs.CreateRun(request, timeout=120))
        assert error.code() is INVALID, error.details()
        assert text in violations(error)["initial_adapter"]
    assert (await failure(api.runs.GetRun(run_pb2.GetRunRequest(run="shape")))).code() is NOT_FOUND


async def test_unknown_things_are_not_found(api: Api, shared_run: str) -> None:
    policy = common_pb2.Policy(run=shared_run, version=99)
    calls = [
        api.runs.GetRun(run_pb2.GetRunRequest(run="nobody")),
        api.runs.WatchRun(run_pb2.WatchRunRequest(run="nobody")),
        api.runs.PauseRun(run_pb2.PauseRunRequest(run="nobody", request_id=new_id())),
        api.rollouts.Sample(sample_request("nobody")),
        api.rollouts.GetRollout(rollout_pb2.GetRolloutRequest(rollout_id="nothing")),
        api.rollouts.ListGroups(rollout_pb2.ListGroupsRequest(run="nobody")),
        api.rollouts.ImportTrajectories(iter([import_request("nobody")])),
        api.rewards.GetReceipt(reward_pb2.GetReceiptRequest(rollout_id="nothing")),
        api.rewards.WatchReceipts(reward_pb2.WatchReceiptsRequest(run="nobody")),
        api.rewards.SubmitRewards(
            reward_pb2.SubmitRewardsRequest(run="nobody", request_id=new_id(), outcomes=[reward("x", 1)])
        ),
        api.rewards.CheckRewards(reward_pb2.CheckRewardsRequest(run="nobody", outcomes=[reward("x", 1)])),
        api.policies.GetPolicy(policy_pb2.GetPolicyRequest(run=shared_run, version=99)),
        api.policies.GetPolicy(policy_pb2.GetPolicyRequest(run=shared_run, version=2**64 - 17)),
        api.policies.WatchPolicy(policy_pb2.WatchPolicyRequest(run="nobody")),
        api.policies.ListVersions(policy_pb2.ListVersionsRequest(run="nobody")),
        api.policies.DownloadAdapter(policy_pb2.DownloadAdapterRequest(policy=policy)),
    ]
    for call in calls:
        error = await failure(call)
        assert error.code() is NOT_FOUND, error
        assert any(name in str(error.details()) for name in ("nobody", "nothing", "99", "x"))


async def test_numbers_beyond_the_store_are_refused(api: Api, shared_run: str) -> None:
    for step in (2**63, 2**64 - 1):
        watch = api.runs.WatchRun(run_pb2.WatchRunRequest(run=shared_run, after_step=step), timeout=60)
        assert f"got {step}" in violations(await failure(watch))["after_step"]
    quiet = api.runs.WatchRun(run_pb2.WatchRunRequest(run=shared_run, after_step=2**63 - 1), timeout=1)
    assert (await failure(quiet)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_status_fits_into_its_trailers(api: Api) -> None:
    """Trailers beyond 8 KiB are refused by peers, and the call then looks broken: INTERNAL or UNKNOWN."""
    error = await failure(api.runs.GetRun(run_pb2.GetRunRequest(run="🜁" * 5000), timeout=60))
    assert error.code() is NOT_FOUND
    wrong = sample_request("🜁" * 5000, prompt=prompt(), labels={f"{i}🜁": "x" * 5000 for i in range(100)})
    wrong.request_id = ""
    error = await failure(api.rollouts.Sample(wrong, timeout=60))
    assert error.code() in (INVALID, NOT_FOUND)
    assert sum(len(key) + len(value) for key, value in error.trailing_metadata() or ()) < 4000


async def test_download_refuses_files_and_offsets(api: Api, shared_run: str) -> None:
    policy = common_pb2.Policy(run=shared_run, version=0)
    for file in ("../store.sqlite", "state.safetensors"):
        request = policy_pb2.DownloadAdapterRequest(policy=policy, file=file)
        assert "must be one of" in violations(await failure(api.policies.DownloadAdapter(request)))["file"]
    request = policy_pb2.DownloadAdapterRequest(policy=policy, offset=1 << 40)
    assert "begin at 0" in violations(await failure(api.policies.DownloadAdapter(request)))["offset"]


async def test_pages_are_bounded(api: Api, shared_run: str) -> None:
    request = rollout_pb2.ListGroupsRequest(run=shared_run, page_size=1001)
    assert "at most 1000, got 1001" in violations(await failure(api.rollouts.ListGroups(request)))["page_size"]
    for token in ("garbage", "9" * 30):
        request = rollout_pb2.ListGroupsRequest(run=shared_run, page_token=token)
        assert token in violations(await failure(api.rollouts.ListGroups(request)))["page_token"]


async def test_a_full_queue_says_when_to_retry(api: Api, run: str) -> None:
    """Without a policy server six groups fill the buffer, and 64 more the queue."""

    async def submit(count: int) -> int:
        items = [rollout_pb2.PromptItem(prompt=ids(5))] * count
        request = rollout_pb2.SubmitPromptsRequest(run=run, request_id=new_id(), prompts=items)
        return len((await api.rollouts.SubmitPrompts(request, timeout=60)).group_ids)

    async def states() -> Counter[int]:
        request = rollout_pb2.ListGroupsRequest(run=run, page_size=1000)
        return Counter(group.state for group in (await api.rollouts.ListGroups(request, timeout=60)).groups)

    error = await failure(submit(65))
    assert error.code() is INVALID
    assert "at most 64 (queue_limit), got 65" in violations(error)["prompts"]
    assert await submit(6) == 6
    async with asyncio.timeout(60):
        while (await states())[rollout_pb2.GROUP_STATE_QUEUED]:  # noqa: ASYNC110 - over the wire
            await asyncio.sleep(0.05)
    assert await submit(60) == 60
    error = await failure(submit(5))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_seconds(error) == 2.0
    assert "60 groups queued and would have 65, the limit is 64 (queue_limit)" in str(error.details())
    assert await submit(4) == 4
    assert await states() == {rollout_pb2.GROUP_STATE_SAMPLING: 6, rollout_pb2.GROUP_STATE_QUEUED: 64}


async def test_a_full_buffer_says_when_to_retry(api: Api, run: str) -> None:
    """Without a policy server nothing leaves the buffer: what was admitted stays, the next one is told to wait."""
    calls = [api.rollouts.Sample(sample_request(run), timeout=60) for _ in range(64)]
    opened, refused = 0, []
    for call in calls:
        try:
            opened += (await call.read()).HasField("opened")
        except grpc.aio.AioRpcError as error:
            refused.append(error)
        call.cancel()
    assert opened > 0
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(retry_seconds(error) == 2.0 for error in refused)
    # The clients are gone, their groups are not.
    groups = (await api.rollouts.ListGroups(rollout_pb2.ListGroupsRequest(run=run))).groups
    assert len(groups) == opened
