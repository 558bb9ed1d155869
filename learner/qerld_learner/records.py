"""The learner's own types. Wire types stay in `api/`, table rows in `store/`; both convert to and from these.

Token ids are `tuple[int, ...]`, log-probabilities `tuple[float, ...]`, times UNIX seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class RunState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    DELETED = "deleted"


class GroupState(StrEnum):
    QUEUED = "queued"
    SAMPLING = "sampling"
    AWAITING_REWARDS = "awaiting_rewards"
    READY = "ready"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"
    REVERTED = "reverted"


class RolloutState(StrEnum):
    SAMPLING = "sampling"
    FINISHED = "finished"
    FAILED = "failed"


class ReceiptState(StrEnum):
    PENDING = "pending"
    BUFFERED = "buffered"
    BATCHED = "batched"
    TRAINED = "trained"
    REVERTED = "reverted"
    DROPPED_STALE = "dropped_stale"
    DROPPED_ZERO_VARIANCE = "dropped_zero_variance"
    DROPPED_EXPIRED = "dropped_expired"
    DROPPED_FILTERED = "dropped_filtered"
    FAILED = "failed"
    ABSTAINED = "abstained"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self not in (ReceiptState.PENDING, ReceiptState.BUFFERED, ReceiptState.BATCHED)


class VersionState(StrEnum):
    STAGED = "staged"
    CANARY = "canary"
    LIVE = "live"
    RETIRED = "retired"
    REVERTED = "reverted"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class OutcomeKind(StrEnum):
    REWARD = "reward"
    TURN_REWARDS = "turn_rewards"
    TOKEN_REWARDS = "token_rewards"
    ERROR = "error"
    ABSTENTION = "abstention"


class Answer(StrEnum):
    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


@dataclass(frozen=True)
class NoiseRecord:
    """Noise of a version; see `qerld_kernels.noise`."""

    sigma: float = 0.0
    seed: int = 0
    relative: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class SpanRecord:
    """Tokens [begin, end) of a completion were made by `version` under `noise`.

    With `environment` they were made by no policy (version 0, no noise): context of what follows, never trained.
    """

    begin: int
    end: int
    version: int
    noise: NoiseRecord
    environment: bool = False


@dataclass(frozen=True)
class SamplingSpec:
    """Every sampling field that a training rollout may set."""

    temperature: float
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeldOutConfig:
    """Held-out evaluation of a run, fields as in `qerld.v1.HeldOutEvaluation`; `time_limit` in seconds."""

    every_steps: int
    file: str
    problems: int = 256
    samples: int = 1
    greedy: bool = True
    temperature: float = 1.0
    max_tokens: int = 256
    instruction: str = ""
    system: str = ""
    time_limit: float = 1800.0


@dataclass(frozen=True)
class RunConfig:
    """Configuration of a run with every default filled in. Fields as in `qerld.v1.RunConfig`."""

    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_rslora: bool = False
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    preset: str = "none"
    advantage: str = "group_norm"
    ratio: str = "token"
    old_policy: str = "trainer"
    clip: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    aggregation: str = "token_mean"
    loss_divisor: float = 256.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    overlong: str = "keep"
    overlong_buffer: int = 51
    overlong_penalty: float = 1.0
    correction: str = "token_truncate"
    tis_cap: float = 2.0
    mask_low: float = 0.5
    mask_high: float = 5.0
    epochs: int = 1
    mini_batches: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-5
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    final_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    noise_schedule: str = "none"
    sigma_start: float = 0.0
    sigma_end: float = 0.0
    noise_stages: int = 10
    noise_relative: bool = False
    noise_dtype: str = "float32"
    group_size: int = 8
    groups_per_step: int = 4
    temperature: float = 1.0
    max_tokens: int = 256
    max_lag: int = 2
    schedule_steps: int = 0
    max_steps: int = 0
    seed: int = 0
    reward_deadline: float = 600.0
    drop_zero_variance: bool = True
    max_sampling_rounds: int = 0
    canary_tolerance: float | None = None
    evaluation: HeldOutConfig | None = None


@dataclass(frozen=True)
class RunRecord:
    name: str
    config: RunConfig
    state: RunState
    reason: str
    step: int
    live_version: int
    base_model: str
    base_sha256: str
    etag: str
    created_at: float


@dataclass(frozen=True)
class VersionRecord:
    run: str
    version: int
    parent: int
    step: int
    noise: NoiseRecord
    state: VersionState
    adapter_sha256: str
    adapter_bytes: int
    created_at: float
    live_at: float | None = None
    pinned: bool = False


@dataclass(frozen=True)
class PromptSpec:
    """A prompt, tokenised, with what its group needs."""

    prompt_ids: tuple[int, ...]
    group_size: int
    sampling: SamplingSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    reward_deadline: float | None = None


@dataclass(frozen=True)
class GroupRecord:
    group_id: str
    run: str
    state: GroupState
    rollout_ids: tuple[str, ...]
    version: int
    outcomes: int
    labels: Mapping[str, str]
    created_at: float


@dataclass(frozen=True)
class RolloutRecord:
    """A rollout; `logprobs` has one entry a completion token, 0 where the environment made it."""

    rollout_id: str
    group_id: str
    run: str
    index: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[SpanRecord, ...]
    finish_reason: FinishReason | None
    text: str
    state: RolloutState
    labels: Mapping[str, str]
    finished_at: float | None
    reward_deadline: float | None

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Whether the policy made each completion token."""
        return tuple(not span.environment for span in self.spans for _ in range(span.begin, span.end))

    @property
    def trainable_tokens(self) -> int:
        """Number of completion tokens that the policy made."""
        return sum(self.trainable)


@dataclass(frozen=True)
class SegmentSpec:
    """A stretch of an imported trajectory; `logprobs` is empty when not trainable."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    trainable: bool
    version: int


@dataclass(frozen=True)
class TrajectorySpec:
    segments: tuple[SegmentSpec, ...]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Outcome:
    """What a client says of a rollout. `values` has one entry for REWARD, one a turn or a token, none otherwise."""

    rollout_id: str
    kind: OutcomeKind
    values: tuple[float, ...] = ()
    detail: str = ""
    components: Mapping[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float:
        """Reward of the whole rollout: the sum of its values."""
        return sum(self.values)


@dataclass(frozen=True)
class OutcomeAnswer:
    rollout_id: str
    answer: Answer
    field: str = ""
    problem: str = ""


@dataclass(frozen=True)
class CheckedOutcome:
    rollout_id: str
    answer: Answer
    problems: tuple[tuple[str, str], ...] = ()
    advantage: float | None = None


@dataclass(frozen=True)
class Receipt:
    rollout_id: str
    group_id: str
    state: ReceiptState
    group_outcomes: int
    group_size: int
    at: float
    step: int | None = None
    version: int | None = None
    advantage: float | None = None
    ratio: float | None = None
    clipped_share: float | None = None


@dataclass(frozen=True)
class StepReport:
    """What one learner step did; `metrics` and `phase_seconds` as in `qerld.v1.RunReport`."""

    run: str
    step: int
    version: int
    metrics: Mapping[str, float]
    phase_seconds: Mapping[str, float]
    at: float
    run_state: RunState


# Events of a Sample stream.


@dataclass(frozen=True)
class GroupOpened:
    group_id: str
    rollout_ids: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class TokenDelta:
    """New tokens of one rollout, from position `begin` of its completion (0 again after a restart elsewhere)."""

    rollout_id: str
    index: int
    begin: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclass(frozen=True)
class RolloutFinished:
    rollout: RolloutRecord


SampleEvent = GroupOpened | TokenDelta | RolloutFinished
