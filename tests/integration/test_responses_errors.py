"""What is wrong with a request for a response, by status, code and field: a table."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.integration.test_responses import WEATHER
from tests.integration.test_structured import PARSERS, PLAIN
from tests.stack import MODEL, MODELS, Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The model `plain` has no parsers, and no worker: what is refused needs none."""
    directory = tmp_path_factory.mktemp("stack")
    stack = Stack(directory)
    (directory / "models.toml").write_text(f"{MODELS}{PARSERS}{PLAIN}")
    stack.models.append("plain")
    for module in ("pdq_router", "pdq_gateway"):
        stack.add(module)
    stack.add("pdq_decode", PDQ_WORKER_MODEL=MODEL)
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.services[1].api, timeout=30) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "plain", "input": "hello", "max_output_tokens": 2} | fields


ERRORS: list[tuple[Any, int, str, str | None]] = [
    (b"", 400, "invalid_json", None),
    (b'{"input": "a", "input": "b"}', 400, "invalid_json", "input"),
    ({"input": "absent"}, 400, "missing_field", "input"),
    ({"input": None}, 400, "missing_field", "input"),
    ({"input": 7}, 400, "invalid_type", "input"),
    ({"input": ""}, 400, "empty_prompt", "input"),
    ({"input": []}, 400, "empty_prompt", "input"),
    ({"input": ["x"]}, 400, "invalid_type", "input[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, 400, "unknown_role", "input[0].role"),
    ({"input": [{"role": "user"}]}, 400, "missing_field", "input[0].content"),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, 400, "unknown_field", "input[0].name"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        400,
        "unsupported",
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "unsupported", "input[0].type"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "missing_field", "input[0].call_id"),
    ({"input": "x" * 5000}, 400, "context_length_exceeded", "input"),
    ({"input": "x" * 5000, "stream": True}, 400, "context_length_exceeded", "input"),
    ({"input": "x" * 5000, "background": True}, 400, "context_length_exceeded", "input"),
    ({"input": "x" * (1 << 20)}, 413, "payload_too_large", None),
    ({"model": "absent"}, 400, "missing_field", "model"),
    ({"model": "nobody"}, 404, "unknown_model", "model"),
    ({"max_output_tokens": 0}, 400, "invalid_value", "max_output_tokens"),
    ({"max_output_tokens": 10**6}, 400, "context_length_exceeded", "max_output_tokens"),
    ({"temperature": 3}, 400, "invalid_value", "temperature"),
    ({"top_p": 0}, 400, "invalid_value", "top_p"),
    ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    ({"include": ["reasoning.encrypted_content"]}, 400, "unsupported", "include[0]"),
    ({"truncation": "auto"}, 400, "unsupported", "truncation"),
    ({"previous_response_id": "resp_1"}, 400, "unsupported", "previous_response_id"),
    ({"conversation": "conv_1"}, 400, "unsupported", "conversation"),
    ({"reasoning": {"effort": "high"}}, 400, "unsupported", "reasoning.effort"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, 400, "unsupported", "stream_options"),
    ({"text": {"verbosity": "low"}}, 400, "unsupported", "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, 400, "unsupported", "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "missing_field", "text.format.schema"),
    ({"text": {"format": {"type": "json_object", "name": "a"}}}, 400, "invalid_value", "text.format.name"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "date"}}}},
        400,
        "invalid_value",
        "text.format.schema.type",
    ),
    ({"tools": [{"type": "web_search"}]}, 400, "unsupported", "tools[0].type"),
    ({"tools": [WEATHER, WEATHER], "model": MODEL}, 400, "invalid_value", "tools[1].name"),
    ({"tools": [WEATHER]}, 400, "unsupported", "tools"),
    ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, 400, "invalid_value", "tool_choice.name"),
    ({"metadata": {"a": 1}}, 400, "invalid_type", "metadata"),
    ({"store": False, "background": True}, 400, "invalid_value", "store"),
    ({"messages": []}, 400, "unknown_field", "messages"),
    ({"max_tokens": 5}, 400, "unknown_field", "max_tokens"),
]


