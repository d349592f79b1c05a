"""The gateway over a real broker and real services: what OpenAI's client and others get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from pdq.client import Client, idempotent_id

from tests import sse
from tests.ask import read_all
from tests.stack import MODEL, Service, Stack

SLOW = "llama3-8b-h100"
"""Some 6 ms a token: time enough to do something in mid-answer."""
PROMPT = "the gateway's own prompt, of some length, for KV to be worth moving. " * 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Router, prefill, decode and two gateways; shared by the tests of this module, none of which may break it."""
    stack = Stack(tmp_path_factory.mktemp("stack"))
    for module in ("pdq_router", "pdq_prefill"):
        stack.add(module)
    stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE=SLOW)
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
async def api(gateway: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "ignore_eos": True}
    return asked | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True} | fields


def request_of(answer: httpx.Response) -> str:
    return answer.headers["x-pdq-request"]


MESSAGES: Any = [{"role": "user", "content": PROMPT}]


# ---- OpenAI's client


def test_the_synchronous_client(gateway: Service) -> None:
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(model="pdq/sim", messages=MESSAGES, max_tokens=9, temperature=0)
        stream = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, temperature=0, stream=True)
        chunks = list(stream)
        plain = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0)
    message = answer.choices[0].message
    assert (answer.model, message.role, answer.choices[0].finish_reason) == ("pdq/sim", "assistant", "length")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert (plain.object, plain.choices[0].finish_reason, plain.choices[0].index) == ("text_completion", "length", 0)
    assert plain.choices[0].text


async def test_an_answer_is_the_one_in_the_log(api: openai.AsyncOpenAI, client: Client) -> None:
    answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20)
    stored = await read_all(client, answer.id.removeprefix("chatcmpl-"))
    assert stored.transcript.text == answer.choices[0].message.content
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        stored.state.prompt_tokens,
        len(stored.transcript.ids),
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.created == int(stored.state.submitted)


async def test_a_stream_with_its_usage(api: openai.AsyncOpenAI, client: Client) -> None:
    stream = await api.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    stored = await read_all(client, chunks[0].id.removeprefix("cmpl-"))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == stored.transcript.text
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage) == (
        [],
        openai.types.CompletionUsage.model_validate(
            {
                "prompt_tokens": stored.state.usage.prompt_tokens,
                "completion_tokens": stored.state.usage.completion_tokens,
                "total_tokens": stored.state.usage.total_tokens,
            }
        ),
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_stop_strings_end_with_stop(api: openai.AsyncOpenAI) -> None:
    whole = await api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0)
    word = whole.choices[0].text.split()[3]
    cut = await api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, stop=[word])
    assert cut.choices[0].finish_reason == "stop"
    assert whole.choices[0].text.startswith(cut.choices[0].text) and word not in cut.choices[0].text


async def test_several_choices_are_several_answers_to_one_prompt(api: openai.AsyncOpenAI, client: Client) -> None:
    answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10, n=3, seed=7)
    name = answer.id.removeprefix("chatcmpl-").removesuffix("-n3")
    stored = [await read_all(client, request) for request in (name, f"{name}-1", f"{name}-2")]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [each.transcript.text for each in stored]
    assert len({choice.message.content for choice in answer.choices}) == 3
    alone = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10, seed=8)
    assert alone.choices[0].message.content == answer.choices[1].message.content, "seeds follow each other"
    assert answer.usage is not None and alone.usage is not None
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(len(each.transcript.ids) for each in stored)


async def test_several_choices_in_one_stream(http: httpx.AsyncClient, client: Client) -> None:
    body = chat(n=4, stream=True, stream_options={"include_usage": True})
    answer = await http.post("/chat/completions", json=body, headers={"Pdq-Background": "true"})
    found, name = sse.frames(answer.content), request_of(answer)
    for index in range(4):
        stored = await read_all(client, f"{name}-{index}" if index else name)
        assert sse.text_of(found, index) == stored.transcript.text
    *chunks, usage, done = found
    assert done.data == "[DONE]"
    assert (usage.json["choices"], usage.json["usage"]["completion_tokens"]) == ([], 48)
    opened = [chunk.json["choices"][0]["index"] for chunk in chunks if "role" in chunk.json["choices"][0]["delta"]]
    closed = [chunk.json["choices"][0]["index"] for chunk in chunks if chunk.json["choices"][0]["finish_reason"]]
    assert sorted(opened) == sorted(closed) == [0, 1, 2, 3]
    assert len({chunk.id for chunk in found[:-1]}) == len(found) - 1
    assert found[-2].id.endswith(".end") and found[-2].id.count(".") == 4


