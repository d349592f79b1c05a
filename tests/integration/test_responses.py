"""`/v1/responses` over a real broker and real services: what OpenAI's client and others get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from pdq.client import Client

from tests.ask import read_all
from tests.integration.test_structured import PARSERS, PLAIN, SCHEMA
from tests.stack import MODEL, MODELS, Service, Stack

SLOW = "llama3-8b-h100"
"""Some 6 ms a token: time enough to do something in mid-answer."""
PROMPT = "the responses' own prompt, of some length, for KV to be worth moving. " * 4
TOOL: Any = {"type": "function", "name": "weather", "description": "It.", "parameters": SCHEMA, "strict": None}
NEWS: Any = TOOL | {"name": "news"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Router, two models' decode and two gateways; none of the tests may break it."""
    directory = tmp_path_factory.mktemp("stack")
    stack = Stack(directory, PDQ_ROUTER_ORDER="decode-only")
    (directory / "models.toml").write_text(f"{MODELS}{PARSERS}{PLAIN}")
    stack.models.append("plain")
    stack.add("pdq_router")
    for model in (MODEL, "plain"):
        stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE=SLOW, PDQ_WORKER_MODEL=model)
    for _ in range(2):
        stack.add("pdq_gateway", PDQ_GATEWAY_KEEP_ALIVE_S="1")
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def gateway(stack: Stack) -> Service:
    return stack.services[3]


@pytest.fixture
def other(stack: Stack) -> Service:
    return stack.services[4]


@pytest.fixture
async def http(gateway: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.api, timeout=30) as client:
        yield client


@pytest.fixture
async def elsewhere(other: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=other.api, timeout=30) as client:
        yield client


@pytest.fixture
async def api(gateway: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "plain", "input": PROMPT, "max_output_tokens": 12, "temperature": 0} | fields


# ---- OpenAI's client


def test_the_synchronous_client(gateway: Service) -> None:
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as api:
        answer = api.responses.create(
            model="plain",
            input=PROMPT,
            max_output_tokens=12,
            temperature=0,
            instructions="Be brief.",
            metadata={"a": "b"},
        )
        again = api.responses.retrieve(answer.id)
        stream = api.responses.create(
            model="plain", input=PROMPT, max_output_tokens=12, temperature=0, instructions="Be brief.", stream=True
        )
        events = list(stream)
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "pdq/plain")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text and answer.usage is not None and answer.usage.output_tokens == 12
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0)
    assert (again.output, again.usage, again.created_at) == (answer.output, answer.usage, answer.created_at)
    assert (again.instructions, again.metadata, again.temperature) == (None, None, None), "the log does not have them"
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_an_answer_is_the_one_in_the_log(api: openai.AsyncOpenAI, client: Client) -> None:
    answer = await api.responses.create(model="plain", input=PROMPT, max_output_tokens=30)
    stored = await read_all(client, answer.id.removeprefix("resp_"))
    assert stored.transcript.text == answer.output_text
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        stored.state.usage.prompt_tokens,
        stored.state.usage.completion_tokens,
    )
    kv = stored.state.kv
    assert answer.usage.input_tokens_details.cached_tokens == kv.loaded_tokens + kv.local_tokens
