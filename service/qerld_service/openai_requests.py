"""Requests of the OpenAI API: read up to a limit, parsed into their model, refused in OpenAI's error format."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

# More than a token takes in JSON: an id with its comma up to 8 bytes, text about 4, escaped text up to 24.
BODY_BYTES_A_TOKEN = 32
BODY_BYTES_BESIDE_PROMPT = 1 << 16
# Listing each of a hundred thousand problems takes seconds.
MOST_PROBLEMS = 100
Body = TypeVar("Body", bound=BaseModel)


class ApiError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def body_limit(max_model_len: int) -> int:
    """Most bytes of a request: what a prompt that fills the context of `max_model_len` tokens takes, and the rest."""
    return BODY_BYTES_BESIDE_PROMPT + BODY_BYTES_A_TOKEN * max_model_len


async def read_request(http: Request, kind: type[Body], max_model_len: int) -> Body:
    """The body as `kind`; never holds more of it than `body_limit`.

    Raises:
        ApiError: 413 for a body that is too long, 415 for another content type, 400 for wrong fields.
    """
    content_type = http.headers.get("content-type", "")
    # Also what keeps web pages out: a browser asks before it sends JSON to another site, and gets no leave.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, f"content-type: must be application/json, got {content_type[:80]!r}; send JSON")
    raw = await _bounded_body(http, max_model_len)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _field_error(error) from error


async def _bounded_body(http: Request, max_model_len: int) -> bytes:
    limit = body_limit(max_model_len)
    announced = int(http.headers.get("content-length", "0"))
    if announced > limit:
        raise _too_long(f"{announced}", limit, max_model_len)
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:  # sent in chunks, without a length
                raise _too_long(f"at least {len(body)}", limit, max_model_len)
    except ClientDisconnect as error:
        raise ApiError(499, "the client went away") from error
    return bytes(body)


def _too_long(got: str, limit: int, max_model_len: int) -> ApiError:
    return ApiError(
        413,
        f"body: must have at most {limit} bytes, enough for a prompt that fills the context of {max_model_len} tokens, "
        f"got {got}; shorten the prompt, or serve a longer context (max_model_len)",
        code="request_too_large",
    )


def _field_error(error: ValidationError) -> ApiError:
    if error.error_count() > MOST_PROBLEMS:
        return ApiError(
            400, f"body: {error.error_count()} fields are wrong or not supported; leave out what is not needed"
        )
    # Of a field that may be a string or a list there is one problem for each; that of the other form says nothing.
    first = min(error.errors(), key=lambda problem: problem["type"] in ("string_type", "list_type"))
    field = ".".join(map(str, first["loc"])) or "body"
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{field}: not supported by this server; leave it out", param=field)
    return ApiError(400, f"{field}: {first['msg']}", param=field)
