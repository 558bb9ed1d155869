"""Domain errors to gRPC statuses with google.rpc details. `interceptors.py` is the only caller."""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from qerld_learner.errors import (
    ConflictError,
    InvalidRequestError,
    LearnerError,
    NotFoundError,
    PreconditionError,
    RetryLaterError,
)

DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 2048
"""Statuses travel in HTTP/2 trailers, whose size peers limit to 8 KiB or so."""
MAX_VIOLATIONS = 16


class NotServedError(LearnerError):
    """UNIMPLEMENTED: designed, and not served by this version."""

    def __init__(self, rpc: str, instead: str) -> None:
        super().__init__(f"{rpc} is not served by this version of qerld; {instead}")


def _code(error: LearnerError) -> grpc.StatusCode:
    if isinstance(error, RetryLaterError):
        return grpc.StatusCode.UNAVAILABLE if error.unavailable else grpc.StatusCode.RESOURCE_EXHAUSTED
    table: tuple[tuple[type[LearnerError], grpc.StatusCode], ...] = (
        (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
        (NotFoundError, grpc.StatusCode.NOT_FOUND),
        (ConflictError, grpc.StatusCode.ALREADY_EXISTS),
        (PreconditionError, grpc.StatusCode.FAILED_PRECONDITION),
        (NotServedError, grpc.StatusCode.UNIMPLEMENTED),
    )
    return next((code for kind, code in table if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _details(error: LearnerError) -> list[Message]:
    if isinstance(error, InvalidRequestError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=v.field, description=_short(v.description, 256))
            for v in error.violations[:MAX_VIOLATIONS]
        ]
        return [error_details_pb2.BadRequest(field_violations=violations)]
    if isinstance(error, RetryLaterError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _short(text: str, limit: int = MAX_MESSAGE_BYTES) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def to_status(error: LearnerError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Return the code, and the google.rpc.Status with BadRequest or RetryInfo details."""
    code = _code(error)
    status = status_pb2.Status(code=code.value[0], message=_short(str(error)))
    for detail in _details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return code, status
