"""OpenAI's HTTP API on loopback, for agents: a model name is a run and means its live version, without noise.

What an agent samples here is no training rollout. None of vLLM's own routes exist, and neither an adapter's name nor a
cache salt can come from a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jinja2
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from qerld_kernels.exclusive import port_error
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers import PreTrainedTokenizerFast

from qerld_service.adapters import AdapterNotLoadedError
from qerld_service.engine import Delta, EngineDiedError, PolicyEngine, RequestError
from qerld_service.metrics import PolicyMetrics
from qerld_service.openai_requests import ApiError, read_request
from qerld_service.openai_types import ChatForm, ChatMessage, ChatRequest, CompletionRequest, TextForm
from qerld_service.reconciler import NotServedError, Reconciler

HOST = "127.0.0.1"
UNREAD_SECONDS = 30.0
"""A stream whose client takes nothing for so long is given up: it would hold its version's slot for ever."""
Result = TypeVar("Result")
Form = ChatForm | TextForm


class OpenAIProxy:
    """Answers completions from the live version of the run that the client names as its model."""

    def __init__(
        self, engine: PolicyEngine, reconciler: Reconciler, tokenizer: PreTrainedTokenizerFast, metrics: PolicyMetrics
    ) -> None:
        self._engine, self._reconciler, self._tokenizer, self._metrics = engine, reconciler, tokenizer, metrics
        # Text of token ids that were asked for; it grows to the size of the vocabulary.
        self._texts: dict[int, str] = {}
        # Off the event loop, which gRPC shares. One thread: the tokenizer is not made for several.
        self._aside = ThreadPoolExecutor(1, "openai")

    def models(self) -> dict[str, Any]:
        """GET /v1/models: runs with a live version."""
        rows = [
            {
                "id": run,
                "object": "model",
                "created": 0,
                "owned_by": "qerld",
                "max_model_len": self._engine.max_model_len,
            }
            for run in self._reconciler.runs
        ]
        return {"object": "list", "data": rows}

    async def chat(self, http: Request) -> Response:
        body = await read_request(http, ChatRequest, self._engine.max_model_len)
        self._check_model(body.model)
        return await self._answer(http, body, ChatForm(), await self._off_loop(self._chat_ids, body.messages))

    async def complete(self, http: Request) -> Response:
        body = await read_request(http, CompletionRequest, self._engine.max_model_len)
        self._check_model(body.model)
        prompt = body.prompt
        ids = await self._off_loop(self._text_ids, prompt) if isinstance(prompt, str) else prompt
        return await self._answer(http, body, TextForm(), ids)

    async def _off_loop(self, work: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._aside, work, *arguments)

    def _check_model(self, run: str) -> None:
        if run not in self._reconciler.runs:
            known = self._reconciler.runs
            raise ApiError(404, f"model: no run {run[:80]!r} here; runs are {known}", code="model_not_found")

    def _chat_ids(self, messages: Sequence[ChatMessage]) -> list[int]:
        turns = [{"role": message.role, "content": message.text} for message in messages]
        try:
            return list(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
        except (jinja2.TemplateError, ValueError) as error:
            raise ApiError(400, f"messages: the chat template refuses them: {error}", param="messages") from error

    def _text_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    async def _answer(
        self, http: Request, body: ChatRequest | CompletionRequest, form: Form, ids: Sequence[int]
    ) -> Response:
        adapter = self._reconciler.live(body.model)
        head: dict[str, Any] = {
            "id": f"{form.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"{adapter.run}@{adapter.version}",
        }
        sampling = body.sampling(self._engine.max_model_len)
        deltas = self._counted(
            form.method, self._engine.generate(adapter.key(noise_free=True), head["id"], ids, sampling)
        )
        if body.stream:
            # The first tokens before the status line, so that a refused request still gets its own status.
            first = await while_connected(http, anext(deltas))
            events = self._events(head, form, body, len(ids), first, deltas)
            return StreamingResponse(read_in_time(events), media_type="text/event-stream")
        wholes = await while_connected(http, self._wholes(body.n, deltas))
        return await self._off_loop(self._whole, head, form, body, len(ids), wholes)

    async def _counted(self, method: str, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        with self._metrics.call(method) as outcome:
            try:
                async with contextlib.aclosing(deltas):
                    async for delta in deltas:
                        self._metrics.generated_tokens.labels(method).inc(len(delta.token_ids))
                        yield delta
                outcome.code = "200"
            except Exception as error:
                outcome.code = str(api_error(error).status)
                raise

    async def _wholes(self, count: int, deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
        wholes = [Delta(index, [], [], None, "") for index in range(count)]
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                wholes[delta.index] = joined(wholes[delta.index], delta)
        return wholes

    def _whole(
        self,
        head: dict[str, Any],
        form: Form,
        body: ChatRequest | CompletionRequest,
        prompt_tokens: int,
        wholes: Sequence[Delta],
    ) -> Response:
        return JSONResponse(
            {
                **head,
                "object": form.whole,
                "choices": [form.choice(whole, self._logprobs(body, whole)) for whole in wholes],
                "usage": usage(prompt_tokens, sum(len(whole.token_ids) for whole in wholes)),
            }
        )

    async def _events(
        self,
        head: dict[str, Any],
        form: Form,
        body: ChatRequest | CompletionRequest,
        prompt_tokens: int,
        first: Delta,
        rest: AsyncGenerator[Delta, None],
    ) -> AsyncGenerator[str, None]:
        chunk = {**head, "object": form.chunk}
        tokens = 0
        for index in range(body.n):
            if (opening := form.opening(index)) is not None:
                yield event({**chunk, "choices": [opening]})
        try:
            async with contextlib.aclosing(rest):
                async for delta in chained(first, rest):
                    tokens += len(delta.token_ids)
                    yield event({**chunk, "choices": [form.part(delta, self._logprobs(body, delta))]})
        except (EngineDiedError, AdapterNotLoadedError) as error:
            yield event(api_error(error).body())
            return
        if body.usage_in_stream:
            yield event({**chunk, "choices": [], "usage": usage(prompt_tokens, tokens)})
        yield "data: [DONE]\n\n"

    def _logprobs(self, body: ChatRequest | CompletionRequest, delta: Delta) -> list[tuple[str, float]] | None:
        # 0 asks for them on one route, and False refuses them on the other.
        if body.logprobs is None or body.logprobs is False:
            return None
        return list(zip(map(self._text_of, delta.token_ids), delta.logprobs, strict=True))

    def _text_of(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = str(self._tokenizer.decode([token]))
        return self._texts[token]


async def read_in_time(events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """Pass events on; cancel the response when one is not taken within UNREAD_SECONDS."""
    response, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert response is not None
    async with contextlib.aclosing(events):
        async for one in events:
            alarm = loop.call_later(UNREAD_SECONDS, response.cancel)
            try:
                yield one
            finally:
                alarm.cancel()


def create_app(proxy: OpenAIProxy, engine: PolicyEngine) -> FastAPI:
    """The routes that exist; everything else is 404."""
    app = FastAPI(title="qerld policy", docs_url=None, redoc_url=None, openapi_url=None)
    # A web page that the user of this machine visits must not reach the port through a name of its own.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    for kind in (ApiError, HTTPException, NotServedError, RequestError, EngineDiedError):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(AdapterNotLoadedError, _on_error)
    app.add_api_route("/v1/models", proxy.models, methods=["GET"])
    app.add_api_route("/v1/chat/completions", proxy.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", proxy.complete, methods=["POST"], response_model=None)

    async def health() -> Response:
        return Response(status_code=503 if engine.errored else 200)

    app.add_api_route("/health", health, methods=["GET"], response_model=None)
    return app


class LoopbackServer:
    """Serves an app on loopback, in the running event loop.

    Raises:
        PortError: the port is taken.
    """

    def __init__(self, app: FastAPI, port: int, drain_seconds: float) -> None:
        try:
            self._listener = socket.create_server((HOST, port))
        except OSError as error:
            raise port_error("openai_port", HOST, port, error) from error
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",  # bounds the headers, which httptools does not
            server_header=False,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        self._server = _QuietServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Take no more requests, and let running ones end for `drain_seconds`."""
        self._server.should_exit = True
        await self._task
        self._listener.close()


class _QuietServer(uvicorn.Server):
    """Leaves the process's signals to the process."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def while_connected(http: Request, work: Awaitable[Result]) -> Result:
    """Await `work`; cancel it when the client goes away (its sampling is aborted then)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def api_error(error: Exception) -> ApiError:
    """Any exception as an answer."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error))
        case NotServedError() | AdapterNotLoadedError() | EngineDiedError():
            return ApiError(503, str(error))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
    return ApiError(500, "internal error")


async def _on_error(_: Request, error: Exception) -> Response:
    answer = api_error(error)
    return JSONResponse(answer.body(), status_code=answer.status)


def event(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def joined(whole: Delta, new: Delta) -> Delta:
    """A completion so far, and its next stretch."""
    return Delta(
        whole.index,
        whole.token_ids + new.token_ids,
        whole.logprobs + new.logprobs,
        new.finish_reason,
        whole.text + new.text,
    )


async def chained(first: Delta, rest: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    yield first
    async for delta in rest:
        yield delta


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Counts in OpenAI's format."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
