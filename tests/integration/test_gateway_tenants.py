"""Tenants over HTTP: keys, limits, and that nobody sees another's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.tenants import Store
from pdq.tenants.directory import REFRESH_S
from pdq_gateway.tenancy import PAUSE_S

from tests import sse
from tests.stack import MODEL, Service, Stack

SLOW = "llama3-8b-h100"
SOON_S = 20.0
"""How soon a key that is added or revoked counts, on a machine that is busy with other things: else a second."""
PATIENCE_S = 120.0
"""For a service to start, on such a machine."""
MESSAGES: Any = [{"role": "user", "content": "whose is it?"}]


def make_stack(directory: Path) -> Stack:
    """A router, a slow worker and two gateways."""
    stack = Stack(directory, PDQ_LOG_LEVEL="DEBUG")
    stack.add("pdq_router")
    stack.add("pdq_worker", PDQ_ENGINE_SIM_PROFILE=SLOW)
    for _ in range(2):
        stack.add("pdq_gateway")
    for service in stack.services:
        service.ready_s = PATIENCE_S
    return stack


LONG: Any = {"type": "object", "properties": {"text": {"type": "string", "minLength": 2_500}}, "required": ["text"]}
ENDLESS: Any = {"format": {"type": "json_schema", "name": "long", "schema": LONG}}
"""Nothing in a request for a response says that an answer may not end early; a schema does."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Shared by tests that have tenants of their own each, and break nothing."""
    stack = make_stack(tmp_path_factory.mktemp("stack"))
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Stack]:
    """One that nobody has used: it has no tenants."""
    stack = make_stack(tmp_path)
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture
async def bus(stack: Stack) -> AsyncIterator[Bus]:
    bus = await stack.connect()
    yield bus
    await bus.close()


@pytest.fixture
def store(bus: Bus) -> Store:
    return Store(bus)


@pytest.fixture
async def fresh_bus(fresh: Stack) -> AsyncIterator[Bus]:
    bus = await fresh.connect()
    yield bus
    await bus.close()


def gateways(stack: Stack) -> list[Service]:
    return [service for service in stack.services if service.module == "pdq_gateway"]


def client(stack: Stack, key: str, number: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=gateways(stack)[number].api, api_key=key, max_retries=0)


def http(stack: Stack, key: str, number: int = 0) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=gateways(stack)[number].api, timeout=30, headers=headers)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "ignore_eos": True} | fields


async def added(stack: Stack, store: Store, tenant: str, **limits: int) -> str:
    """A key of a tenant, once all services know it and its limits."""
    key = (await store.add(tenant, limits=limits)).key
    await answers(stack, "", 401)
    await answers(stack, key, 200)
    # A router, which nobody can ask, reads as often as a gateway.
    await asyncio.sleep(REFRESH_S + 0.5)
    return key


async def answers(stack: Stack, key: str, status: int) -> None:
    """Wait, for no longer than a change may take, until both gateways answer so."""
    async with asyncio.timeout(SOON_S):
        for number in range(2):
            async with http(stack, key, number) as api:
                while (await api.get("/models")).status_code != status:
                    await asyncio.sleep(0.02)


# ---- keys


async def test_from_the_first_tenant_on_everybody_needs_a_key(fresh: Stack, fresh_bus: Bus) -> None:
    store = Store(fresh_bus)
    async with client(fresh, "EMPTY") as api:
        answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].message.content
    key = (await store.add("acme")).key
    await answers(fresh, "EMPTY", 401)
    await answers(fresh, key, 200)
    async with client(fresh, key) as api:
        assert (await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)).id
        await store.revoke_key("acme", key[:12])
        await answers(fresh, key, 401)
        with pytest.raises(openai.AuthenticationError) as refused:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert refused.value.code == "invalid_api_key" and key not in str(refused.value.body)
    assert refused.value.response.headers["www-authenticate"] == "Bearer"
    # What a local client had before is the local tenant's, and nobody's with a key.
    other = (await store.add("acme")).key
    await answers(fresh, other, 200)
    async with http(fresh, other) as api2:
        assert (await api2.get(f"/chat/completions/{answer.id}")).status_code == 404


