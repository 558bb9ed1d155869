"""Long lists in queries: databases limit how many values one statement may have (SQLite 32,766, PostgreSQL 65,535)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

MAX_IN = 4096
"""Most values of one `IN (…)`."""


def chunks(values: Iterable[T], size: int = MAX_IN) -> Iterator[list[T]]:
    """Yield the values in lists of at most `size`; nothing for none."""
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk
