"""When to call again. Every mutation carries a request id, so calling again never does a thing twice."""

from __future__ import annotations

import random
from dataclasses import dataclass

import grpc

from qerld_client.errors import QerldError


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter, in seconds; what the service asks for in RetryInfo comes first.

    Attributes:
        first: Longest first wait.
        longest: Longest wait.
        factor: Growth a failed attempt.
    """

    first: float = 0.1
    longest: float = 5.0
    factor: float = 2.0

    def delay(self, error: QerldError, failures: int) -> float | None:
        """Return how long to wait after `failures` failed attempts in a row, or None when a retry cannot help.

        RESOURCE_EXHAUSTED without RetryInfo is a message over the size limit, which stays over it.
        """
        if error.retry_after is not None:
            return error.retry_after * random.uniform(1.0, 1.25)  # noqa: S311 - jitter
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            return None
        ceiling = min(self.longest, self.first * self.factor ** min(failures, 32))
        return random.uniform(ceiling / 2, ceiling)  # noqa: S311 - jitter
