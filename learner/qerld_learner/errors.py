"""Domain errors of the learner. `api/errors.py` turns them into gRPC statuses, in one interceptor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One wrong field: its path in the request, and what is wrong with the limit, the value and the way out."""

    field: str
    description: str


class LearnerError(Exception):
    """Base of all errors that a client may see."""


class InvalidRequestError(LearnerError):
    """INVALID_ARGUMENT with one BadRequest violation a field."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = tuple(violations)


class NotFoundError(LearnerError):
    """NOT_FOUND: an unknown run, group, rollout or version."""


class ConflictError(LearnerError):
    """ALREADY_EXISTS: a request id or a run name with another body."""


class PreconditionError(LearnerError):
    """FAILED_PRECONDITION: the request is well formed, but not in this state of the run or the replica."""


class ModelFolderError(LearnerError):
    """The base model's folder is broken or of an unknown kind: a wrong setting, which no restart mends."""


class StoreError(LearnerError):
    """The store's database can never be opened as it is: a wrong setting, or a broken file; no restart mends it."""


class RetryLaterError(LearnerError):
    """RESOURCE_EXHAUSTED or UNAVAILABLE, with RetryInfo.

    Args:
        message: What is short, the limit, and the way out.
        retry_after: Seconds until a retry makes sense.
        unavailable: True for UNAVAILABLE (something is down), False for RESOURCE_EXHAUSTED (a limit is reached).
    """

    def __init__(self, message: str, *, retry_after: float, unavailable: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.unavailable = unavailable
