"""When to call again. Every mutation carries a request id, so calling again never does a thing twice."""

from __future__ import annotations

import logging
import math
import random
import time
from dataclasses import dataclass

import grpc

from qerld_client.errors import DeadlineError, QerldError, from_rpc

LEAST_SECONDS = 0.001
"""Deadline of an attempt for which there is no time left: it fails as such."""

NOTICE_SECONDS = 30.0
"""A call that has failed for this long says so in the log, once."""

logger = logging.getLogger("qerld_client")


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


class Attempts:
    """The attempts of one call, or the connections of one stream: deadlines, and the wait after each failure.

    Args:
        policy: When to try again.
        timeout: Seconds for all of them together; None is without end.
        connection: Deadline of one connection of a stream, in seconds: one that reaches it is opened again at once.
            None for a call, whose only deadline is the whole.
    """

    def __init__(self, policy: RetryPolicy, timeout: float | None, connection: float | None = None) -> None:
        self._policy, self._connection = policy, connection
        self._end = math.inf if timeout is None else time.monotonic() + timeout
        self._failures = 0
        self._since = 0.0
        self._noticed = False
        self._last: QerldError | None = None

    def seconds(self) -> float:
        """Return the deadline of the next attempt."""
        left = self._end - time.monotonic()
        return max(LEAST_SECONDS, left if self._connection is None else min(self._connection, left))

    def answered(self) -> None:
        """The service answered: the next failure is a first one."""
        self._failures, self._last, self._noticed = 0, None, False

    def wait_after(self, rpc_error: grpc.RpcError) -> float:
        """Return how long to wait before the next attempt. Raises the client's error when there is to be none."""
        error = from_rpc(rpc_error)
        late = isinstance(error, DeadlineError)
        left = self._end - time.monotonic()
        if late and left > 0 and self._connection is not None:
            return 0.0  # the connection lived as long as one may
        delay = self._policy.delay(error, self._failures)
        if delay is None or delay >= left:
            # That the time is over says less than what kept failing.
            raise (self._last if late and self._last else error) from rpc_error
        self._notice(error)
        self._failures += 1
        self._last = error
        return delay

    def _notice(self, error: QerldError) -> None:
        now = time.monotonic()
        if self._failures == 0:
            self._since = now
        if now - self._since >= NOTICE_SECONDS and not self._noticed:
            self._noticed = True
            logger.warning("no success for %.0f s, still trying: %s", now - self._since, error)
