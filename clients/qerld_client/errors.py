"""Errors of the client: one class a gRPC status that a caller may want to tell apart, with the details decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from qerld.v1 import reward_pb2

DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class Violation:
    """One wrong field of a request: its path, and what is wrong with limit, value and way out."""

    field: str
    description: str


class QerldError(Exception):
    """A call failed.

    Attributes:
        code: gRPC status code.
        message: Text for people.
        violations: Wrong fields, when the service named them.
        retry_after: Seconds after which a retry makes sense, when the service said so.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[Violation] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_after = retry_after


class InvalidRequestError(QerldError):
    """INVALID_ARGUMENT: see `violations`."""


class NotFoundError(QerldError):
    """NOT_FOUND: no such run, rollout or version."""


class AlreadyExistsError(QerldError):
    """ALREADY_EXISTS: the name or the request id is taken by another request."""


class PreconditionError(QerldError):
    """FAILED_PRECONDITION: well formed, but not in this state of the run."""


class BusyError(QerldError):
    """RESOURCE_EXHAUSTED until the deadline: a limit of the service is reached."""


class UnavailableError(QerldError):
    """UNAVAILABLE until the deadline: the service cannot be reached or has no policy server."""


class DeadlineError(QerldError):
    """DEADLINE_EXCEEDED: no answer in time."""


class NotServedError(QerldError):
    """UNIMPLEMENTED: this version of the service does not serve the call."""


class OutcomesRejectedError(Exception):
    """Some outcomes were refused; the others are stored. `answers` has one entry an outcome, in order."""

    def __init__(self, answers: Sequence[reward_pb2.OutcomeAnswer]) -> None:
        self.answers = tuple(answers)
        problems = [answer.problem for answer in self.answers if answer.HasField("problem")]
        first = "; ".join(f"{problem.field}: {problem.description}" for problem in problems[:3])
        super().__init__(f"{len(problems)} of {len(self.answers)} outcomes were rejected: {first}")


class AdapterError(Exception):
    """A downloaded adapter does not have the checksum that the service announced."""


_CLASSES: dict[grpc.StatusCode, type[QerldError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNIMPLEMENTED: NotServedError,
}


# What grpc.aio says, as INTERNAL, of a stream that the service ended while this side wrote to it, whatever the service
# said. Opening it again may help, or brings the service's words.
_BROKEN_WRITE = "Internal error from Core"


def from_rpc(error: grpc.RpcError) -> QerldError:
    """Return the client's error for a failed call, sync or asyncio."""
    code: grpc.StatusCode = error.code()
    if code is grpc.StatusCode.INTERNAL and error.details() == _BROKEN_WRITE:
        return UnavailableError(grpc.StatusCode.UNAVAILABLE, "the service ended the stream while it was written to")
    violations: list[Violation] = []
    retry_after: float | None = None
    for detail in _status(error).details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad):
            violations += [Violation(item.field, item.description) for item in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return _CLASSES.get(code, QerldError)(code, error.details() or "", violations, retry_after)


def _status(error: grpc.RpcError) -> status_pb2.Status:
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:  # a proxy may have cut it
                break
    return status_pb2.Status()
