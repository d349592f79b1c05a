"""`/v1/responses` over a real broker and real services: what OpenAI's client and others get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from pdq.client import Client, idempotent_id
from pdq.engines.sim_script import instance

from tests import sse
from tests.ask import ask, read_all
from tests.integration.test_structured import PARSERS, PLAIN, REASONING, SCHEMA
from tests.stack import MODEL, MODELS, Service, Stack, completion

SLOW = "llama3-8b-h100"
"""Some 6 ms a token: time enough to do something in mid-answer."""
PROMPT = "the responses' own prompt, of some length, for KV to be worth moving. " * 4
WEATHER: Any = {"type": "function", "name": "weather", "description": "It.", "parameters": SCHEMA, "strict": False}
NEWS: Any = WEATHER | {"name": "news"}
FORMAT: Any = {"format": {"type": "json_schema", "name": "address", "schema": SCHEMA}}
LONG: Any = {"type": "object", "properties": {"text": {"type": "string", "minLength": 1500}}}
ENDLESS: Any = {"format": {"type": "json_schema", "name": "long", "schema": LONG}}
"""Nothing in a request for a response says that an answer may not end early; a schema does."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A router, workers for a model that thinks and calls and for one that does not, and two gateways; none of the
    tests may break it."""
    directory = tmp_path_factory.mktemp("stack")
    stack = Stack(directory, PDQ_ROUTER_ORDER="decode-only")
    (directory / "models.toml").write_text(f"{MODELS}{PARSERS}{PLAIN}")
    stack.models.append("plain")
    stack.add("pdq_router")
    for model in (MODEL, "plain"):
        stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE=SLOW, PDQ_WORKER_MODEL=model)
    for _ in range(2):
        stack.add("pdq_gateway")
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
    return {"model": "plain", "input": PROMPT, "max_output_tokens": 12, "text": ENDLESS} | fields


def text_of(found: list[sse.Frame]) -> str:
    return "".join(frame.json["delta"] for frame in found if frame.type == "response.output_text.delta")


async def until(client: httpx.AsyncClient, id: str, *status: str) -> dict[str, Any]:
    """Ask for a response until it has one of these states."""
    async with asyncio.timeout(20):
        while True:
            answer = await client.get(f"/responses/{id}")
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            if found["status"] in status:
                return found
            await asyncio.sleep(0.05)


# ---- OpenAI's client


def test_the_synchronous_client(gateway: Service) -> None:
    asked: Any = body(instructions="Brief.", temperature=0)
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as api:
        answer = api.responses.create(**asked, metadata={"a": "b"})
        again = api.responses.retrieve(answer.id)
        events = list(api.responses.create(**asked, stream=True))
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "pdq/plain")
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text and answer.usage is not None and answer.usage.output_tokens == 12
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Brief.", {"a": "b"}, 0)
    assert (again.output, again.usage, again.created_at) == (answer.output, answer.usage, answer.created_at)
    assert (again.instructions, again.metadata, again.temperature) == (None, None, None), "the log does not have them"
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_an_answer_is_the_one_in_the_log(api: openai.AsyncOpenAI, client: Client) -> None:
    answer = await api.responses.create(**body(max_output_tokens=30, text={"format": {"type": "text"}}))
    stored = await read_all(client, answer.id.removeprefix("resp_"))
    assert stored.transcript.text == answer.output_text and answer.created_at == int(stored.state.submitted)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        stored.state.usage.prompt_tokens,
        stored.state.usage.completion_tokens,
    )
    kv = stored.state.kv
    assert answer.usage.input_tokens_details.cached_tokens == kv.loaded_tokens + kv.local_tokens


class Address(pydantic.BaseModel):
    name: str
    city: str


async def test_a_structured_answer(api: openai.AsyncOpenAI) -> None:
    answer = await api.responses.parse(model="plain", input="hello", text_format=Address, max_output_tokens=400)
    assert answer.status == "completed" and answer.completed_at is not None
    assert isinstance(answer.output_parsed, Address) and answer.output_parsed.city
    turns: Any = [{"role": "user", "content": "hello"}, *answer.output, {"role": "user", "content": "and now?"}]
    assert (await api.responses.parse(model="plain", input=turns, text_format=Address)).output_parsed
    async with api.responses.stream(model="plain", input="hello", text_format=Address) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert final.output_parsed == answer.output_parsed and "".join(deltas) == answer.output_text == final.output_text
    free = await api.responses.create(model="plain", input="hello", text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(free.output_text), dict)


async def test_a_model_that_thinks_and_calls(api: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 900, "tools": [WEATHER, NEWS]}
    turns: list[Any] = [{"role": "user", "content": "@news and @weather"}]
    answer = await api.responses.create(**asked, input=turns)
    assert answer.status == "completed" and answer.tools[0].type == "function" and answer.tools[0].name == "weather"
    thought, *calls = answer.output
    assert thought.type == "reasoning" and thought.content is not None
    assert [part.text for part in thought.content] == [REASONING]
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens >= len(REASONING)
    assert [call.type for call in calls] == ["function_call"] * 2
    made = [call for call in calls if call.type == "function_call"]
    assert [call.name for call in made] == ["weather", "news"] and len({call.call_id for call in made}) == 2
    assert all(json.loads(call.arguments) == instance(SCHEMA) for call in made)
    # The whole answer goes back as it came, with what the calls gave.
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "none"} for call in made]
    all_turns: Any = [*turns, *answer.output, *results]
    further = await api.responses.create(**asked | {"input": all_turns, "max_output_tokens": 60})
    assert further.usage is not None and further.usage.input_tokens > answer.usage.input_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "news"}])
async def test_a_call_that_must_be_made_as_a_stream(api: openai.AsyncOpenAI, choice: Any) -> None:
    asked: Any = {"model": MODEL, "input": "hello", "tools": [NEWS, WEATHER], "tool_choice": choice}
    arguments = ""
    async with api.responses.stream(**asked, max_output_tokens=900) as stream:
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
                assert event.snapshot == arguments
        final = await stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert call.name == "news" and call.status == "completed"
    assert json.loads(call.arguments) == json.loads(arguments) == instance(SCHEMA)


async def test_log_probabilities(api: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "plain", "input": "hello", "max_output_tokens": 20, "temperature": 0, "top_logprobs": 2}
    asked["text"] = ENDLESS
    answer = await api.responses.create(**asked, include=["message.output_text.logprobs"])
    stream = await api.responses.create(**asked, include=["message.output_text.logprobs"], stream=True)
    streamed = [
        entry async for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs
    ]
    (message,) = answer.output
    assert message.type == "message" and message.content[0].type == "output_text"
    found = message.content[0].logprobs
    assert found is not None and len(found) == 20 and [entry.token for entry in found] == [e.token for e in streamed]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in found)


# ---- background


async def test_background_is_answered_at_once_and_goes_on(
    api: openai.AsyncOpenAI, elsewhere: httpx.AsyncClient
) -> None:
    asked: Any = body(max_output_tokens=200)
    answer = await api.responses.create(**asked, background=True, metadata={"a": "b"})
    assert (answer.status, answer.background, answer.metadata, answer.output) == ("queued", True, {"a": "b"}, [])
    running = await until(elsewhere, answer.id, "in_progress")
    ended = await until(elsewhere, answer.id, "incomplete")
    whole = await api.responses.create(**asked)
    assert ended["output"][0]["content"][0]["text"] == whole.output_text
    assert [item["status"] for item in running["output"]] in ([], ["in_progress"])
    assert (ended["usage"]["output_tokens"], ended["output"][0]["status"]) == (200, "incomplete")


async def test_a_response_is_cancelled_once(api: openai.AsyncOpenAI, elsewhere: httpx.AsyncClient) -> None:
    answer = await api.responses.create(**body(max_output_tokens=1000, background=True))
    await until(elsewhere, answer.id, "in_progress")
    cancelled = await api.responses.cancel(answer.id)
    assert (cancelled.id, cancelled.status) == (answer.id, "cancelled")
    again = (await elsewhere.post(f"/responses/{answer.id}/cancel")).json()
    assert again == (await elsewhere.get(f"/responses/{answer.id}")).json()
    assert (again["status"], again["error"]["type"]) == ("cancelled", "cancelled")
    ended = await api.responses.create(**body(max_output_tokens=2))
    assert (await api.responses.cancel(ended.id)).status == "incomplete", "what has ended stays as it is"


async def test_a_response_is_deleted(api: openai.AsyncOpenAI, http: httpx.AsyncClient, client: Client) -> None:
    answer = await api.responses.create(**body(max_output_tokens=2))
    running = await api.responses.create(**body(max_output_tokens=1000, background=True))
    await api.responses.delete(answer.id)
    deleted = await http.delete(f"/responses/{running.id}")
    assert deleted.json() == {"id": running.id, "object": "response.deleted", "deleted": True}
    for id in (answer.id, running.id):
        for asking in (
            http.get(f"/responses/{id}"),
            http.get(f"/responses/{id}?stream=true"),
            http.post(f"/responses/{id}/cancel"),
            http.delete(f"/responses/{id}"),
        ):
            refused = await asking
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert not (await read_all(client, id.removeprefix("resp_"))).events


async def test_answers_of_the_other_shapes_are_deleted_too(api: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = await api.chat.completions.create(model="plain", messages=messages, max_tokens=2, n=2)
    plain = await api.completions.create(model="plain", prompt="hello", max_tokens=2)
    refused = await http.delete(f"/chat/completions/{chat.id}?purge=false")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "purge")
    assert (await http.get(f"/chat/completions/{chat.id}")).status_code == 200
    deleted = await api.chat.completions.delete(chat.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (chat.id, True, "chat.completion.deleted")
    assert (await http.delete(f"/completions/{plain.id}?purge=true")).json()["deleted"] is True
    for path in (f"/chat/completions/{chat.id}", f"/completions/{plain.id}"):
        assert (await http.get(path)).status_code == (await http.delete(path)).status_code == 404


# ---- streams that are resumed

STREAMS: dict[str, dict[str, Any]] = {
    "text": body(max_output_tokens=60, text={"format": {"type": "text"}}, temperature=0),
    "log probabilities": body(max_output_tokens=30, include=["message.output_text.logprobs"], top_logprobs=1),
    "thoughts and calls": body(
        model=MODEL, input="@news and @weather", tools=[WEATHER, NEWS], text={}, max_output_tokens=900
    ),
    "thoughts and a text": body(model=MODEL, text=FORMAT, max_output_tokens=900),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_is_resumed_after_each_event_at_another_gateway(
    http: httpx.AsyncClient, elsewhere: httpx.AsyncClient, name: str
) -> None:
    headers, asked = {"Idempotency-Key": f"resumed: {name}"}, STREAMS[name] | {"stream": True}
    whole = sse.frames((await http.post("/responses", json=asked, headers=headers)).content)
    assert len(whole) > 8
    for number, frame in enumerate(whole):
        assert frame.id == str(number) and frame.json["sequence_number"] == number
        assert frame.type == frame.json["type"]
    id = whole[0].json["response"]["id"]
    assert (await elsewhere.get(f"/responses/{id}?stream=true")).content == b"".join(f.raw + b"\n\n" for f in whole)
    for place in range(len(whole)):
        rest = b"".join(later.raw + b"\n\n" for later in whole[place + 1 :])
        after = {"Last-Event-ID": str(place)}
        for asking in (
            elsewhere.get(f"/responses/{id}?stream=true&starting_after={place}"),
            elsewhere.get(f"/responses/{id}?stream=true&starting_after=0", headers=after),
            elsewhere.post("/responses", json=asked, headers=headers | after),
        ):
            assert (await asking).content == rest, place


async def test_a_cut_stream_goes_on_elsewhere(
    api: openai.AsyncOpenAI, http: httpx.AsyncClient, elsewhere: httpx.AsyncClient, other: Service
) -> None:
    """While it runs: what came live at one gateway and what comes live at another are one stream."""
    seen: list[sse.Frame] = []
    asked = body(max_output_tokens=200, stream=True, background=True)
    async with http.stream("POST", "/responses", json=asked) as answer:
        async for frame in sse.read(answer):
            seen.append(frame)
            if len(seen) == 6:
                break
    id = seen[0].json["response"]["id"]
    async with openai.AsyncOpenAI(base_url=other.api, api_key="none", max_retries=0) as second:
        rest = [event async for event in await second.responses.retrieve(id, stream=True, starting_after=5)]
    assert [event.sequence_number for event in rest] == list(range(6, 6 + len(rest)))
    whole = sse.frames((await elsewhere.get(f"/responses/{id}?stream=true")).content)
    assert [frame.raw for frame in seen] == [frame.raw for frame in whole[:6]]
    assert [event.to_dict() for event in rest] == [frame.json for frame in whole[6:]]
    read = await api.responses.retrieve(id)
    assert text_of(whole) == read.output_text and read.to_dict() == whole[-1].json["response"]


async def test_two_streams_of_one_response_are_the_same_bytes(
    http: httpx.AsyncClient, elsewhere: httpx.AsyncClient
) -> None:
    """One is live from the submit on, one is read from the log and then live, one is read afterwards."""
    headers, asked = {"Idempotency-Key": "twins"}, body(max_output_tokens=150, stream=True)
    async with http.stream("POST", "/responses", json=asked, headers=headers) as answer:
        frames = sse.read(answer)
        first = [await anext(frames) for _ in range(4)]
        joining = asyncio.create_task(elsewhere.get(f"/responses/{first[0].json['response']['id']}?stream=true"))
        first += [frame async for frame in frames]
    later = await elsewhere.post("/responses", json=asked, headers=headers)
    assert b"".join(frame.raw + b"\n\n" for frame in first) == (await joining).content == later.content


async def test_a_key_is_one_response(http: httpx.AsyncClient, elsewhere: httpx.AsyncClient, client: Client) -> None:
    headers, asked = {"Idempotency-Key": "one response"}, body(background=True)
    first = (await http.post("/responses", json=asked, headers=headers)).json()
    ended = await until(elsewhere, first["id"], "incomplete")
    again = (await elsewhere.post("/responses", json=asked, headers=headers)).json()
    assert first["id"] == again["id"] == f"resp_{idempotent_id('one response')}"
    assert first["status"] in ("queued", "in_progress")
    assert (again["status"], again["output"]) == ("incomplete", ended["output"])
    refused = await elsewhere.post("/responses", json=body(max_output_tokens=13), headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "duplicate_id")
    assert (await read_all(client, first["id"].removeprefix("resp_"))).state.decode.attempt == 1


# ---- ends


async def ended(client: Client, request: str) -> str:
    async with asyncio.timeout(10):
        while (state := await client.state(request)) is None or not state.ended:
            await asyncio.sleep(0.05)
    return state.event


@pytest.mark.parametrize(("background", "end"), [(False, "cancelled"), (True, "finished")])
async def test_a_client_that_leaves(http: httpx.AsyncClient, client: Client, background: bool, end: str) -> None:
    asked = body(max_output_tokens=300, stream=True, background=background)
    async with http.stream("POST", "/responses", json=asked) as answer:
        async for frame in sse.read(answer):
            if frame.type == "response.output_text.delta":
                break
    assert await ended(client, answer.headers["x-pdq-request"]) == end


async def test_a_client_that_waits_for_the_whole_and_leaves(http: httpx.AsyncClient, client: Client) -> None:
    headers, name = {"Idempotency-Key": "leaves"}, idempotent_id("leaves")
    asking = asyncio.create_task(http.post("/responses", json=body(max_output_tokens=300), headers=headers))
    async with asyncio.timeout(10):
        while (state := await client.state(name)) is None or not state.decode.attempt:
            await asyncio.sleep(0.02)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await ended(client, name) == "cancelled"


async def test_a_cancel_is_told_of_in_the_stream(http: httpx.AsyncClient, elsewhere: httpx.AsyncClient) -> None:
    async with http.stream("POST", "/responses", json=body(max_output_tokens=1000, stream=True)) as answer:
        frames = sse.read(answer)
        seen = [await anext(frames) for _ in range(5)]
        id = seen[0].json["response"]["id"]
        cancelled = (await elsewhere.post(f"/responses/{id}/cancel")).json()
        seen += [frame async for frame in frames]
    assert seen[-1].type == "response.failed" and seen[-1].json["response"] == cancelled
    assert cancelled["status"] == "cancelled" and cancelled["output"][0]["status"] == "incomplete"
    assert text_of(seen) == cancelled["output"][0]["content"][0]["text"]
    again = await elsewhere.get(f"/responses/{id}?stream=true")
    assert again.content == b"".join(frame.raw + b"\n\n" for frame in seen)


async def test_a_deadline(http: httpx.AsyncClient, api: openai.AsyncOpenAI) -> None:
    headers = {"Pdq-Deadline": "0.5"}
    whole = await http.post("/responses", json=body(max_output_tokens=1000), headers=headers)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    asked: Any = body(max_output_tokens=1000, extra_headers=headers)
    events = [event async for event in await api.responses.create(**asked, stream=True)]
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    error = events[-1].response.error
    assert error is not None and (error.code, error.type) == ("server_error", "deadline_exceeded")
    read = await api.responses.retrieve(events[-1].response.id)
    assert read == events[-1].response


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_to_be_stored_is_removed(http: httpx.AsyncClient, client: Client, stream: bool) -> None:
    answer = await http.post("/responses", json=body(store=False, stream=stream))
    assert answer.status_code == 200
    assert stream or answer.json()["store"] is False
    await removed(client, answer.headers["x-pdq-request"])


async def test_what_is_not_to_be_stored_is_removed_when_its_client_leaves(
    http: httpx.AsyncClient, client: Client
) -> None:
    asked = body(store=False, stream=True, max_output_tokens=1000)
    async with http.stream("POST", "/responses", json=asked) as answer:
        await anext(sse.read(answer))
    await removed(client, answer.headers["x-pdq-request"])


async def removed(client: Client, request: str) -> None:
    async with asyncio.timeout(10):
        while (await client.read(request, limit=1)).events:
            await asyncio.sleep(0.05)


async def test_another_tenant_s_response_is_not_there(http: httpx.AsyncClient, stack: Stack, client: Client) -> None:
    bus = await stack.connect()
    theirs = Client(bus, "somebody")
    answer = await ask(theirs, completion("hello", max_tokens=3), model="plain")
    ours = await ask(client, completion("hello", max_tokens=3), model="plain")
    for name, status in ((answer.request, 404), (ours.request, 200)):
        for asking in (
            http.get(f"/responses/resp_{name}"),
            http.get(f"/responses/resp_{name}?stream=true"),
            http.post(f"/responses/resp_{name}/cancel"),
            http.delete(f"/responses/resp_{name}"),
        ):
            assert (await asking).status_code == status
    assert (await read_all(theirs, answer.request)).terminal == ["finished"]
    assert not (await read_all(client, ours.request)).events
    await bus.close()
