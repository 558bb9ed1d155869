"""Large and hostile requests of the OpenAI API: refused by size before they cost anything, and nobody else waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from typing import Any

import httpx
import pytest
from qerld.v1 import replica_pb2_grpc
from qerld_service.openai_proxy import OpenAIProxy
from qerld_service.openai_requests import body_limit
from qerld_service.policy import RunningPolicy
from support.policy import collect, request, sample, scrape

pytestmark = pytest.mark.engine

TEXT = {"model": "agent", "prompt": "three plus", "max_tokens": 8, "seed": 3}
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{length}\r\n\r\n"


def largest_prompt(policy: RunningPolicy, **more: Any) -> dict[str, Any]:
    """A request that just fits; its prompt has far more tokens than the context."""
    room = body_limit(policy.engine.max_model_len) - 1000
    return {**TEXT, "prompt": ("seven words of text come again " * (room // 31)), **more}


async def raw_answer(policy: RunningPolicy, *parts: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of what is answered to bytes that never end a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", policy.openai_port)
    try:
        async with asyncio.timeout(30):
            for part in parts:
                writer.write(part)
                await writer.drain()
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return int(head.split()[1]), json.loads(await reader.readexactly(length))["error"]
    finally:
        writer.close()


async def test_an_announced_length_is_refused_before_the_body(live: RunningPolicy) -> None:
    status, error = await raw_answer(live, HEAD.format(length="content-length: 20000000").encode())
    limit = body_limit(live.engine.max_model_len)
    assert (status, error["code"], error["type"]) == (413, "request_too_large", "invalid_request_error")
    assert f"at most {limit} bytes" in error["message"]
    assert "got 20000000; shorten the prompt" in error["message"]


async def test_a_body_without_a_length_is_read_up_to_the_limit(live: RunningPolicy) -> None:
    limit = body_limit(live.engine.max_model_len)
    chunk = b"%x\r\n%s\r\n" % (1 << 14, b" " * (1 << 14))
    head = HEAD.format(length="transfer-encoding: chunked").encode()
    status, error = await raw_answer(live, head, *[chunk] * (limit // (1 << 14) + 1))
    assert (status, error["code"]) == (413, "request_too_large")
    assert f"at most {limit} bytes" in error["message"]


async def test_a_whole_body_above_the_limit_is_refused(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = await http.post(path, json={**TEXT, "prompt": "word " * 4_000_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert (await http.post("/v1/completions", json=TEXT)).status_code == 200


async def test_a_prompt_of_ids_that_fills_the_context_fits(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    ids = [511] * (live.engine.max_model_len - 1)
    answer = await http.post("/v1/completions", json={**TEXT, "prompt": ids})
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


async def test_tokenising_holds_nobody_up(
    live: RunningPolicy,
    http: httpx.AsyncClient,
    stub: replica_pb2_grpc.PolicyReplicaServiceAsyncStub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one prompt is tokenised, here until the test lets go, health, gRPC and unknown models are answered."""
    begun, let_go = threading.Event(), threading.Event()
    tokenise = OpenAIProxy._text_ids

    def held(proxy: OpenAIProxy, text: str) -> list[int]:
        begun.set()
        assert let_go.wait(300)
        return tokenise(proxy, text)

    monkeypatch.setattr(OpenAIProxy, "_text_ids", held)
    call = asyncio.create_task(http.post("/v1/completions", json=largest_prompt(live)))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/completions", json=largest_prompt(live, model="nobody"))).status_code == 404
        await collect(stub, request(4, run="agent", max_tokens=1))
        assert not call.done()
    finally:
        let_go.set()
    answer = await call
    assert answer.status_code == 400
    assert "must have from 1 to" in answer.json()["error"]["message"]


async def test_headers_are_bounded(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.openai_port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        for _ in range(160):  # 10 MiB, of which 64 KiB are read
            writer.write(b"x" * (1 << 16))
            await writer.drain()
        answer = await reader.read()
    writer.close()
    assert not answer or b" 400 " in answer.splitlines()[0]
    assert (await http.get("/health")).status_code == 200


async def test_a_stream_that_nobody_reads_gives_its_slot_back(
    live: RunningPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerld_service.openai_proxy.UNREAD_SECONDS", 0.5)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    raw.connect(("127.0.0.1", live.openai_port))
    body = json.dumps({**TEXT, "stream": True, "n": 128, "max_tokens": 240, "logprobs": 0}).encode()
    head = HEAD.format(length=f"content-length: {len(body)}").encode()
    raw.sendall((head + body) * 6)  # one answer alone may fit into the buffers between us
    given_up = 'qerld_policy_requests_total{code="CANCELLED",method="completions"}'
    async with asyncio.timeout(200):
        while not sample(await scrape(live), given_up):  # noqa: ASYNC110 - a scrape, not an event
            await asyncio.sleep(0.1)
    assert not any(live.engine.stats.in_flight.values())
    while await asyncio.to_thread(raw.recv, 1 << 20):  # ends: the connection was closed
        pass
    raw.close()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [("text/plain", 415), (None, 415), ("application/json; charset=utf-8", 200), ("Application/JSON", 200)],
)
async def test_only_json_is_read(
    live: RunningPolicy, http: httpx.AsyncClient, content_type: str | None, status: int
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = await http.post("/v1/completions", content=json.dumps(TEXT).encode(), headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ["a"] * 10_000}, "valid integer"),
        ({"stop": ["a"] * 65}, "at most 64 items"),
        ({"stop": "a" * 257}, "at most 256 characters"),
        ({f"field{number}": 1 for number in range(3000)}, "3000 fields are wrong"),
    ],
)
async def test_many_problems_are_not_listed(
    live: RunningPolicy, http: httpx.AsyncClient, change: dict[str, Any], message: str
) -> None:
    answer = await http.post("/v1/completions", json={**TEXT, **change})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert len(answer.content) < 1000


async def test_what_is_no_json_is_refused(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b'{"model": ', headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "Invalid JSON" in answer.json()["error"]["message"]
