"""Wire types to the learner's types, checked. `convert.py` is the other direction.

A function either returns a record or adds to its `Checks`; callers end with `checks.done()`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qerld.v1 import common_pb2, replica_pb2, reward_pb2, rollout_pb2

from qerld_learner import records, replica_records
from qerld_learner.api.checks import MAX_GROUP_SIZE, MAX_LABEL_KEY, MAX_ROLLOUT_ID, MAX_SEED, Checks
from qerld_learner.errors import InvalidRequestError
from qerld_learner.groups import least_group
from qerld_learner.outcomes import MAX_OUTCOMES
from qerld_learner.tokens import PromptTokenizer

MAX_STOPS = 64
MAX_STOP_STRING = 256
MAX_VALUES = 1 << 18
"""Rewards by turn or token in one message: the store's one writer takes half a second for so many."""
MAX_COMPONENTS = 64
LEAST_LOGPROB = -1000.0
"""Nats. No sampler draws a token of probability e^-1000 (fp32 ends at e^-103): such numbers are sentinels."""
MAX_PROMPTS = 1024
MAX_ROLLOUTS = 16_384
"""Rollouts of one SubmitPrompts: each is a row, and the store's one writer inserts them in one transaction."""
NOT_ALLOWED = (
    "training rollouts accept temperature, max_tokens, seed, stop_ids and stop_strings only, "
    "since anything else changes the behaviour distribution; leave it out"
)


_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: records.FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: records.FinishReason.LENGTH,
    common_pb2.FINISH_REASON_ABORTED: records.FinishReason.ABORTED,
}


# Longer text than this for a token of the context is refused before it costs seconds to tokenise.
CHARACTERS_A_TOKEN = 32
SLACK_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class PromptLimits:
    """What a prompt is checked against: its run, the tokenizer, and the context in tokens."""

    config: records.RunConfig
    tokenizer: PromptTokenizer
    context: int


def prompt_ids(checks: Checks, prompt: common_pb2.Prompt, limits: PromptLimits, field: str) -> tuple[int, ...]:
    """Return the ids of a prompt: not empty, in the vocabulary, with room for a completion in the context."""
    form = prompt.WhichOneof("form")
    empty = {
        None: "form",
        "messages": "messages" if not prompt.messages.messages else "",
        "text": "text" if not prompt.text else "",
        "ids": "ids" if not prompt.ids.ids else "",
    }[form]
    if empty:
        checks.add(f"{field}.{empty}", "must not be empty; send messages, text or ids")
        return ()
    characters = len(prompt.text) + sum(len(turn.content) for turn in prompt.messages.messages)
    most = SLACK_CHARACTERS + CHARACTERS_A_TOKEN * limits.context
    if characters > most:
        limit = f"must leave room in the context of {limits.context} tokens, has {characters} characters"
        checks.add(f"{field}.{form}", f"{limit}; more than {most} are not even tokenised: shorten it")
        return ()
    ids = _tokenise(checks, prompt, limits.tokenizer, field)
    if len(ids) >= limits.context:
        limit = f"must leave room in the context of {limits.context} tokens, has {len(ids)}"
        checks.add(f"{field}.{form}", f"{limit}; shorten it or serve a longer context")
    return ids


def _tokenise(checks: Checks, prompt: common_pb2.Prompt, tokenizer: PromptTokenizer, field: str) -> tuple[int, ...]:
    match prompt.WhichOneof("form"):
        case "messages":
            turns = [(turn.role, turn.content) for turn in prompt.messages.messages]
            try:
                return tokenizer.from_messages(turns, f"{field}.messages")
            except InvalidRequestError as error:
                checks.violations.extend(error.violations)
                return ()
        case "text":
            return tokenizer.from_text(prompt.text)
        case _:
            checks.violations.extend(tokenizer.check_ids(prompt.ids.ids, f"{field}.ids.ids"))
            return tuple(prompt.ids.ids)