async def test_without_a_valid_key_nothing_is_served(stack: Stack, store: Store) -> None:
    key = await added(stack, store, "acme")
    wrong = [None, "", "Bearer", f"Basic {key}", key, f"Bearer {key}x", f"Bearer {key[:-1]}", f"Bearer {key} {key}"]
    wrong += ["Bearer pdq_*", "Bearer " + "k" * 5_000]
    async with http(stack, "") as api:
        for authorization in wrong:
            headers = {} if authorization is None else {"Authorization": authorization}
            for asked in (
                api.get("/models", headers=headers),
                api.get(f"/models/{MODEL}", headers=headers),
                api.get("/chat/completions/chatcmpl-r-1", headers=headers),
                api.get("/completions/cmpl-r-1?stream=true", headers=headers),
                api.post("/chat/completions", json=chat(), headers=headers),
                api.post("/completions", json={}, headers=headers, params={"api_key": key}),
                api.delete("/chat/completions/chatcmpl-r-1", headers=headers),
                api.post("/responses", json={"model": MODEL, "input": "x"}, headers=headers),
                api.get("/responses/resp_1", headers=headers),
                api.post("/responses/resp_1/cancel", headers=headers),
                api.delete("/responses/resp_1", headers=headers),
            ):
                answer = await asked
                error = answer.json().get("error")
                assert error, (authorization, answer.text)
                assert (answer.status_code, error["code"]) == (401, "invalid_api_key"), authorization
                assert error["type"] == "invalid_request_error" and key not in answer.text
        served = await api.get("/models", headers={"Authorization": f"bearer   {key}"})
        assert served.status_code == 200 and served.json()["data"]


async def test_a_gateway_that_others_reach_needs_keys_or_a_word_to_start(fresh: Stack, fresh_bus: Bus) -> None:
    store = Store(fresh_bus)
    wanting = fresh.add("pdq_gateway", PDQ_GATEWAY_HOST="0.0.0.0")
    wanting.ready_s = PATIENCE_S
    wanting.start()
    assert wanting.process is not None
    assert await asyncio.to_thread(wanting.process.wait, PATIENCE_S) != 0
    said = wanting.log.read_text()
    assert "pdq tenant add NAME" in said and "PDQ_GATEWAY_AUTH" in said and "Traceback" not in said
    for mode, status in (("none", 200), ("keys", 401)):
        told = fresh.add("pdq_gateway", PDQ_GATEWAY_HOST="0.0.0.0", PDQ_GATEWAY_AUTH=mode)
        told.ready_s = PATIENCE_S
        told.start()
        await asyncio.to_thread(told.wait_ready)
        async with httpx.AsyncClient(base_url=told.api) as api:
            assert (await api.get("/models")).status_code == status
    await store.add("acme")
    wanting.start()
    await asyncio.to_thread(wanting.wait_ready)
    async with httpx.AsyncClient(base_url=wanting.api) as api:
        assert (await api.get("/models")).status_code == 401


# ---- limits


async def test_a_tenant_over_its_limit_gets_429_and_when_to_try_again(stack: Stack, bus: Bus, store: Store) -> None:
    key = await added(stack, store, "crowd", requests_in_flight=2)
    other = await added(stack, store, "other")
    async with client(stack, key) as api, client(stack, other) as others, http(stack, key, 1) as second:
        running = [
            await api.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as refused:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        error = refused.value
        assert error.code == "rate_limit_exceeded" and error.type == "rate_limit_error"
        assert int(error.response.headers["retry-after"]) >= 1 and "limit of 2 requests in flight" in error.message
        assert (await second.post("/chat/completions", json=chat())).status_code == 429, "another gateway"
        assert (await others.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)).id
        for stream in running:
            assert [chunk async for chunk in stream]
        async with asyncio.timeout(20):
            while (await second.post("/chat/completions", json=chat())).status_code == 429:
                await asyncio.sleep(0.1)


