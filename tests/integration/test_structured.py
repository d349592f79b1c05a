"""Answers that are held to a form, call tools or think: from the body to the log, whatever dies on the way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq.client import Client
from pdq.engines.sim_script import THOUGHT, instance
from pdq.log.parsed import Parsed
from pdq.settings import LimitSettings

from tests.ask import Answer, ask, read_all, refused
from tests.integration.test_faults import SLOW, ask_while, continued_from
from tests.stack import MODEL, MODELS, Stack, chat, completion

PARSERS = 'tool_parser = "sim"\nreasoning_parser = "sim"\n'
PLAIN = '[models.plain]\nid = "pdq/plain"\ntokenizer = "bytes"\nmax_model_len = 4096\nvocab_size = 2048\n'
LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)

SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "minLength": 12} for name in ("name", "city", "street")},
    "required": ["name", "city", "street"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": SCHEMA}}
NEWS = {"type": "function", "function": {"name": "news", "parameters": SCHEMA}}
TOOLS = [WEATHER, NEWS]
FORMAT = {"type": "json_schema", "json_schema": {"name": "address", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "news"}}
REASONING = THOUGHT.removeprefix("<think>").removesuffix("</think>")


def made(directory: Path) -> Stack:
    stack = Stack(directory, limits=LIMITS, PDQ_WORKER_MODEL=MODEL)
    (directory / "models.toml").write_text(f"{MODELS}{PARSERS}{PLAIN}")
    stack.models.append("plain")
    return stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = made(tmp_path_factory.mktemp("stack"))
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module)
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    bus = await stack.connect()
    yield Client(bus, "local")
    await bus.close()


def parsed_of(answer: Answer) -> Parsed:
    """Joined by hand from the records; readers' own joining gives the same."""
    records = [event.out for event in answer.events if event.out is not None]
    assert records and all(record.delta is not None for record in records)
    seen = answer.transcript.parsed
    joined = Parsed()
    for record in records:
        assert record.delta is not None
        joined.add(record.delta)
    assert seen is not None and shown(seen) == shown(joined)
    return joined


def shown(parsed: Parsed) -> tuple[Any, ...]:
    return parsed.content, parsed.reasoning, [(call.id, call.name, call.arguments) for call in parsed.calls]


async def test_an_answer_is_held_to_its_schema(client: Client) -> None:
    answer = await ask(client, completion("hello", response_format=FORMAT, max_tokens=500))
    assert json.loads(answer.transcript.text) == instance(SCHEMA)
    assert answer.state.finish_reason == "stop"
    assert answer.transcript.parsed is None, "a plain completion is its text"


async def test_a_chat_held_to_a_schema_thinks_first(client: Client) -> None:
    answer = await ask(client, chat("hello", response_format=FORMAT, max_tokens=500))
    parsed = parsed_of(answer)
    assert (json.loads(parsed.content), parsed.reasoning) == (instance(SCHEMA), REASONING)
    assert answer.transcript.text == THOUGHT + parsed.content


async def test_calls_that_an_answer_makes(client: Client) -> None:
    answer = await ask(client, chat("@news and @weather", tools=TOOLS, max_tokens=900), request="calls")
    parsed = parsed_of(answer)
    assert answer.state.finish_reason == "tool_calls"
    assert [call.name for call in parsed.calls] == ["weather", "news"]
    assert all(json.loads(call.arguments) == instance(SCHEMA) for call in parsed.calls)
    assert len({call.id for call in parsed.calls}) == 2 and parsed.content == "\n"
    again = await read_all(client, "calls")
    assert again.transcript.parsed is not None and shown(again.transcript.parsed) == shown(parsed)


async def test_a_call_that_must_be_made_and_one_that_is_cut(client: Client) -> None:
    """However many tokens there are: a call that is cut is not one that was made."""
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED}
    whole = await ask(client, chat("hello", **body, max_tokens=500))
    assert whole.state.finish_reason == "tool_calls"
    (call,) = parsed_of(whole).calls
    assert (call.name, json.loads(call.arguments)) == ("news", instance(SCHEMA))
    for tokens in (1, 30, 60, 90, 120, len(whole.transcript.ids) - 1):
        cut = await ask(client, chat("hello", **body, max_tokens=tokens))
        assert cut.state.finish_reason == "length"
        for each in parsed_of(cut).calls:
            assert call.arguments.startswith(each.arguments)


async def test_a_next_turn_has_calls_and_their_results(client: Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "news", "arguments": '{"city": "Rome"}'}}
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "none"},
    ]
    answer = await ask(client, json.dumps({"messages": turns, "tools": TOOLS, "max_tokens": 40}).encode())
    prompt = answer.state.usage.prompt_tokens
    bare = json.dumps({"messages": turns, "tools": TOOLS, "tool_choice": "none", "max_tokens": 40}).encode()
    assert prompt > (await ask(client, bare)).state.usage.prompt_tokens, "tools are part of the prompt"
    assert parsed_of(answer).reasoning


async def test_tools_of_a_model_without_a_parser_are_refused_by_the_setting_s_name(client: Client) -> None:
    for choice in ("auto", "required", NAMED):
        answer = await refused(client, chat("hello", tools=TOOLS, tool_choice=choice), model="plain")
        error = answer.state.error
        assert (error.code, error.param) == ("unsupported", "tools") and "tool_parser" in error.message


async def test_an_odd_schema_is_refused_before_any_worker(client: Client) -> None:
    odd = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"a": {"type": "date"}}}}}
    answer = await refused(client, chat("hello", response_format=odd))
    assert answer.state.error.param == "response_format.json_schema.schema.properties.a.type"
    assert "claim" not in answer.story


@pytest.mark.parametrize(
    ("fields", "goes_on"),
    [
        ({"response_format": FORMAT}, False),
        ({"tools": TOOLS, "tool_choice": NAMED}, False),
        ({"tools": TOOLS}, True),
        ({}, True),
    ],
    ids=["a schema", "a forced call", "free calls", "thoughts"],
)
async def test_a_killed_decode_worker_is_replaced_in_mid_answer(
    tmp_path: Path, fields: dict[str, Any], goes_on: bool
) -> None:
    """Guided answers are replayed, others gone on with; readers see one answer, without a gap or a repeat."""
    stack = made(tmp_path)
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    first = stack.add("pdq_decode", **SLOW)
    try:
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        body = chat("@news and @weather", temperature=0, max_tokens=150, **fields)
        second = stack.add("pdq_decode")

        async def kill(answer: Answer) -> None:
            while len(answer.transcript.ids) < 70:
                await asyncio.sleep(0.01)
            first.kill()
            second.start()
            second.wait_ready()

        answer = await ask_while(client, body, kill)
        reference = await ask(client, body, order="decode-only")
        await bus.close()
        assert answer.terminal == ["finished"] and answer.state.decode.attempt == 2
        assert (answer.transcript.ids, answer.transcript.text) == (reference.transcript.ids, reference.transcript.text)
        seen, expected = shown(parsed_of(answer)), shown(parsed_of(reference))
        # Calls are named after their request.
        assert [*seen[:2], [call[1:] for call in seen[2]]] == [*expected[:2], [call[1:] for call in expected[2]]]
        assert answer.state.finish_reason == reference.state.finish_reason
        assert (await continued_from(stack) > 0) == goes_on
    finally:
        stack.stop()
