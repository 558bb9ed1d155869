"""Idempotent mutations: a request's answer is stored in the transaction that made it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select

from ..errors import ConflictError
from .rows import dump
from .schema import requests

_FIND = select(requests.c.body_hash, requests.c.answer).where(
    requests.c.run == bindparam("of_run"), requests.c.request_id == bindparam("of_id")
)
_INSERT = insert(requests)


def once(
    connection: Connection, run: str, request_id: str, body_hash: str, make: Callable[[], Any]
) -> tuple[Any, bool]:
    """Return the first answer of a request and True, or what `make` returns (JSON-able), now stored, and False.

    Raises `ConflictError` when the id was used with another body.
    """
    found = answered(connection, run, request_id, body_hash)
    if found is not None:
        return found[0], True
    answer = make()
    connection.execute(
        _INSERT,
        {"run": run, "request_id": request_id, "body_hash": body_hash, "answer": dump(answer), "at": time.time()},
    )
    return answer, False


def answered(connection: Connection, run: str, request_id: str, body_hash: str) -> tuple[Any] | None:
    """Return the stored answer, in a tuple, or None when the request is new."""
    row = connection.execute(_FIND, {"of_run": run, "of_id": request_id}).one_or_none()
    if row is None:
        return None
    if row.body_hash != body_hash:
        raise ConflictError(
            f"request_id {request_id!r} of run {run!r} was used before with another body;"
            " use a new id for a new request, and the same body to repeat one"
        )
    return (json.loads(row.answer),)
