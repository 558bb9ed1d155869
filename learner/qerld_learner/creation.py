"""CreateRun: version 0 is written by the trainer and live at once."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path

from qerld_kernels.architectures import architecture_of
from sqlalchemy import Connection

from .errors import InvalidRequestError, RetryLaterError, Violation
from .held_out import check_file
from .options import ModelInfo
from .records import RunConfig, RunRecord, RunState, VersionRecord, VersionState
from .run_options import check_run_config, noise_of, trainer_config
from .shared import Shared
from .store import runs
from .store.requests import answered, once
from .trainer.client import TrainerDiedError, TrainerFailure
from .trainer.messages import InitVersion, VersionMade
from .versions import SLOTS_A_RUN, version_folder

# Longer than a client goes on trying: somebody has to do something, and should be told at once.
SLOTS_RETRY_SECONDS = 600.0
# Kinds of `TrainerFailure`: a full disk and a full GPU.
_NOT_THE_REQUESTS_FAULT = ("OSError", "OutOfMemoryError")


class RunCreator:
    """Creates runs, one at a time."""

    def __init__(self, shared: Shared, model: ModelInfo) -> None:
        self._shared = shared
        self._model = model
        self._lock = asyncio.Lock()

    async def create(
        self, name: str, request_id: str, body_hash: str, config: RunConfig, initial_adapter: bytes
    ) -> tuple[RunRecord, bool]:
        """Return the run and whether it is new."""
        if violations := check_run_config(config):
            raise InvalidRequestError(violations)
        await self._check_evaluation(config)
        async with self._lock:
            if await self._shared.store.read(lambda c: self._exists(c, name, request_id, body_hash)):
                return await self._shared.store.read(lambda c: runs.find_run(c, name)), False
            self._check_rank(config.lora_rank)
            self._check_base(config)
            await self._check_slots()
            made = await self._first_version(name, config, initial_adapter)
            return await self._store(name, request_id, body_hash, config, made), True

    async def _check_evaluation(self, config: RunConfig) -> None:
        if config.evaluation is None:
            return
        if violations := await asyncio.to_thread(check_file, config.evaluation, self._shared.options):
            raise InvalidRequestError(violations)

    def _exists(self, connection: Connection, name: str, request_id: str, body_hash: str) -> bool:
        if answered(connection, name, request_id, body_hash) is not None:
            return True
        runs.check_name(connection, name)
        return False

    def _check_rank(self, rank: int) -> None:
        # Such a run's versions would be refused for ever, and the server could not attach again.
        most = self._shared.pool.least_rank()
        if most is not None and rank > most:
            text = f"must be at most {most}, the smallest max_lora_rank of the policy servers, got {rank}; lower it"
            raise InvalidRequestError([Violation("config.lora.rank", text)])

    def _check_base(self, config: RunConfig) -> None:
        """Refuse what does not go with the base model and its device, before the trainer is asked."""
        wrong = []
        known = architecture_of(json.loads((self._model.folder / "config.json").read_text("utf-8"))).target_modules
        if unknown := sorted(set(config.target_modules) - set(known)):
            text = f"must be among {', '.join(known)} for this base model, got {', '.join(unknown)}"
            wrong.append(Violation("config.lora.target_modules", f"{text}; leave it unset for all of them"))
        device = self._shared.options.device
        if config.optimizer == "adamw_8bit" and not device.startswith("cuda"):
            text = f"must be adamw on device {device}, got adamw_8bit: it runs on a GPU only"
            wrong.append(Violation("config.optimizer.kind", f"{text}; use OPTIMIZER_KIND_ADAMW"))
        if wrong:
            raise InvalidRequestError(wrong)

    async def _check_slots(self) -> None:
        slots = self._shared.pool.least_slots()
        needed = await slots_of_all(self._shared) + SLOTS_A_RUN
        if slots is not None and needed > slots:
            raise RetryLaterError(
                f"the runs would need slots for {needed} versions, the smallest policy server has {slots}: two for each"
                " run, one for a completed one; end a run that is not needed with DeleteRun (paused ones count, too),"
                " or start policy servers with a higher max_loras",
                retry_after=SLOTS_RETRY_SECONDS,
            )

    async def _first_version(self, name: str, config: RunConfig, initial_adapter: bytes) -> VersionMade:
        options = self._shared.options
        out = options.state_dir / version_folder(name, 0)
        with tempfile.TemporaryDirectory(prefix="adapter-", dir=options.state_dir) as scratch:
            adapter_dir = None
            if initial_adapter:
                adapter_dir = scratch
                await asyncio.to_thread(_write_adapter, Path(scratch), initial_adapter, config)
            request = InitVersion(name, trainer_config(config, options), str(out), adapter_dir)
            try:
                reply = await self._shared.trainer.call(
                    request,
                    attempts=options.trainer_attempts,
                    before=lambda: shutil.rmtree(out, ignore_errors=True),
                )
            except TrainerFailure as error:
                if error.kind in _NOT_THE_REQUESTS_FAULT:
                    raise RetryLaterError(f"version 0 was not made: {error}", retry_after=5.0) from error
                field = "initial_adapter" if initial_adapter else "config"
                raise InvalidRequestError([Violation(field, f"the trainer refused it: {error}")]) from error
            except TrainerDiedError as error:
                raise RetryLaterError(f"version 0 was not made: {error}", retry_after=5.0, unavailable=True) from error
        assert isinstance(reply, VersionMade)
        return reply

    async def _store(
        self, name: str, request_id: str, body_hash: str, config: RunConfig, made: VersionMade
    ) -> RunRecord:
        now = time.time()
        noise = noise_of(config, 0, 0)
        first = VersionRecord(
            name, 0, 0, 0, noise, VersionState.LIVE, made.adapter_sha256, made.adapter_bytes, now, live_at=now
        )
        base_model, base_sha256 = self._model.folder.name, self._model.base_sha256
        run = RunRecord(name, config, RunState.RUNNING, "", 0, 0, base_model, base_sha256, "1", now)

        def mutation(connection: Connection) -> RunRecord:
            def add() -> str:
                runs.add_run(connection, run, first, version_folder(name, 0))
                return name

            once(connection, name, request_id, body_hash, add)
            return runs.find_run(connection, name)

        return await self._shared.store.write(mutation)


async def slots_of_all(shared: Shared) -> int:
    """Return how many adapter slots the existing runs need; a completed one only its live version."""
    records = await shared.store.read(runs.all_runs)
    return sum(1 if run.state is RunState.COMPLETED else SLOTS_A_RUN for run in records)


def _write_adapter(folder: Path, weights: bytes, config: RunConfig) -> None:
    (folder / "adapter_model.safetensors").write_bytes(weights)
    shape = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": list(config.target_modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(shape))