@pytest.mark.parametrize(("fields", "status", "code", "param"), ERRORS)
async def test_bad_bodies(http: httpx.AsyncClient, fields: Any, status: int, code: str, param: str | None) -> None:
    if isinstance(fields, dict):
        asked = {name: value for name, value in (body() | fields).items() if value != "absent"}
        fields = json.dumps(asked).encode()
    answer = await http.post("/responses", content=fields, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert error["param"] == param or (param == "stream_options" and error["param"].startswith(param)), error
    assert not re.search(r"\bmessages\b(?!' is not)|max_completion_tokens|response_format", error["message"])


PATHS: list[tuple[str, str, int, str]] = [
    ("GET", "/responses", 405, "method_not_allowed"),
    ("PUT", "/responses/resp_r-1", 405, "method_not_allowed"),
    ("GET", "/responses/resp_r-1/cancel", 405, "method_not_allowed"),
    ("GET", "/responses/resp_r-1/input_items", 404, "not_found"),
    ("GET", "/responses/resp_r-1", 404, "not_found"),
    ("GET", "/responses/r-1", 404, "not_found"),
    ("GET", "/responses/resp_*", 404, "not_found"),
    ("GET", "/responses/resp_" + "x" * 65, 404, "not_found"),
    ("GET", "/responses/resp_r-1?stream=true", 404, "not_found"),
    ("GET", "/responses/resp_r-1?stream=true&starting_after=-1", 400, "invalid_value"),
    ("GET", "/responses/resp_r-1?stream=true&starting_after=x", 400, "invalid_value"),
    ("GET", "/responses/resp_r-1?starting_after=1", 400, "invalid_value"),
    ("GET", "/responses/resp_r-1?stream=true&include_obfuscation=true", 400, "unsupported"),
    ("POST", "/responses/resp_r-1/cancel", 404, "not_found"),
    ("DELETE", "/responses/resp_r-1", 404, "not_found"),
]


@pytest.mark.parametrize(("verb", "path", "status", "code"), PATHS)
async def test_paths_and_verbs(http: httpx.AsyncClient, verb: str, path: str, status: int, code: str) -> None:
    answer = await http.request(verb, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text


HEADERS: list[tuple[dict[str, str], dict[str, Any], int, str]] = [
    ({"Last-Event-ID": "5"}, {"stream": True}, 400, "Last-Event-ID"),
    ({"Last-Event-ID": "5", "Idempotency-Key": "k"}, {}, 400, "Last-Event-ID"),
    ({"Last-Event-ID": "5.6", "Idempotency-Key": "k"}, {"stream": True}, 400, "Last-Event-ID"),
    ({"Last-Event-ID": "5", "Idempotency-Key": "never asked"}, {"stream": True}, 404, "id"),
    ({"Idempotency-Key": "k"}, {"store": False}, 400, "store"),
    ({"Pdq-Background": "yes"}, {}, 400, "Pdq-Background"),
    ({"Pdq-Priority": "urgent"}, {}, 400, "Pdq-Priority"),
]


@pytest.mark.parametrize(("headers", "fields", "status", "param"), HEADERS)
async def test_bad_headers(
    http: httpx.AsyncClient, headers: dict[str, str], fields: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post("/responses", json=body(**fields), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_what_a_client_wrote_is_not_in_any_log(http: httpx.AsyncClient, stack: Stack) -> None:
    secret = "canary-of-the-input"
    for fields in ({}, {"temperature": "x"}, {"text": {"format": secret}}, {"input": [{"role": secret}]}):
        await http.post("/responses", json=body(model=MODEL, input=secret, instructions=secret, user=secret) | fields)
    await http.get(f"/responses/{secret}?stream=true")
    for service in stack.services:
        assert secret not in service.log.read_text()
    assert not any(secret in path.read_text() for path in stack.directory.glob("*.jsonl"))


async def test_labels_are_few_whatever_clients_send(http: httpx.AsyncClient, stack: Stack) -> None:
    for number in range(5):
        await http.get(f"/responses/resp_{number}")
        await http.post(f"/responses/resp_{number}/cancel")
        await http.get(f"/responses/resp_{number}/input_items")
    text = stack.services[1].get("/metrics")[1]
    found = {
        line.split('route="')[1].split('"')[0]
        for line in text.splitlines()
        if line.startswith("pdq_gateway_requests_total")
    }
    assert {name for name in found if "responses" in name} == {
        "/v1/responses",
        "/v1/responses/{id}",
        "/v1/responses/{id}/cancel",
    }