def group_size(checks: Checks, message: Any, config: records.RunConfig, field: str) -> int:
    """Return the group size of a request, or the run's when it is unset."""
    size: int = message.group_size if message.HasField("group_size") else config.group_size
    if not least_group(config) <= size <= MAX_GROUP_SIZE:
        way_out = "advantages are relative to the group; leave it unset for the run's"
        checks.add(field, f"must be from {least_group(config)} to {MAX_GROUP_SIZE}, got {size}; {way_out}")
    return size


def sampling(checks: Checks, message: common_pb2.Sampling, limits: PromptLimits, field: str) -> records.SamplingSpec:
    """Return the sampling rules with the run's defaults; an unset seed is drawn here and recorded with the group."""
    spec = sampling_at_any_temperature(checks, message, limits, field)
    _temperature(checks, spec.temperature, limits.config, f"{field}.temperature")
    return spec


def sampling_at_any_temperature(
    checks: Checks, message: common_pb2.Sampling, limits: PromptLimits, field: str
) -> records.SamplingSpec:
    """Do as `sampling`, but leave the temperature to the caller to check: only training needs the run's."""
    config = limits.config
    checks.no_unknown_fields(field, message, NOT_ALLOWED)
    temperature = message.temperature if message.HasField("temperature") else config.temperature
    max_tokens = message.max_tokens if message.HasField("max_tokens") else config.max_tokens
    checks.between(f"{field}.max_tokens", max_tokens, 1, limits.context, "leave it unset for the run's")
    seed = message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED)
    if seed > MAX_SEED:
        checks.add(f"{field}.seed", f"must be at most {MAX_SEED}, got {seed}; leave it unset to have one drawn")
    _stops(checks, message, limits.tokenizer, field)
    return records.SamplingSpec(
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        stop_ids=tuple(message.stop_ids),
        stop_strings=tuple(message.stop_strings),
    )


def _temperature(checks: Checks, value: float, config: records.RunConfig, field: str) -> None:
    if not (math.isfinite(value) and value > 0):
        way_out = "greedy decoding has no behaviour log-probabilities; leave it unset for the run's"
        checks.add(field, f"must be finite and above 0, got {value:g}; {way_out}")
    elif value != config.temperature:
        # The trainer computes log-probabilities at the run's temperature: another one would bias every ratio.
        way_out = "leave it unset, or create a run with this temperature"
        checks.add(field, f"must be the run's {config.temperature:g}, at which it trains, got {value:g}; {way_out}")


def _stops(checks: Checks, message: common_pb2.Sampling, tokenizer: PromptTokenizer, field: str) -> None:
    for name, count in (("stop_ids", len(message.stop_ids)), ("stop_strings", len(message.stop_strings))):
        if count > MAX_STOPS:
            checks.add(f"{field}.{name}", f"must have at most {MAX_STOPS} entries, got {count}; send fewer")
    checks.violations.extend(tokenizer.check_ids(message.stop_ids, f"{field}.stop_ids"))
    for position, text in enumerate(message.stop_strings):
        if not 1 <= len(text) <= MAX_STOP_STRING:
            limit = f"must have 1 to {MAX_STOP_STRING} characters, got {len(text)}"
            checks.add(f"{field}.stop_strings[{position}]", f"{limit}; leave it out or shorten it")


def prompt_spec(checks: Checks, message: Any, limits: PromptLimits, prefix: str = "") -> records.PromptSpec:
    """Return the prompt of a SampleRequest or a PromptItem; `prefix` is its path in the request, with the dot."""
    deadline = None
    if isinstance(message, rollout_pb2.SampleRequest) and message.HasField("reward_deadline"):
        deadline = checks.duration("reward_deadline", message.reward_deadline)
    checks.labels(message.labels, f"{prefix}labels")
    return records.PromptSpec(
        prompt_ids=prompt_ids(checks, message.prompt, limits, f"{prefix}prompt"),
        group_size=group_size(checks, message, limits.config, f"{prefix}group_size"),
        sampling=sampling(checks, message.sampling, limits, f"{prefix}sampling"),
        labels=dict(message.labels),
        reward_deadline=deadline,
    )