async def test_a_limit_per_minute_tells_when_the_minute_is_over(stack: Stack, store: Store) -> None:
    key = await added(stack, store, "minute", requests_per_minute=2, tokens_per_minute=1_000)
    async with http(stack, key) as api:
        answer = await api.post("/chat/completions", json=chat(max_tokens=1_500))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), "it never fits"
        assert [(await api.post("/chat/completions", json=chat())).status_code for _ in range(3)] == [200, 200, 429]
        answer = await api.post("/chat/completions", json=chat())
    assert answer.status_code == 429 and 20 <= int(answer.headers["retry-after"]) <= 61


async def test_a_flood_over_a_limit_is_answered_at_the_gateway(stack: Stack, bus: Bus, store: Store) -> None:
    key = await added(stack, store, "flood", requests_per_minute=1)
    async with http(stack, key) as api:
        assert (await api.post("/chat/completions", json=chat())).status_code == 200
        began = time.monotonic()
        assert {(await api.post("/chat/completions", json=chat())).status_code for _ in range(100)} == {429}
        took_s = time.monotonic() - began
    stored = await bus.read(subjects.LOG, "pdq.log.flood.*.state", limit=10_000)
    submitted = len({subjects.parse_log(one.subject).request for one in stored}) - 1
    assert 0 < submitted <= took_s / PAUSE_S + 1


# ---- one tenant and another


async def test_a_tenant_sees_only_its_own(stack: Stack, store: Store) -> None:
    mine, other = await added(stack, store, "mine"), await added(stack, store, "stranger")
    async with http(stack, mine) as owner, http(stack, other, 1) as stranger:
        key = {"Idempotency-Key": "the same for both"}
        async with owner.stream(
            "POST", "/chat/completions", json=chat(max_tokens=200, stream=True), headers=key
        ) as out:
            head = out.headers["x-pdq-request"]
            frames = out.aiter_lines()
            id = ""
            while not id:
                line = await anext(frames)
                id = json.loads(line[6:])["id"] if line.startswith("data: ") else ""
            place = {"Last-Event-ID": "1"}
            tried = [
                stranger.get(f"/chat/completions/{id}"),
                stranger.get(f"/chat/completions/{id}?stream=true"),
                stranger.get(f"/chat/completions/{id}?stream=true", headers=place),
                stranger.get(f"/chat/completions/chatcmpl-{head}", headers={"X-Request-Id": head}),
                stranger.get(f"/completions/cmpl-{head}"),
                stranger.delete(f"/chat/completions/{id}"),
                stranger.delete(f"/completions/cmpl-{head}?purge=true"),
            ]
            assert [(await one).status_code for one in tried] == [404] * len(tried)
            # The same idempotency key, and a name that is another's for the caller's own logs: a request of its own.
            own = await stranger.post(
                "/chat/completions", json=chat(max_tokens=3), headers={**key, "X-Request-Id": head}
            )
            assert own.status_code == 200 and own.headers["x-request-id"] == head
            assert own.json()["usage"]["completion_tokens"] == 3
            rest = [line async for line in frames if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]", "nobody has cancelled it"
        for number in range(2):
            async with http(stack, mine, number) as again:
                found = await again.get(f"/chat/completions/{id}")
                assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == 200
                stream = await again.get(f"/chat/completions/{id}?stream=true")
                assert sse.frames(stream.content)[-1].data == "[DONE]"


