"""OpenAI's client beyond `create`: helpers for streams, schemas and tools, timeouts, and many streams at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.stack import MODEL, MODELS, Service, Stack

SLOW = "llama3-8b-h100"
PROMPT = "a question for the official client, number 5"
"""Its likeliest answer ends by itself, after 34 tokens."""
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


class Place(pydantic.BaseModel):
    city: str
    country: str


class Journey(pydantic.BaseModel):
    """What a schema has: a list, another model, a choice, a default."""

    stops: list[Place]
    days: int
    by: str | None
    alone: bool


class Weather(pydantic.BaseModel):
    """The weather somewhere."""

    city: str
    days: int


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    (stack.directory / "models.toml").write_text(f'{MODELS}tool_parser = "sim"\n')
    stack.add("pdq_router")
    stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE=SLOW)
    gateway = stack.add("pdq_gateway")
    try:
        asyncio.run(stack.start())
        yield gateway
    finally:
        stack.stop()


@pytest.fixture
def api(gateway: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as api:
        yield api


def test_a_stream_within_a_timeout_and_one_beyond_it(api: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "stream": True, "temperature": 0}
    chunks = list(api.with_options(timeout=30).chat.completions.create(**ask, max_tokens=20))
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.APITimeoutError):
        # The headers come once a router has it, and no sooner.
        api.with_options(timeout=0.0001).chat.completions.create(**ask, max_tokens=20)


def test_the_stream_helper_tells_what_a_whole_answer_does(api: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 60, "logprobs": True}
    with api.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    whole = api.chat.completions.create(**ask)
    deltas = [event for event in events if event.type == "content.delta"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == whole.choices[0].message.content
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.content == whole.choices[0].message.content
    assert sum(event.type == "logprobs.content.done" for event in events) == 1
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert (final.usage, final.choices[0].finish_reason) == (whole.usage, whole.choices[0].finish_reason)


def test_an_answer_is_parsed_as_a_model_of_pydantic(api: openai.OpenAI) -> None:
    ask: Any = {"model": MODEL, "messages": MESSAGES, "response_format": Journey, "max_tokens": 500}
    parsed = api.chat.completions.parse(**ask).choices[0].message.parsed
    assert isinstance(parsed, Journey) and parsed.stops and parsed.stops[0].city
    with api.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed


def test_an_answer_that_is_cut_is_not_taken_for_a_parsed_one(api: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        api.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Journey, max_tokens=10)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_loop_of_tools(api: openai.OpenAI, streamed: bool) -> None:
    """A call, its result, and the answer: with the client's own messages sent back as they came."""
    tools = [openai.pydantic_function_tool(Weather)]
    messages: list[Any] = list(MESSAGES)
    asked = said(api, streamed, messages=messages, tools=tools, tool_choice="required", max_tokens=500)
    (call,) = asked.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert json.loads(call.function.arguments) == call.function.parsed_arguments.model_dump()
    messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"celsius": 20})}]
    answer = said(api, streamed, messages=messages, tools=tools, max_tokens=30)
    assert answer.content and not answer.tool_calls


def said(api: openai.OpenAI, streamed: bool, **ask: Any) -> Any:
    """The answer's message, by either of the client's helpers."""
    if not streamed:
        return api.chat.completions.parse(model=MODEL, temperature=0, **ask).choices[0].message
    with api.chat.completions.stream(model=MODEL, temperature=0, **ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == len(final.choices[0].message.tool_calls or ())
    return final.choices[0].message


async def test_fifty_streams_at_once(gateway: Service) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.api, api_key="none", max_retries=0) as api:

        async def streamed(number: int) -> str:
            stream = await api.chat.completions.create(**_question(number), stream=True)
            chunks = [chunk async for chunk in stream]
            assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
            assert len({chunk.id for chunk in chunks}) == 1
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        texts = await asyncio.gather(*map(streamed, range(50)))
        whole = [await api.chat.completions.create(**_question(number)) for number in range(0, 50, 10)]
    assert len(set(texts)) == 50, "each has its own answer"
    assert [answer.choices[0].message.content for answer in whole] == list(texts[::10])


def _question(number: int) -> Any:
    content = f"Question {number}"
    ask = {"messages": [{"role": "user", "content": content}], "extra_body": {"ignore_eos": True}}
    return {"model": MODEL, "max_tokens": 30, "temperature": 0, **ask}