def imported_group(
    checks: Checks, message: rollout_pb2.ImportTrajectoriesRequest, limits: PromptLimits
) -> tuple[records.PromptSpec, list[records.TrajectorySpec]]:
    """Return prompt and trajectories of one imported group."""
    count = len(message.trajectories)
    if not 2 <= count <= MAX_GROUP_SIZE:
        checks.add("trajectories", f"must have 2 to {MAX_GROUP_SIZE} entries, got {count}; split or complete the group")
    checks.labels(message.labels)
    config = limits.config
    spec = records.PromptSpec(
        prompt_ids=prompt_ids(checks, message.prompt, limits, "prompt"),
        group_size=count,
        sampling=records.SamplingSpec(temperature=config.temperature, max_tokens=config.max_tokens, seed=0),
        labels=dict(message.labels),
    )
    room = limits.context - len(spec.prompt_ids)
    trajectories = [
        _trajectory(checks, item, room, limits.tokenizer, f"trajectories[{i}]")
        for i, item in enumerate(message.trajectories)
    ]
    return spec, trajectories


def _trajectory(
    checks: Checks, message: rollout_pb2.Trajectory, room: int, tokenizer: PromptTokenizer, field: str
) -> records.TrajectorySpec:
    segments = tuple(
        _segment(checks, item, tokenizer, f"{field}.segments[{i}]") for i, item in enumerate(message.segments)
    )
    total = sum(len(segment.ids) for segment in segments)
    if not any(segment.trainable and segment.ids for segment in segments):
        checks.add(f"{field}.segments", "must have at least one trainable token, got none; mark what the policy made")
    if total > room:
        checks.add(f"{field}.segments", f"must have at most {room} tokens after the prompt, got {total}; shorten it")
    if message.finish_reason not in _FINISH_REASONS:
        names = ", ".join(common_pb2.FinishReason.Name(number) for number in _FINISH_REASONS)
        limit = f"must be one of {names}, got number {message.finish_reason}"
        checks.add(f"{field}.finish_reason", f"{limit}; use FINISH_REASON_LENGTH for a truncated trajectory")
    reason = _FINISH_REASONS.get(message.finish_reason, records.FinishReason.ABORTED)
    return records.TrajectorySpec(segments=segments, finish_reason=reason)


def _segment(
    checks: Checks, message: rollout_pb2.Segment, tokenizer: PromptTokenizer, field: str
) -> records.SegmentSpec:
    ids, wanted = tuple(message.tokens.ids), len(message.tokens.ids) if message.trainable else 0
    if not ids:
        checks.add(f"{field}.tokens", "must not be empty; leave the segment out")
    checks.violations.extend(tokenizer.check_ids(ids, f"{field}.tokens.ids"))
    if len(message.logprobs) != wanted:
        rule = "one a token" if message.trainable else "none, since the segment is not trainable"
        checks.add(
            f"{field}.logprobs", f"must have {wanted} entries ({rule}), got {len(message.logprobs)}; record them"
        )
    for position, value in enumerate(message.logprobs):
        if not LEAST_LOGPROB <= value <= 0:  # NaN too
            limit = f"must be from {LEAST_LOGPROB:g} to 0, got {value:g}"
            checks.add(f"{field}.logprobs[{position}]", f"{limit}; record the sampler's own log-probability")
            break
    return records.SegmentSpec(
        ids=ids, logprobs=tuple(message.logprobs), trainable=message.trainable, version=message.version
    )


def outcome_count(checks: Checks, outcomes: Sequence[reward_pb2.Outcome]) -> None:
    """Check how much a message carries."""
    if not 1 <= len(outcomes) <= MAX_OUTCOMES:
        checks.add("outcomes", f"must have 1 to {MAX_OUTCOMES} entries, got {len(outcomes)}; split the message")
        return
    values = sum(len(message.turn_rewards.values) + len(message.token_rewards.values) for message in outcomes)
    if values > MAX_VALUES:
        limit = f"must have at most {MAX_VALUES} rewards by turn or token together, got {values}"
        checks.add("outcomes", f"{limit}; split the message")


