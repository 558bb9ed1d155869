"""Checks of request fields: each problem names the field, the limit, the value and the way out."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from qerld_learner.errors import InvalidRequestError, Violation

MAX_REQUEST_ID = 128
MAX_GROUP_SIZE = 1024
MAX_PAGE = 1000
DEFAULT_PAGE = 100
MAX_LABELS = 32
MAX_LABEL_KEY = 63
MAX_LABEL_VALUE = 4096
MAX_SEED = 2**63 - 1 - MAX_GROUP_SIZE
"""Rollout i samples with seed + i, which must stay a signed 64-bit number (the store, vLLM)."""
MAX_NUMBER = 2**63 - 1
"""Largest step or version in a request: the wire's have 64 bits without a sign, the store's integers one."""
MAX_DURATION = 30 * 24 * 3600.0
MAX_ROLLOUT_ID = 64
RUN_NAME = re.compile(r"[a-z0-9_-]{1,63}")


class Checks:
    """Collects violations, so that a client sees all of them at once."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, field: str, problem: str) -> None:
        self.violations.append(Violation(field, problem))

    def done(self) -> None:
        """Raise `InvalidRequestError` when anything was wrong."""
        if self.violations:
            raise InvalidRequestError(self.violations)

    def between(self, field: str, value: float, low: float, high: float, way_out: str) -> None:
        """Want a finite low ≤ value ≤ high."""
        if not (math.isfinite(value) and low <= value <= high):
            self.add(field, f"must be from {low:g} to {high:g}, got {value:g}; {way_out}")

    def above(self, field: str, value: float, low: float, high: float, way_out: str) -> None:
        """Want a finite low < value ≤ high."""
        if not (math.isfinite(value) and low < value <= high):
            self.add(field, f"must be above {low:g} and at most {high:g}, got {value:g}; {way_out}")

    def required(self, field: str, value: str, way_out: str) -> None:
        if not value:
            self.add(field, f"must not be empty; {way_out}")

    def number(self, field: str, value: int, way_out: str) -> None:
        """Want an unsigned 64-bit number that the store can hold."""
        if value > MAX_NUMBER:
            self.add(field, f"must be at most {MAX_NUMBER}, got {value}; {way_out}")

    def run(self, name: str) -> None:
        self.required("run", name, "name the run")

    def run_name(self, name: str) -> None:
        """Check the name of a run that is to be created."""
        if not RUN_NAME.fullmatch(name):
            self.add("run", f"must be 1 to 63 of a-z, 0-9, '-' and '_', got {name[:40]!r}; rename the run")

    def request_id(self, value: str, field: str = "request_id") -> None:
        if not 1 <= len(value) <= MAX_REQUEST_ID:
            way_out = "send a fresh UUID with each mutation and the same one with its retries"
            self.add(field, f"must have 1 to {MAX_REQUEST_ID} characters, got {len(value)}; {way_out}")

    def labels(self, labels: Mapping[str, str], field: str = "labels") -> None:
        if len(labels) > MAX_LABELS:
            self.add(field, f"must have at most {MAX_LABELS} entries, got {len(labels)}; keep the rest on your side")
        for key, value in labels.items():
            if not 1 <= len(key) <= MAX_LABEL_KEY:
                self.add(field, f"keys must have 1 to {MAX_LABEL_KEY} characters, got {len(key)}; shorten {key[:20]!r}")
            if len(value) > MAX_LABEL_VALUE:
                limit = f"must have at most {MAX_LABEL_VALUE} characters, got {len(value)}"
                self.add(f"{field}[{key[:MAX_LABEL_KEY]}]", f"{limit}; store it on your side and label it with an id")

    def duration(self, field: str, message: Duration) -> float:
        """Return a duration in seconds, wanted above 0 and at most 30 days."""
        seconds = message.seconds + message.nanos / 1e9
        self.above(field, seconds, 0, MAX_DURATION, "give it in seconds or leave it unset")
        return seconds

    def page_size(self, value: int) -> int:
        """Return the page size; 0 means the default."""
        if value > MAX_PAGE:
            self.add("page_size", f"must be at most {MAX_PAGE}, got {value}; ask for more pages")
        return value or DEFAULT_PAGE

    def no_unknown_fields(self, field: str, message: Message, way_out: str) -> None:
        """Refuse fields that this version does not know, by number."""
        unknown: Any = UnknownFieldSet(message)
        for number in sorted({item.field_number for item in unknown}):
            self.add(f"{field}.{number}", f"field number {number} is not known here; {way_out}")


def body_hash(request: Any) -> str:
    """Return the SHA-256 of a mutation's body: its type and every field except `request_id`."""
    request_id = request.request_id
    request.ClearField("request_id")
    body = request.SerializeToString(deterministic=True)
    request.request_id = request_id
    return hashlib.sha256(request.DESCRIPTOR.full_name.encode() + b"\0" + body).hexdigest()
