"""What is wrong with a request over HTTP, by status, code and field: a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.stack import MODEL, Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    for module in ("pdq_router", "pdq_decode", "pdq_gateway"):
        stack.add(module)
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.services[2].api, timeout=30) as client:
        yield client


def chat(**fields: Any) -> bytes:
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return json.dumps({name: value for name, value in (asked | fields).items() if value != "absent"}).encode()


def completion(**fields: Any) -> bytes:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
    return json.dumps({name: value for name, value in (asked | fields).items() if value != "absent"}).encode()


BODIES: list[tuple[bytes, int, str, str | None]] = [
    (b"", 400, "invalid_json", None),
    (b"\xff{}", 400, "invalid_json", None),
    (b"[1]", 400, "invalid_json", None),
    (chat()[:-1] + b', "model": "sim"}', 400, "invalid_json", "model"),
    (chat(model="absent"), 400, "missing_field", "model"),
    (chat(model=None), 400, "missing_field", "model"),
    (chat(model=7), 400, "invalid_type", "model"),
    (chat(model="nobody"), 404, "unknown_model", "model"),
    (chat(messages="absent"), 400, "missing_field", "messages"),
    (completion(), 400, "missing_field", "messages"),
    (chat(messages=[]), 400, "empty_prompt", "messages"),
    (chat(messages=[{"role": "wizard", "content": "x"}]), 400, "unknown_role", "messages[0].role"),
    (chat(temperature=3), 400, "invalid_value", "temperature"),
    (chat(n=0), 400, "unsupported", "n"),
    (chat(n=9), 400, "unsupported", "n"),
    (chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
    (chat(stream=True, stream_options={"usage": True}), 400, "unknown_field", "stream_options.usage"),
    (chat(cache_salt="x"), 400, "unknown_field", "cache_salt"),
    (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    (chat(messages=[{"role": "user", "content": "x" * 5000}]), 400, "context_length_exceeded", "messages"),
    (chat(messages=[{"role": "user", "content": "x" * 5000}], stream=True), 400, "context_length_exceeded", "messages"),
    (chat(messages=[{"role": "user", "content": "x" * 5000}], n=3), 400, "context_length_exceeded", "messages"),
    (chat(messages=[{"role": "user", "content": "x" * (1 << 20)}]), 413, "payload_too_large", None),
    # As a message it is over the broker's limit only together with its headers.
    (chat() + b" " * ((1 << 20) - len(chat())), 413, "payload_too_large", None),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), BODIES)
async def test_bad_bodies(http: httpx.AsyncClient, body: bytes, status: int, code: str, param: str | None) -> None:
    answer = await http.post("/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]


HEADERS: list[tuple[dict[str, str], int, str, str | None]] = [
    ({"Content-Type": "text/plain"}, 415, "unsupported_media_type", "Content-Type"),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type", "Content-Type"),
    ({"Content-Encoding": "gzip"}, 415, "unsupported_media_type", "Content-Encoding"),
    ({"Idempotency-Key": ""}, 400, "invalid_value", "Idempotency-Key"),
    ({"Idempotency-Key": "x" * 256}, 400, "invalid_value", "Idempotency-Key"),
    ({"Idempotency-Key": "a\tb"}, 400, "invalid_value", "Idempotency-Key"),
    ({"Pdq-Background": "yes"}, 400, "invalid_value", "Pdq-Background"),
    ({"Pdq-Priority": "urgent"}, 400, "invalid_value", "Pdq-Priority"),
    ({"Pdq-Priority": ""}, 400, "invalid_value", "Pdq-Priority"),
    ({"Pdq-Order": "sideways"}, 400, "invalid_value", "Pdq-Order"),
    ({"Pdq-Deadline": "tomorrow"}, 400, "invalid_value", "Pdq-Deadline"),
    ({"Pdq-Deadline": "-1"}, 400, "invalid_value", "Pdq-Deadline"),
    ({"Pdq-Deadline": "nan"}, 400, "invalid_value", "Pdq-Deadline"),
    ({"Pdq-Deadline": "1e9"}, 400, "invalid_value", "Pdq-Deadline"),
    ({"Last-Event-ID": "7"}, 400, "invalid_value", "Last-Event-ID"),
]


@pytest.mark.parametrize(("headers", "status", "code", "param"), HEADERS)
async def test_bad_headers(
    http: httpx.AsyncClient, headers: dict[str, str], status: int, code: str, param: str | None
) -> None:
    sent = {"Content-Type": "application/json"} | headers
    answer = await http.post("/chat/completions", content=chat(), headers=sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error


@pytest.mark.parametrize("media", ["application/json", "application/json; charset=utf-8", "Application/JSON", None])
async def test_json_by_any_of_its_names(http: httpx.AsyncClient, media: str | None) -> None:
    answer = await http.post(
        "/chat/completions", content=chat(), headers={"Content-Type": media} if media is not None else {}
    )
    assert answer.status_code == 200, answer.text


PATHS: list[tuple[str, str, int, str, str]] = [
    ("GET", "/chat/completions", 405, "method_not_allowed", "POST"),
    ("DELETE", "/chat/completions", 405, "method_not_allowed", "POST"),
    ("PUT", "/completions", 405, "method_not_allowed", "POST"),
    ("POST", "/models", 405, "method_not_allowed", "GET"),
    ("GET", "/nothing", 404, "not_found", "nothing at this path"),
    ("GET", "/", 404, "not_found", "nothing at this path"),
    ("GET", "/%00", 404, "not_found", "nothing at this path"),
    ("GET", "/chat/completions/a/b", 404, "not_found", "nothing at this path"),
    ("POST", "/embeddings", 404, "not_found", "does not serve embeddings"),
    ("POST", "/images/generations", 404, "not_found", "does not serve images"),
    ("POST", "/audio/speech", 404, "not_found", "does not serve audio"),
    ("GET", "/files", 404, "not_found", "does not serve files"),
    ("GET", "/models/nobody", 404, "unknown_model", "expected one of pdq/sim"),
    ("GET", "/chat/completions/chatcmpl-nobody", 404, "not_found", "there is no answer"),
    ("GET", "/chat/completions/chatcmpl-nobody?stream=true", 404, "not_found", "there is no answer"),
    ("GET", "/chat/completions/chatcmpl-nobody?stream=maybe", 400, "invalid_value", "stream"),
    ("GET", "/chat/completions/chatcmpl-" + "x" * 500, 404, "not_found", "there is no answer"),
]


@pytest.mark.parametrize(("verb", "path", "status", "code", "told"), PATHS)
async def test_paths_and_verbs(
    http: httpx.AsyncClient, verb: str, path: str, status: int, code: str, told: str
) -> None:
    answer = await http.request(verb, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert told in error["message"]
    assert (told in answer.headers.get("allow", "")) == (status == 405)


async def test_openais_client_raises_its_own_errors(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=stack.services[2].api, api_key="none", max_retries=0) as api:
        with pytest.raises(openai.NotFoundError, match="expected one of pdq/sim"):
            await api.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError) as refused:
            await api.completions.create(model=MODEL, prompt="x" * 5000)
        with pytest.raises(openai.NotFoundError, match="does not serve embeddings"):
            await api.embeddings.create(model=MODEL, input="x")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


async def test_what_a_client_wrote_is_not_in_any_log(http: httpx.AsyncClient, stack: Stack) -> None:
    secret = "canary-of-the-prompt"
    sent = {"Authorization": f"Bearer {secret}", "Idempotency-Key": secret, "Content-Type": "application/json"}
    for fields in ({}, {"temperature": "x"}, {"max_tokens": 10**6}, {"user": secret, "n": 77}):
        await http.post("/chat/completions", content=chat(**fields | {"user": secret}), headers=sent)
    await http.get(f"/{secret}?key={secret}")
    for service in stack.services:
        assert secret not in service.log.read_text()
    assert secret not in stack.services[2].get("/metrics")[1]
    assert not any(secret in path.read_text() for path in stack.directory.glob("*.jsonl"))
