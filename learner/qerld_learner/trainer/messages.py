"""What the learner and its trainer process say to each other: typed msgpack frames over the child's pipes.

A frame is a 4-byte big-endian length and a msgpack body. The learner sends one request at a time; the child answers
with any number of `Progress` and then exactly one final reply. No torch here: the API process imports this module.

Log-probabilities are natural, after temperature; token lists are ids; times are seconds.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

FRAME_HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30
# In each version folder: what the version is, and the checksums of its files as they were written.
INDEX_FILE = "state.json"


class LoraShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and first draw of the adapter; `target_modules` are last name parts such as `q_proj`.

    Its output counts alpha / rank times; with `rslora` alpha / √rank (arXiv 2312.03732).
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    seed: int = 0
    rslora: bool = False


class AlgorithmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objective; names are keys of `algorithm.NAMES` and of the tables that these stand for.

    The ratio is taken to `old_policy`: the behaviour, by the server's log-probabilities, or the version that the step
    starts from, by the trainer's own, without noise or with that of each token's sampling. With the latter two,
    `correction` weighs each token by a function of π_old/μ.

    `loss_divisor`: of aggregation "constant", tokens a rollout. `max_tokens`, `overlong_buffer`: tokens, of overlong
    "penalty". `tis_cap` bounds truncated weights, `mask_low` and `mask_high` masked ones. `epochs` passes over a batch
    in `mini_batches` parts, one optimiser update each.
    """

    advantage: str = "group_norm"
    ratio: str = "token"
    old_policy: str = "behaviour"
    clip: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    aggregation: str = "sequence_mean"
    loss_divisor: float = 256.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    overlong: str = "keep"
    overlong_buffer: int = 51
    overlong_penalty: float = 1.0
    max_tokens: int = 256
    correction: str = "none"
    tis_cap: float = 2.0
    mask_low: float = 0.5
    mask_high: float = 5.0
    epochs: int = 1
    mini_batches: int = 1


class OptimizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The optimiser and its learning rate by step; `max_grad_norm` 0 switches clipping off.

    `kind`: a key of `optimizers.OPTIMIZERS`; `schedule`: of `learning_rate.SCHEDULES`, over `schedule_steps`, from `lr`
    towards `final_lr`.
    """

    kind: str = "adamw"
    lr: float = 1e-5
    schedule: str = "constant"
    warmup_steps: int = 0
    schedule_steps: int = 0
    final_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


class AqnConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Adaptive quantisation noise; `schedule`: "none" or a key of `aqn.DECAYS`. See `aqn.sigma_at`.

    What σ means (absolute or relative, rounded or not) is of each version: `NoiseSpec`.
    """

    schedule: str = "none"
    sigma_start: float = 1e-2
    sigma_end: float = 5e-4
    stages: int = 10
    schedule_steps: int = 100


class TrainerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a run that the trainer needs and that does not change from step to step.

    `token_budget` is the number of prefix-tree tokens in one micro-batch (about 2.5 MB a
    token for SmolLM2-135M in fp32). `cache_dequantized` keeps the base's linear weights dequantised: a tenth faster for
    SmolLM2 on the CPU, at 8 times the packed bytes. `activation_checkpointing` recomputes layers in the backward.
    """

    base: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    lora: LoraShape = LoraShape()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    aqn: AqnConfig = AqnConfig()
    temperature: float = 1.0
    token_budget: int = 2048
    seed: int = 0
    cache_dequantized: bool = False
    activation_checkpointing: bool = False


class Rollout(msgspec.Struct, frozen=True):
    """One sampled completion; `logprobs` are the behaviour's, one a completion token; `version` made it.

    `trainable`: whether the policy made each completion token (None: all of them). The environment's tokens are context
    of what follows and nothing else: no loss, no metric and no count sees them, nor their `logprobs`.

    `steps`: rewards by turn or token, each with the end of its stretch of the completion (exclusive), ascending; None
    is one `reward` for all of it. `truncated`: whether it was cut off by max_tokens.

    `noises`: the noise that stretches of it were sampled under, each with its end, ascending; None: all without.
    """

    rollout_id: str
    completion_ids: list[int]
    logprobs: list[float]
    reward: float
    version: int
    trainable: list[bool] | None = None
    steps: list[tuple[int, float]] | None = None
    truncated: bool = False
    noises: list[tuple[int, NoiseSpec]] | None = None


class Group(msgspec.Struct, frozen=True):
    """One prompt and its rewarded rollouts."""

    group_id: str
    prompt_ids: list[int]
    rollouts: list[Rollout]


class Sequence(msgspec.Struct, frozen=True):
    """A prompt and the completion whose tokens are to be scored; `trainable` as in `Rollout`: others are context."""

    prompt_ids: list[int]
    completion_ids: list[int]
    trainable: list[bool] | None = None


class NoiseSpec(msgspec.Struct, frozen=True):
    """Noise of one version: `sigma` (in units of mean |w| when `relative`), the seed of z, and the sum's dtype."""

    sigma: float
    seed: int
    relative: bool = False
    dtype: str = "float32"