def outcome(message: reward_pb2.Outcome) -> tuple[records.Outcome | None, tuple[str, str]]:
    """Return the outcome, or None and the (field, problem) for which it is rejected.

    Only what an `Outcome` cannot hold is judged here; numbers, lengths and what is stored already are the core's.
    """
    problem = _outcome_problem(message)
    if problem != ("", ""):
        return None, problem
    kind, values, detail = _said(message)
    return records.Outcome(message.rollout_id, kind, values, detail, dict(message.components)), problem


def _outcome_problem(message: reward_pb2.Outcome) -> tuple[str, str]:
    said = message.WhichOneof("said")
    if not 1 <= len(message.rollout_id) <= MAX_ROLLOUT_ID:
        limit = f"must have 1 to {MAX_ROLLOUT_ID} characters, got {len(message.rollout_id)}"
        return "rollout_id", f"{limit}; name the rollout that the outcome speaks of"
    if said is None:
        return "said", "must be set; send reward, turn_rewards, token_rewards, error or abstention"
    if said == "error" and message.error.kind not in reward_pb2.OutcomeErrorKind.values():
        names = ", ".join(reward_pb2.OutcomeErrorKind.keys()[1:])
        return "error.kind", f"must be one of {names}, got number {message.error.kind}; leave it unset if none fits"
    if len(message.components) > MAX_COMPONENTS:
        limit = f"must have at most {MAX_COMPONENTS} entries, got {len(message.components)}"
        return "components", f"{limit}; keep the others on your side"
    longest = max(map(len, message.components), default=1)
    if longest > MAX_LABEL_KEY:
        return "components", f"keys must have at most {MAX_LABEL_KEY} characters, got {longest}; shorten them"
    return "", ""


def _said(message: reward_pb2.Outcome) -> tuple[records.OutcomeKind, tuple[float, ...], str]:
    match message.WhichOneof("said"):
        case "reward":
            return records.OutcomeKind.REWARD, (message.reward,), ""
        case "turn_rewards":
            return records.OutcomeKind.TURN_REWARDS, tuple(message.turn_rewards.values), ""
        case "token_rewards":
            return records.OutcomeKind.TOKEN_REWARDS, tuple(message.token_rewards.values), ""
        case "error":
            name = reward_pb2.OutcomeErrorKind.Name(message.error.kind).removeprefix("OUTCOME_ERROR_KIND_").lower()
            return records.OutcomeKind.ERROR, (), f"{name}: {message.error.message[:1000]}"
        case _:
            return records.OutcomeKind.ABSTENTION, (), message.abstention.reason[:1000]


def replica_hello(message: replica_pb2.Hello) -> replica_records.ReplicaHello:
    """Return a policy server's introduction."""
    checks = Checks()
    checks.required("hello.replica_id", message.replica_id, "draw a fresh one at each start")
    checks.required("hello.endpoint", message.endpoint, "say where PolicyReplicaService listens")
    if message.max_model_len < 2:
        limit = f"must be at least 2, got {message.max_model_len}"
        checks.add("hello.max_model_len", f"{limit}; it is the largest prompt and completion together")
    checks.done()
    return replica_records.ReplicaHello(
        replica_id=message.replica_id,
        endpoint=message.endpoint,
        base_sha256=message.base_sha256,
        tokenizer_sha256=message.tokenizer_sha256,
        chat_template_sha256=message.chat_template_sha256,
        engine_version=message.engine_version,
        slots=message.slots,
        max_lora_rank=message.max_lora_rank,
        max_model_len=message.max_model_len,
        dtype=message.dtype,
    )


def replica_report(message: replica_pb2.ReplicaState) -> replica_records.ReplicaReport:
    """Return what a policy server has now."""
    adapters = tuple(
        replica_records.AdapterStatus(
            run=item.policy.run,
            version=item.policy.version,
            serving=item.serving,
            in_flight=item.in_flight,
            load_seconds=item.load_seconds,
            error=item.error,
            noise_ratio=item.noise_ratio,
            retrying=item.retrying,
        )
        for item in message.adapters
    )
    return replica_records.ReplicaReport(adapters, message.generation, message.reconciled, message.error)
