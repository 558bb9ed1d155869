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
# Statuses travel in HTTP/2 trailers, which peers may refuse from 8 KiB on. The message is in them twice: itself,
# percent-encoded (up to 3 bytes for one), and in the details, which are encoded in base64 (4 for 3).
MAX_MESSAGE_BYTES = 1000
MAX_DETAIL_BYTES = 2500
MAX_DESCRIPTION_BYTES = 500


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
        return [_bad_request(error)]
    if isinstance(error, RetryLaterError):
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _bad_request(error: InvalidRequestError) -> error_details_pb2.BadRequest:
    """Return as many of the violations as there is room for, at least one."""
    bad = error_details_pb2.BadRequest()
    for violation in error.violations:
        description = _short(violation.description, MAX_DESCRIPTION_BYTES)
        bad.field_violations.add(field=_short(violation.field, MAX_DESCRIPTION_BYTES), description=description)
        if bad.ByteSize() > MAX_DETAIL_BYTES and len(bad.field_violations) > 1:
            del bad.field_violations[-1]
            break
    return bad


def _short(text: str, limit: int) -> str:
    """Return at most `limit` bytes of a text, in UTF-8."""
    data = text.encode()
    return text if len(data) <= limit else data[: limit - 3].decode(errors="ignore") + "…"


def to_status(error: LearnerError) -> tuple[grpc.StatusCode, status_pb2.Status]:
    """Return the code, and the google.rpc.Status with BadRequest or RetryInfo details."""
    code = _code(error)
    status = status_pb2.Status(code=code.value[0], message=_short(str(error), MAX_MESSAGE_BYTES))
    for detail in _details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return code, status
