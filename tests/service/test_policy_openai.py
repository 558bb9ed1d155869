"""The OpenAI API: what it answers, and what cannot be reached through it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from qerld_service.policy import RunningPolicy
from support.peer_learner import PeerLearner
from support.policy import reconciled, sample, scrape, until
from support.tiny import make_adapter

pytestmark = pytest.mark.engine

CHAT = {"model": "agent", "messages": [{"role": "user", "content": "three plus four"}], "max_tokens": 8, "seed": 3}
TEXT = {"model": "agent", "prompt": "three plus", "max_tokens": 8, "seed": 3}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_models_are_runs(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    assert [row["id"] for row in (await http.get("/v1/models")).json()["data"]] == ["agent"]


async def test_chat_streams_what_it_answers_whole(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/chat/completions", json={**CHAT, "n": 2, "logprobs": True})).json()
    assert (whole["object"], whole["model"], whole["system_fingerprint"]) == ("chat.completion", "agent", "agent@4")
    assert whole["usage"]["completion_tokens"] == sum(len(c["logprobs"]["content"]) for c in whole["choices"])
    parts = await events(http, "/v1/chat/completions", {**CHAT, "n": 2, "stream_options": {"include_usage": True}})
    assert parts[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"]["content"] for c in mine) == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]


async def test_completions_of_text_and_of_ids(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/completions", json={**TEXT, "logprobs": 0})).json()
    [choice] = whole["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == whole["usage"]["completion_tokens"]
    parts = await events(http, "/v1/completions", TEXT)
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
    ids = await http.post("/v1/completions", json={**TEXT, "prompt": [40, 41, 42], "temperature": 0})
    assert ids.json()["usage"]["prompt_tokens"] == 3


async def test_agents_get_the_policy_without_its_noise(
    live: RunningPolicy,
    http: httpx.AsyncClient,
    peer: PeerLearner,
    tmp_path: Path,
) -> None:
    body = {**TEXT, "temperature": 0, "max_tokens": 4, "logprobs": 0}
    with_noise_around = (await http.post("/v1/completions", json=body)).json()["choices"]
    await peer.desire("agent", 5, make_adapter(tmp_path / "same", 1, 0.5), sigma=0.0)
    await peer.report(reconciled)
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["system_fingerprint"] == "agent@5"
    assert [c["text"] for c in answer["choices"]] == [c["text"] for c in with_noise_around]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "top_k": 5}, "top_k"),
        ("/v1/chat/completions", {**CHAT, "tools": []}, "tools"),
        ("/v1/chat/completions", {**CHAT, "cache_salt": "x"}, "cache_salt"),
        ("/v1/chat/completions", {**CHAT, "top_p": 0.9}, "top_p"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, "messages"),
        ("/v1/completions", {**TEXT, "prompt": ""}, None),
        ("/v1/completions", {**TEXT, "n": 0}, "n"),
        ("/v1/completions", {**TEXT, "prompt": [1] * 400}, None),
        ("/v1/completions", {**TEXT, "prompt": [100000], "stream": True}, None),
    ],
)
async def test_unsupported_and_bad_fields_are_refused_by_name(
    live: RunningPolicy,
    http: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    param: str | None,
) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].split(".")[0] == param


@pytest.mark.parametrize("model", ["nobody", "agent@4", "agent@4~clean", ""])
async def test_unknown_models_are_404(live: RunningPolicy, http: httpx.AsyncClient, model: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        response = await http.post(path, json={**body, "model": model})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert not live.engine.errored


@pytest.mark.parametrize(
    "route",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/collective_rpc",
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/server_info",
        "/tokenize",
        "/docs",
        "/openapi.json",
        "/metrics",
        "/v1/embeddings",
        "/invocations",
        "/scale_elastic_ep",
        "/init_weight_transfer_engine",
        "/update_weights",
        "/abort_requests",
    ],
)
async def test_routes_of_vllm_do_not_exist(live: RunningPolicy, http: httpx.AsyncClient, route: str) -> None:
    assert (await http.post(route, json={})).status_code == 404
    assert (await http.get(route)).status_code == 404


async def test_only_loopback_names_are_answered(live: RunningPolicy, http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models", headers={"host": "attacker.example"})).status_code == 400


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_is_aborted(
    live: RunningPolicy,
    http: httpx.AsyncClient,
    stream: bool,
) -> None:
    body = {**TEXT, "n": 32, "max_tokens": 240, "stream": stream}
    call = asyncio.create_task(http.post("/v1/completions", json=body))
    await until(lambda: sum(live.engine.stats.in_flight.values()) > 0)
    call.cancel()  # closes the connection
    await until(lambda: not sum(live.engine.stats.in_flight.values()))
    text = await scrape(live)
    assert sample(text, 'qerld_policy_generated_tokens_total{method="completions"}') < 32 * 200
    assert sample(text, 'qerld_policy_requests_total{code="CANCELLED",method="completions"}') == 1
