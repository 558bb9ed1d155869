"""What a call is, without making it: a request, where it goes, and what of the answer the caller gets.

`rpcs` describes every RPC so, once. The clients only carry such descriptions out: `sync_client` with threads,
`aio_client` with asyncio. `described_by` gives their methods the arguments and the text of the description.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import grpc
import grpc.aio
from qerld.v1 import policy_pb2_grpc, reward_pb2_grpc, rollout_pb2_grpc, run_pb2_grpc

from qerld_client.resume import Resume

T = TypeVar("T")
Request = TypeVar("Request")
Response = TypeVar("Response")
Method = TypeVar("Method", bound=Callable[..., Any])


class Stubs:
    """The stubs of one channel. On an asyncio channel their methods are asyncio's; the types here are the sync ones."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None:
        sync = cast(grpc.Channel, channel)
        self.runs = run_pb2_grpc.RunServiceStub(sync)
        self.rollouts = rollout_pb2_grpc.RolloutServiceStub(sync)
        self.rewards = reward_pb2_grpc.RewardServiceStub(sync)
        self.policies = policy_pb2_grpc.PolicyServiceStub(sync)


@dataclass(frozen=True)
class Unary(Generic[T]):
    """One answer.

    Attributes:
        rpc: The method.
        request: What is sent, again with each retry; a function that makes the messages of a client stream.
        result: The answer's message → what the caller gets.
        least_seconds: The deadline is the client's, but not less than this.
        if_exists: What to call instead when the answer is ALREADY_EXISTS.
    """

    rpc: Callable[[Stubs], Any]
    request: Any
    result: Callable[[Any], T]
    least_seconds: float = 0.0
    if_exists: Unary[T] | None = None

    def argument(self) -> Any:
        """Return what the stub's method takes, for one attempt."""
        return self.request() if callable(self.request) else self.request


@dataclass(frozen=True)
class Streamed(Generic[T]):
    """Many answers, over as many connections as it takes.

    Attributes:
        rpc: The method.
        resume: What to ask for after a break, and which answers are new.
        timeout: Seconds until the whole fails; None never.
        connection: Deadline of one connection, in seconds.
    """

    rpc: Callable[[Stubs], Any]
    resume: Resume[Any, Any, T]
    timeout: float | None
    connection: float


@dataclass(frozen=True)
class Gathered(Generic[T]):
    """A stream of which the caller gets one result, at its end: `result` makes it of all items."""

    stream: Streamed[Any]
    result: Callable[[Sequence[Any]], T]


@dataclass(frozen=True)
class Paged(Generic[T]):
    """Items page by page: `page` asks for the next one, `items` takes them out of it."""

    page: Unary[Any]
    items: Callable[[Any], Sequence[T]]

    def turn(self, response: Any) -> bool:
        """Ask for the page after this one from now on; returns False when it was the last."""
        self.page.request.page_token = response.next_page_token
        return bool(response.next_page_token)


def unary(
    rpc: Callable[[Stubs], grpc.UnaryUnaryMultiCallable[Request, Response]],
    request: Request,
    result: Callable[[Response], T],
    *,
    least_seconds: float = 0.0,
    if_exists: Unary[T] | None = None,
) -> Unary[T]:
    """Return a `Unary` whose request and result fit its method: the type checker sees that."""
    return Unary(rpc, request, result, least_seconds, if_exists)


def streamed(
    rpc: Callable[[Stubs], grpc.UnaryStreamMultiCallable[Request, Response]],
    resume: Resume[Request, Response, T],
    timeout: float | None,
    connection: float,
) -> Streamed[T]:
    """Return a `Streamed` whose `resume` fits its method: the type checker sees that."""
    return Streamed(rpc, resume, timeout, connection)


def described_by(build: Callable[..., Any], method: Method) -> Method:
    """Return the method of a client that carries out what `build` describes, with its name, text and arguments."""
    described: Any = method
    described.__name__, described.__doc__ = build.__name__, build.__doc__
    signature = inspect.signature(build)
    _kind, _, result = str(signature.return_annotation).removesuffix("]").partition("[")  # such as Unary[Run]
    returned = re.sub(r"\bT\b", result, str(inspect.signature(method).return_annotation))
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self, *signature.parameters.values()]
    described.__signature__ = signature.replace(parameters=parameters, return_annotation=returned)
    return method