async def test_a_tenants_responses_are_its_own(stack: Stack, store: Store) -> None:
    mine, other = await added(stack, store, "mine2"), await added(stack, store, "stranger2")
    async with client(stack, mine) as owner, client(stack, other, 1) as stranger:
        made = await owner.responses.create(
            model=MODEL, input="whose?", text=ENDLESS, max_output_tokens=3_000, background=True
        )
        for asked in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await asked(made.id)
        with pytest.raises(openai.NotFoundError):
            await stranger.responses.retrieve(made.id, stream=True, starting_after=0)
        assert (await owner.responses.retrieve(made.id)).status != "cancelled"
        assert (await owner.responses.cancel(made.id)).status == "cancelled"


ODD = ["*", ">", "chatcmpl-*", "chatcmpl->", "chatcmpl-a.b", "chatcmpl-%2e%2e", "chatcmpl-%00", "chatcmpl-%20", "é"]


async def test_odd_ids_are_nobodys(stack: Stack, store: Store) -> None:
    key = await added(stack, store, "odd")
    async with http(stack, key) as api:
        for id in ODD:
            for path in (f"/chat/completions/{id}", f"/chat/completions/{id}?stream=true", f"/completions/{id}"):
                answer = await api.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path


# ---- a key is nowhere


async def everything(stack: Stack, bus: Bus) -> dict[str, str]:
    """All that the stack has written: logs, spans, metrics, and every message that the broker keeps."""
    found = {path.name: path.read_text(errors="replace") for path in stack.directory.glob("*.log")}
    found |= {path.name: path.read_text() for path in stack.directory.glob("*.jsonl")}
    for service in stack.services:
        found[f"metrics of {service.module}-{service.port}"] = service.get("/metrics")[1]
    for name in (await bus.api("STREAM.NAMES"))["streams"]:
        info = await bus.stream_info(name)
        assert info is not None
        for seq in range(max(1, info["state"]["first_seq"]), info["state"]["last_seq"] + 1):
            stored = await bus.get(name, seq)
            if stored is not None:
                text = f"{stored.subject} {stored.headers} {stored.data.decode(errors='replace')}\n"
                found[name] = found.get(name, "") + text
    return found


async def test_no_key_is_in_any_log_span_metric_or_message(fresh: Stack, fresh_bus: Bus) -> None:
    store = Store(fresh_bus)
    valid, gone = [(await store.add("acme", label=label)).key for label in ("one", "two")]
    await store.revoke_key("acme", gone[:12])
    await answers(fresh, valid, 200)
    await answers(fresh, gone, 401)
    invalid, malformed = "pdq_canary-that-nobody-made", "canary with blanks"
    requests = []
    async with http(fresh, "") as api:
        for key in (valid, gone, invalid, malformed):
            headers = {"Authorization": f"Bearer {key}", "X-Api-Key": key}
            for number in range(2):
                answer = await api.post("/chat/completions", json=chat(stream=bool(number)), headers=headers)
                assert answer.status_code == (200 if key == valid else 401)
                assert key not in f"{answer.text} {answer.headers}"
                requests.append(answer.headers.get("x-pdq-request", ""))
            await api.get("/models", params={"api_key": key, "key": key}, headers=headers)
    for service in fresh.services:
        await asyncio.to_thread(service.stop)
    for service in fresh.services:
        service.start()
    for service in fresh.services:
        await asyncio.to_thread(service.wait_ready)
    found = await everything(fresh, fresh_bus)
    # What is searched does hold what was done: the request's id, in logs, in spans and in the log of requests.
    holding = {name for name, text in found.items() if requests[0] in text}
    assert any("gateway" in name and name.endswith(".log") for name in holding)
    assert any("gateway" in name and name.endswith(".jsonl") for name in holding) and "PDQ_LOG" in holding
    assert "acme" in found["KV_PDQ_TENANTS"] and len(found) > 12
    for key in (valid, gone, invalid, malformed):
        assert [line for text in found.values() for line in text.splitlines() if key in line] == []
        secret = key[12:].split()[-1]
        assert [name for name, text in found.items() if secret in text] == []
