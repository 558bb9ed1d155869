"""The trainer process: reads requests from a pipe, keeps the base model and the last state in memory, answers.

A request that fails is answered with `Failure`, leaves nothing on disk and leaves the process usable. Death at any
moment loses the request only: the last committed version folder is whole.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from . import aqn, checkpoint, lora, optimizers, step
from .checkpoint import AdapterState
from .messages import (
    FRAME_HEADER,
    Event,
    Failure,
    InitVersion,
    LoraShape,
    Progress,
    Ready,
    Reply,
    Request,
    Score,
    Scores,
    StepResult,
    TrainerConfig,
    TrainStep,
    VersionMade,
    body_length,
    decode_request,
    encode_frame,
)
from .model import DTYPES, BaseModel
from .packing import TokenSequence


class ConfigError(ValueError):
    """A field of the run's configuration is outside its range."""


class Worker:
    """Answers requests one at a time. Holds at most one base model, one adapter on it and one version's state."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._base_key: tuple[object, ...] | None = None
        self._base: BaseModel | None = None
        self._shape: LoraShape | None = None
        self._masters: dict[str, torch.nn.Parameter] = {}
        self._last: tuple[str, AdapterState] | None = None

    def handle(self, request: Request) -> Reply:
        """Return the reply; raises what the request's part raises."""
        check_config(request.config)
        if isinstance(request, InitVersion):
            return self._init_version(request)
        if isinstance(request, TrainStep):
            return self._train_step(request)
        return self._score(request)

    def _init_version(self, request: InitVersion) -> VersionMade:
        checkpoint.refuse_existing(Path(request.out_dir))
        self._prepare(request.config)
        if request.adapter_dir is None:
            weights = lora.first_weights(self._masters, request.config.lora.seed)
        else:
            weights = checkpoint.read_adapter(Path(request.adapter_dir))
        lora.check_weights(self._masters, weights)
        device = torch.device(request.config.device)
        weights = {name: weights[name].to(device) for name in self._masters}
        first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
        state = AdapterState(weights, first, second, updates=0, step=0)
        files = checkpoint.write_version(Path(request.out_dir), state, request.config, request.config.lora.seed)
        self._last = (files.index, state)
        return VersionMade(files.adapter_sha256, files.adapter_bytes)

    def _train_step(self, request: TrainStep) -> StepResult:
        checkpoint.refuse_existing(Path(request.out_dir))
        start = time.perf_counter()
        model = self._prepare(request.config)
        state = self._state(Path(request.parent_dir), request.config)
        loaded = time.perf_counter()
        torch.manual_seed(request.seed)
        outcome = step.train_step(
            model, self._masters, state, request.config, request.groups, request.step, self._progress
        )
        self._progress("commit", 0, 1)
        computed = time.perf_counter()
        files = checkpoint.write_version(Path(request.out_dir), outcome.state, request.config, request.seed)
        self._last = (files.index, outcome.state)
        seconds = {"load": loaded - start, **outcome.phase_seconds, "commit": time.perf_counter() - computed}
        metrics = outcome.metrics | {"peak_rss_bytes": peak_rss_bytes()}
        return StepResult(
            metrics, outcome.rollouts, files.adapter_sha256, files.adapter_bytes, seconds, outcome.skipped_optimizer
        )

    def _score(self, request: Score) -> Scores:
        model = self._prepare(request.config)
        state = self._state(Path(request.version_dir), request.config, keep=False)
        step.load_weights(self._masters, state.weights)
        sequences = [TokenSequence(s.prompt_ids, s.completion_ids, s.trainable) for s in request.sequences]
        with model.noise(request.noise):
            budget = request.config.token_budget
            return Scores(step.token_logprobs(model, sequences, budget, request.temperature, self._progress))

    def _prepare(self, config: TrainerConfig) -> BaseModel:
        """Return the base with an adapter of the run's shape on it, loading what is not in memory yet."""
        key = (config.base, config.dtype, config.device, config.cache_dequantized, config.activation_checkpointing)
        if self._base is None or key != self._base_key:
            self._progress("load", 0, 1)
            self._base, self._shape, self._masters, self._last = None, None, {}, None
            self._base, self._base_key = BaseModel(config), key
        shape = msgspec.structs.replace(config.lora, seed=0)
        if shape != self._shape:
            if self._shape is not None:
                lora.detach(self._base.causal)
            # Before attaching, which may refuse the shape: the next request must not take the adapter for attached.
            self._shape, self._masters = None, {}
            self._masters = lora.attach(self._base.causal, shape)
            self._shape = shape
        return self._base

    def _state(self, folder: Path, config: TrainerConfig, *, keep: bool = True) -> AdapterState:
        """Return a version's state: from memory when it is the last one, by the digests in its state.json.

        `keep=False` leaves the last one in memory: scoring an older version must not cost the next step its parent.
        """
        if self._last is not None and checkpoint.read_index(folder, config) == self._last[0]:
            return self._last[1]
        state, index = checkpoint.read_version(folder, config, torch.device(config.device))
        lora.check_weights(self._masters, state.weights)
        if keep:
            self._last = (index, state)
        return state

    def _progress(self, phase: str, done: int, total: int) -> None:
        self._emit(Progress(phase, done, total))


def check_config(config: TrainerConfig) -> None:
    """Raise `ConfigError` (or the schedule's own error) for a field outside its range."""
    aqn.check(config.aqn)
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {sorted(DTYPES)}, got {config.dtype!r}")
    if not 0 < config.temperature < float("inf"):
        raise ConfigError(f"temperature must be finite and > 0, got {config.temperature}; greedy rollouts do not train")
    if config.token_budget < 1:
        raise ConfigError(f"token_budget must be ≥ 1, got {config.token_budget}")
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {config.device!r}, but PyTorch sees no GPU; use device 'cpu'")
    optimizers.check(config.optimizer, config.device)
    if not 0 < config.optimizer.lr < float("inf"):
        raise ConfigError(f"optimizer.lr must be finite and > 0, got {config.optimizer.lr}")
    if not 0 <= config.optimizer.max_grad_norm < float("inf"):
        raise ConfigError(f"optimizer.max_grad_norm must be finite and ≥ 0, got {config.optimizer.max_grad_norm}")


def peak_rss_bytes() -> float:
    """Return the largest resident size this process has had (Linux counts it in KiB)."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def serve(requests: BinaryIO, events: BinaryIO) -> None:
    """Answer requests until the pipe closes. A broken pipe or a broken frame ends the process with its traceback."""

    def emit(event: Event) -> None:
        events.write(encode_frame(event))
        events.flush()

    worker = Worker(emit)
    emit(Ready(os.getpid()))
    while header := requests.read(FRAME_HEADER.size):
        request = decode_request(requests.read(body_length(header)))
        try:
            reply: Event = worker.handle(request)
        except (ValueError, RuntimeError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            reply = Failure(type(error).__name__, str(error))
        emit(reply)