async def test_a_stream_that_is_not_to_be_resumed_is_data_alone(http: httpx.AsyncClient) -> None:
    """Some readers, vLLM's benchmark among them, take all of an event for its data."""
    for path, body in (("/chat/completions", chat(stream=True)), ("/completions", completion(stream=True))):
        answer = await http.post(path, json=body | {"stream_options": {"include_usage": True}})
        assert all(block.startswith(b"data: ") and b"\n" not in block for block in answer.content[:-2].split(b"\n\n"))
        named = await http.post(path, json=body, headers={"Idempotency-Key": f"places {path}"})
        assert all(frame.id for frame in sse.frames(named.content)[:-1])


async def test_a_chat_s_first_chunk_is_its_first_token(http: httpx.AsyncClient, client: Client) -> None:
    """Or what measures a time to first token would measure the router's."""
    answer = await http.post("/chat/completions", json=chat(stream=True), headers={"Pdq-Background": "true"})
    first, *others = (frame for frame in sse.frames(answer.content) if frame.data != "[DONE]")
    stored = await read_all(client, request_of(answer))
    assert int(first.id) == next(event.seq for event in stored.events if event.out is not None)
    assert first.json["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in frame.json["choices"][0]["delta"] for frame in others)


async def test_the_log_probabilities_of_a_chat(api: openai.AsyncOpenAI) -> None:
    options: Any = {"max_tokens": 20, "seed": 1, "logprobs": True, "top_logprobs": 2}
    answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, **options)
    stream = await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **options)
    streamed = [
        entry
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    found = answer.choices[0].logprobs.content
    assert len(found) == answer.usage.completion_tokens  # type: ignore[union-attr]
    assert found == streamed
    for entry in found:
        assert len(entry.top_logprobs) == 2 and entry.logprob <= 0
        assert entry.bytes is None if "\ufffd" in entry.token else bytes(entry.bytes or ()) == entry.token.encode()


async def test_the_log_probabilities_of_a_completion(http: httpx.AsyncClient) -> None:
    body = completion(max_tokens=20, seed=1, logprobs=2)
    whole = (await http.post("/completions", json=body)).json()["choices"][0]
    found = sse.frames((await http.post("/completions", json=body | {"stream": True})).content)[:-1]
    streamed = [frame.json["choices"][0] for frame in found]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    for name in names:
        joined = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"][name]]
        assert joined == whole["logprobs"][name] and len(joined) == 20
    starts, tokens = whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"]
    assert starts == [sum(map(len, tokens[:place])) for place in range(20)]
    assert all(token in top for token, top in zip(tokens, whole["logprobs"]["top_logprobs"], strict=True))


async def test_characters_that_tokens_split_are_whole_in_each_chunk(http: httpx.AsyncClient, client: Client) -> None:
    answer = await http.post("/completions", json=completion(max_tokens=200, seed=3, stream=True))
    found = sse.frames(answer.content)
    stored = await read_all(client, request_of(answer))
    assert any(ord(character) > 0x7F for character in stored.transcript.text), "nothing was put to the test"
    assert "\ufffd" not in sse.text_of(found)
    assert sse.text_of(found) == stored.transcript.text


async def test_models_by_id_and_by_slug(api: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    listed = [model async for model in await api.models.list()]
    assert [model.id for model in listed] == ["pdq/sim"]
    assert await api.models.retrieve("pdq/sim") == await api.models.retrieve(MODEL) == listed[0]
    for path in ("/models/pdq/sim", "/models/pdq%2Fsim"):
        assert (await http.get(path)).json()["max_model_len"] == 4096
    with pytest.raises(openai.NotFoundError, match="expected one of pdq/sim"):
        await api.models.retrieve("nobody")


# ---- idempotency, resumption


async def test_a_key_is_one_execution_and_one_answer(
    http: httpx.AsyncClient, other: Service, stack: Stack, client: Client
) -> None:
    headers, body = {"Idempotency-Key": "one execution"}, chat(max_tokens=40)
    name = idempotent_id("one execution")
    async with httpx.AsyncClient(base_url=other.api, timeout=30) as elsewhere:
        both = await asyncio.gather(
            http.post("/chat/completions", json=body, headers=headers),
            elsewhere.post("/chat/completions", json=body, headers=headers),
        )
        again = await elsewhere.post("/chat/completions", json=body, headers=headers)
        refused = await elsewhere.post("/chat/completions", json=chat(max_tokens=41), headers=headers)
        counted = await elsewhere.post("/chat/completions", json=body | {"n": 2}, headers=headers)
    assert [answer.status_code for answer in (*both, again)] == [200, 200, 200]
    assert both[0].content == both[1].content == again.content
    assert request_of(again) == name
    for answer in (refused, counted):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "duplicate_id")
        assert answer.headers["x-should-retry"] == "false"
    stored = await read_all(client, name)
    assert stored.terminal == ["finished"] and stored.state.decode.attempt == 1


async def test_a_stream_is_resumed_at_another_gateway(http: httpx.AsyncClient, other: Service) -> None:
    headers = {"Idempotency-Key": "resumed"}
    body = chat(max_tokens=60, stream=True, stream_options={"include_usage": True}, logprobs=True)
    whole = await http.post("/chat/completions", json=body, headers=headers)
    found = sse.frames(whole.content)
    assert len(found) > 8
    public = found[0].json["id"]
    async with httpx.AsyncClient(base_url=other.api, timeout=30) as elsewhere:
        for place, frame in enumerate(found[:-1]):
            resumed = {"Last-Event-ID": frame.id}
            rest = b"".join(later.raw + b"\n\n" for later in found[place + 1 :])
            answer = await elsewhere.post("/chat/completions", json=body, headers=headers | resumed)
            assert answer.content == rest, (place, frame.id)
            answer = await elsewhere.get(f"/chat/completions/{public}?stream=true&include_usage=true", headers=resumed)
            assert answer.content == rest, (place, frame.id)


async def test_a_stream_of_several_choices_is_resumed(http: httpx.AsyncClient, other: Service) -> None:
    headers, body = {"Idempotency-Key": "several resumed"}, completion(max_tokens=40, stream=True, n=3)
    whole = sse.frames((await http.post("/completions", json=body, headers=headers)).content)
    async with httpx.AsyncClient(base_url=other.api, timeout=30) as elsewhere:
        for place, frame in enumerate(whole[:-1]):
            answer = await elsewhere.post("/completions", json=body, headers=headers | {"Last-Event-ID": frame.id})
            joined = [*whole[: place + 1], *sse.frames(answer.content)]
            for index in range(3):
                assert sse.text_of(joined, index) == sse.text_of(whole, index)
            assert joined[-1].data == "[DONE]" and joined[-2].id == whole[-2].id


async def test_a_cut_stream_goes_on_elsewhere(http: httpx.AsyncClient, other: Service, client: Client) -> None:
    headers = {"Idempotency-Key": "cut", "Pdq-Background": "true"}
    body = chat(max_tokens=200, stream=True)
    seen: list[sse.Frame] = []
    async with http.stream("POST", "/chat/completions", json=body, headers=headers) as answer:
        async for frame in sse.read(answer):
            seen.append(frame)
            if len(seen) == 4:
                break
    async with httpx.AsyncClient(base_url=other.api, timeout=30) as elsewhere:
        answer = await elsewhere.post("/chat/completions", json=body, headers=headers | {"Last-Event-ID": seen[-1].id})
    joined = [*seen, *sse.frames(answer.content)]
    stored = await read_all(client, idempotent_id("cut"))
    assert stored.terminal == ["finished"]
    assert sse.text_of(joined) == stored.transcript.text
    ids = [int(frame.id) for frame in joined[:-1]]
    assert ids == sorted(set(ids))


async def test_what_cannot_be_resumed(http: httpx.AsyncClient) -> None:
    cases: list[tuple[dict[str, str], dict[str, Any], int, str]] = [
        ({"Last-Event-ID": "5"}, {"stream": True}, 400, "invalid_value"),
        ({"Last-Event-ID": "5", "Idempotency-Key": "never asked"}, {"stream": True}, 404, "not_found"),
        ({"Last-Event-ID": "x", "Idempotency-Key": "k"}, {"stream": True}, 400, "invalid_value"),
        ({"Last-Event-ID": "5.6", "Idempotency-Key": "k"}, {"stream": True}, 400, "invalid_value"),
        ({"Last-Event-ID": "5", "Idempotency-Key": "k"}, {}, 400, "invalid_value"),
    ]
    for headers, fields, status, code in cases:
        answer = await http.post("/chat/completions", json=chat(**fields), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), headers


async def test_an_answer_by_its_id(http: httpx.AsyncClient, api: openai.AsyncOpenAI) -> None:
    whole = await http.post("/chat/completions", json=chat(max_tokens=10, n=2))
    public = whole.json()["id"]
    assert (await http.get(f"/chat/completions/{public}")).content == whole.content
    retrieved = await api.chat.completions.retrieve(public)
    assert [choice.message.content for choice in retrieved.choices] == [
        choice["message"]["content"] for choice in whole.json()["choices"]
    ]
    for unknown in ("chatcmpl-r-unknown", public.replace("chatcmpl", "cmpl"), "chatcmpl-a.b", "x"):
        answer = await http.get(f"/chat/completions/{unknown}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), unknown


async def test_an_answer_that_has_not_ended_says_so(http: httpx.AsyncClient, client: Client) -> None:
    headers = {"Idempotency-Key": "not yet", "Pdq-Background": "true"}
    body = completion(max_tokens=400, stream=True)
    async with http.stream("POST", "/completions", json=body, headers=headers):
        await running(client, idempotent_id("not yet"))
        answer = await http.get(f"/completions/cmpl-{idempotent_id('not yet')}")
    assert (answer.status_code, answer.json()["status"]) == (202, "in_progress")
    assert answer.json()["choices"] == [] and answer.headers["retry-after"] == "1"


# ---- clients that leave


async def ended(client: Client, request: str, seconds: float = 10) -> str:
    """The event that a request ends with."""
    async with asyncio.timeout(seconds):
        while True:
            state = await client.state(request)
            if state is not None and state.ended:
                return state.event
            await asyncio.sleep(0.05)


async def running(client: Client, request: str) -> None:
    async with asyncio.timeout(10):
        while True:
            state = await client.state(request)
            if state is not None and state.decode.attempt:
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("background", "end"), [("false", "cancelled"), ("true", "finished")])
async def test_a_client_that_leaves(
    http: httpx.AsyncClient, client: Client, stream: bool, background: str, end: str
) -> None:
    key = f"leaves {stream} {background}"
    headers, name = {"Idempotency-Key": key, "Pdq-Background": background}, idempotent_id(key)
    body = chat(max_tokens=300, stream=stream)
    asking = asyncio.create_task(http.post("/chat/completions", json=body, headers=headers))
    await running(client, name)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await ended(client, name) == end


async def test_a_client_that_leaves_cancels_every_choice(http: httpx.AsyncClient, client: Client) -> None:
    async with http.stream("POST", "/chat/completions", json=chat(max_tokens=400, n=3, stream=True)) as answer:
        async for _ in sse.read(answer):
            break
        name = request_of(answer)
    assert [await ended(client, each) for each in (name, f"{name}-1", f"{name}-2")] == ["cancelled"] * 3


async def test_reading_an_answer_is_no_claim_on_it(http: httpx.AsyncClient, client: Client) -> None:
    """Whoever only follows an answer may leave."""
    async with http.stream("POST", "/completions", json=completion(max_tokens=300, stream=True)) as owner:
        frames = sse.read(owner)
        public = (await anext(frames)).json["id"]
        async with http.stream("GET", f"/completions/{public}?stream=true") as reader:
            async for _ in sse.read(reader):
                break
        rest = [frame async for frame in frames]
    assert rest[-1].data == "[DONE]"
    assert await ended(client, request_of(owner)) == "finished"


async def test_one_who_cancels_elsewhere_is_told_of_in_the_stream(http: httpx.AsyncClient, client: Client) -> None:
    async with http.stream("POST", "/chat/completions", json=chat(max_tokens=400, stream=True)) as answer:
        frames = sse.read(answer)
        await anext(frames)
        await client.cancel(request_of(answer))
        rest = [frame async for frame in frames]
    assert rest[-1].json["error"]["code"] == "cancelled"
    assert all(frame.json["choices"][0]["finish_reason"] is None for frame in rest[:-1])
    gone = await http.get(f"/chat/completions/chatcmpl-{request_of(answer)}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (499, "cancelled")


# ---- headers, metrics


async def test_the_callers_trace_goes_on(http: httpx.AsyncClient, client: Client) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    sent = {"traceparent": f"00-{trace}-{parent}-01"}
    answer = await http.post("/completions", json=completion(), headers=sent)
    version, found, span, flags = answer.headers["traceparent"].split("-")
    assert (version, found, flags) == ("00", trace, "01") and span != parent
    assert (await read_all(client, request_of(answer))).state.trace == trace
    odd = await http.post("/completions", json=completion(), headers={"traceparent": "nonsense"})
    assert odd.status_code == 200 and trace not in odd.headers["traceparent"]


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-123", True), ("*", True), (">", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)],
)
async def test_a_request_id_is_echoed_and_names_nothing(http: httpx.AsyncClient, sent: str, echoed: bool) -> None:
    answer = await http.post("/completions", json=completion(), headers={"X-Request-Id": sent.encode()})
    assert answer.status_code == 200
    assert answer.headers.get("x-request-id") == (sent if echoed else None)
    assert sent not in request_of(answer) and sent not in answer.json()["id"]


async def test_headers_are_passed_on(http: httpx.AsyncClient, client: Client) -> None:
    headers = {"Pdq-Deadline": "77", "Pdq-Priority": "high", "Pdq-Order": "decode-only"}
    answer = await http.post("/completions", json=completion(), headers=headers)
    state = (await read_all(client, request_of(answer))).state
    assert (state.priority, state.order, state.reason) == ("high", "decode-only", "requested")
    assert state.deadline - state.submitted == pytest.approx(77)


async def test_labels_are_few_whatever_clients_send(http: httpx.AsyncClient, gateway: Service) -> None:
    for number in range(20):
        await http.get(f"/odd/{number}")
        await http.get(f"/models/{number}")
        await http.get(f"/chat/completions/chatcmpl-{number}")
    text = gateway.get("/metrics")[1]
    series = [line for line in text.splitlines() if line.startswith("pdq_gateway_requests_total")]
    assert 'pdq_gateway_requests_total{route="other",status="404"} 20.0' in series
    assert 'route="/v1/chat/completions/{id}",status="404"' in text
    assert len(series) < 30


async def test_open_streams_are_counted(http: httpx.AsyncClient, gateway: Service, stack: Stack) -> None:
    assert stack.metric(gateway, "pdq_gateway_open_streams") == 0
    async with http.stream("POST", "/chat/completions", json=chat(max_tokens=300, stream=True)) as answer:
        async for _ in sse.read(answer):
            break
        assert stack.metric(gateway, "pdq_gateway_open_streams") == 1
    async with asyncio.timeout(10):
        while stack.metric(gateway, "pdq_gateway_open_streams"):
            await asyncio.sleep(0.05)


def test_it_is_ready_and_says_so_of_the_router(gateway: Service) -> None:
    status, text = gateway.get("/readyz")
    assert status == 200 and '"degraded": false' in text and '"router"' in text