class InitVersion(msgspec.Struct, frozen=True, tag=True):
    """Write version 0 to `out_dir`: a zero adapter (B = 0), or the weights of the PEFT folder `adapter_dir`."""

    run: str
    config: TrainerConfig
    out_dir: str
    adapter_dir: str | None = None


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """One step from the version in `parent_dir`, written to `out_dir`; `step` is the new version's learner step."""

    run: str
    config: TrainerConfig
    step: int
    parent_dir: str
    out_dir: str
    seed: int
    groups: list[Group]


class Score(msgspec.Struct, frozen=True, tag=True):
    """Log-probabilities of given tokens under a version, at `temperature`; without noise unless `noise` is given."""

    run: str
    config: TrainerConfig
    version_dir: str
    sequences: list[Sequence]
    temperature: float = 1.0
    noise: NoiseSpec | None = None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """First frame of a fresh child."""

    pid: int


class Progress(msgspec.Struct, frozen=True, tag=True):
    """`done` of `total` units of `phase` are finished; `total` 0 when unknown."""

    phase: str
    done: int
    total: int


class VersionMade(msgspec.Struct, frozen=True, tag=True):
    """Answer to `InitVersion`: digest (hex) and size of `adapter/adapter_model.safetensors`."""

    adapter_sha256: str
    adapter_bytes: int


class RolloutResult(msgspec.Struct, frozen=True):
    """What the step did with one rollout, means over its tokens: advantage, importance ratio π/μ as the step began, and
    share of clipped tokens. `filtered`: it was left out of the loss as overlong.
    """

    rollout_id: str
    advantage: float
    mean_ratio: float
    clipped_share: float
    filtered: bool = False


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """Answer to `TrainStep`. `skipped_optimizer`: nothing had a gradient, the weights are the parent's."""

    metrics: dict[str, float]
    rollouts: list[RolloutResult]
    adapter_sha256: str
    adapter_bytes: int
    phase_seconds: dict[str, float]
    skipped_optimizer: bool


class Scores(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Score`: one list a sequence, one number a trainable token."""

    logprobs: list[list[float]]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The request failed and left nothing behind; `kind` is the exception's class name. The child lives on."""

    kind: str
    message: str


Request = InitVersion | TrainStep | Score
Reply = VersionMade | StepResult | Scores
Event = Ready | Progress | VersionMade | StepResult | Scores | Failure

_request_decoder = msgspec.msgpack.Decoder(Request)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_encoder = msgspec.msgpack.Encoder()


class FrameError(RuntimeError):
    """A frame is longer than the limit or does not hold a known message."""


def encode_frame(message: Request | Event) -> bytes:
    """Return header and body of one message; raises `FrameError` beyond `MAX_FRAME_BYTES`."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(
            f"message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}; send fewer rollouts a step"
        )
    return FRAME_HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return the body's length announced by a 4-byte header."""
    length: int = FRAME_HEADER.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise FrameError(
            f"frame announces {length} bytes, the limit is {MAX_FRAME_BYTES}; the pipe carries something else"
        )
    return length


def decode_request(body: bytes) -> Request:
    """Return the request in a frame's body; raises `FrameError` when it holds none."""
    try:
        return _request_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a trainer request: {error}") from error


def decode_event(body: bytes) -> Event:
    """Return the event in a frame's body; raises `FrameError` when it holds none."""
    try:
        return _event_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a trainer event: {error}") from error
