"""One tenant and another's requests, over HTTP: a table of what is tried, each refused or missed, and each done by its
owner as the control. What tenants may do on the broker itself is in `test_denied`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from pdq import operators
from pdq.bus import Bus
from pdq.client import Client
from pdq.tenants import Store
from pdq.tenants.directory import REFRESH_S

from tests import sse
from tests.ask import follow_to_end, read_all
from tests.stack import MODEL, Stack

OWNER, STRANGER = "acme", "globex"
WITHIN_S = 30.0
SECRET = "what only acme may know"
SLOW = "llama3-8b-h100"


class Two(NamedTuple):
    """The keys of both."""

    owner: str
    stranger: str


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), PDQ_LOG_LEVEL="DEBUG")
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module, **({"PDQ_ENGINE_SIM_PROFILE": SLOW} if module != "pdq_router" else {}))
    stack.add("pdq_gateway")
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def keys(stack: Stack) -> Two:
    return asyncio.run(added(stack))


async def added(stack: Stack) -> Two:
    """Both tenants, once all services know them."""
    bus = await stack.connect()
    two = Two(*[(await Store(bus).add(tenant)).key for tenant in (OWNER, STRANGER)])
    await bus.close()
    async with asyncio.timeout(WITHIN_S):
        for key in two:
            async with api_of(stack, key) as api:
                while (await api.get("/models")).status_code != 200 or (
                    await api.get("/models", headers={"Authorization": "x"})
                ).status_code != 401:
                    await asyncio.sleep(0.05)
    # A router, which nobody can ask, reads as often as a gateway.
    await asyncio.sleep(REFRESH_S + 0.5)
    return two


def api_of(stack: Stack, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=stack.services[3].api, timeout=WITHIN_S, headers=headers)


@pytest.fixture
async def owner(stack: Stack, keys: Two) -> AsyncIterator[httpx.AsyncClient]:
    async with api_of(stack, keys.owner) as api:
        yield api


@pytest.fixture
async def stranger(stack: Stack, keys: Two) -> AsyncIterator[httpx.AsyncClient]:
    async with api_of(stack, keys.stranger) as api:
        yield api


@pytest.fixture
async def bus(stack: Stack) -> AsyncIterator[Bus]:
    bus = await stack.connect()
    yield bus
    await bus.close()


# ---- by its id

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 6}),
    "completion": ("/completions", {"prompt": SECRET, "max_tokens": 6}),
    "response": ("/responses", {"input": SECRET, "max_output_tokens": 6}),
}


class Try(NamedTuple):
    verb: str
    after: str
    """Of the path, beyond the id."""
    headers: tuple[tuple[str, str], ...] = ()


READS = [
    Try("GET", ""),
    Try("GET", "?stream=true"),
    Try("GET", "?stream=true", (("Last-Event-ID", "1"),)),
    Try("GET", "?stream=true", (("X-Request-Id", "{name}"),)),
]
REMOVES = [Try("DELETE", "")]
ATTEMPTS = [
    *((kind, one) for kind in KINDS for one in [*READS, *REMOVES]),
    ("chat", Try("GET", "?stream=true&include_usage=true")),
    ("chat", Try("DELETE", "?purge=true")),
    ("completion", Try("DELETE", "?purge=true")),
    ("response", Try("GET", "?stream=true&starting_after=1")),
    ("response", Try("POST", "/cancel")),
]


async def asked(api: httpx.AsyncClient, kind: str, **headers: str) -> tuple[str, str]:
    """A finished answer's id, and its request's name."""
    path, body = KINDS[kind]
    answer = await api.post(path, json=body | {"model": MODEL}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"], answer.headers["x-pdq-request"]


@pytest.mark.parametrize(
    ("kind", "attempt"), ATTEMPTS, ids=lambda one: one if isinstance(one, str) else " ".join(one[:2])
)
async def test_what_is_tried_by_an_id(
    owner: httpx.AsyncClient, stranger: httpx.AsyncClient, bus: Bus, kind: str, attempt: Try
) -> None:
    id, name = await asked(owner, kind)
    path = f"{KINDS[kind][0]}/{id}{attempt.after}"
    headers = {header: value.format(name=name) for header, value in attempt.headers}
    before = (await read_all(Client(bus, OWNER), name)).events
    refused = await stranger.request(attempt.verb, path, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), refused.text
    never = await stranger.request(attempt.verb, path.replace(name, "r-never"), headers=headers)
    assert refused.text.replace(name, "r-never") == never.text, "it does not tell whether there is one"
    assert (await read_all(Client(bus, OWNER), name)).events == before
    # The control: its owner may.
    served = await owner.request(attempt.verb, path, headers=headers)
    assert served.status_code == 200 and (id in served.text), served.text
    gone = not (await read_all(Client(bus, OWNER), name)).events
    assert gone == (attempt.verb == "DELETE")


@pytest.mark.parametrize(("verb", "after", "end"), [("POST", "/cancel", "cancelled"), ("DELETE", "", None)])
async def test_a_running_request_is_ended_by_its_owner_alone(
    owner: httpx.AsyncClient, stranger: httpx.AsyncClient, bus: Bus, verb: str, after: str, end: str | None
) -> None:
    asking = {"model": MODEL, "input": "a long story", "background": True, "max_output_tokens": 3_000}
    answer = await owner.post("/responses", json=asking)
    id, name = answer.json()["id"], answer.headers["x-pdq-request"]
    refused = await stranger.request(verb, f"/responses/{id}{after}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
    running = await owner.get(f"/responses/{id}")
    assert running.json()["status"] in ("queued", "in_progress")
    assert (await owner.request(verb, f"/responses/{id}{after}")).status_code == 200
    answered = await read_all(Client(bus, OWNER), name)
    assert (answered.terminal == [end]) if end else not answered.events


# ---- by its idempotency key


async def test_the_same_key_is_each_ones_own(owner: httpx.AsyncClient, stranger: httpx.AsyncClient, bus: Bus) -> None:
    key = {"Idempotency-Key": "the same for both"}
    path, body = KINDS["completion"]
    body = body | {"model": MODEL, "stream": True}
    mine = await owner.post(path, json=body, headers=key)
    frames = sse.frames(mine.content)
    place = {"Last-Event-ID": frames[0].id}
    # To go on with what another asked for: there is nothing of the kind.
    refused = await stranger.post(path, json=body, headers=key | place)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found"), refused.text
    resumed = await owner.post(path, json=body, headers=key | place)
    assert sse.frames(resumed.content) == frames[1:]
    # To ask under it: another body is no duplicate, and its answer is the asker's own.
    other = {**body, "prompt": "something else", "max_tokens": 3, "stream": False}
    own = await stranger.post(path, json=other, headers=key)
    assert own.status_code == 200 and own.json()["usage"]["completion_tokens"] == 3
    assert (await owner.post(path, json=other, headers=key)).json()["error"]["code"] == "duplicate_id"
    assert sse.frames((await owner.post(path, json=body, headers=key)).content) == frames
    name = mine.headers["x-pdq-request"]
    assert own.headers["x-pdq-request"] == name, "names are each tenant's own, too"
    assert (await stranger.delete(f"{path}/cmpl-{name}")).status_code == 200
    assert (await owner.get(f"{path}/cmpl-{name}")).status_code == 200, "the stranger removed its own"


# ---- by its dead letter


async def test_a_dead_letter_is_replayed_for_its_owner(
    owner: httpx.AsyncClient, stranger: httpx.AsyncClient, bus: Bus
) -> None:
    """Operators replay; what comes of it is the tenant's whose letter it was."""
    submitted = await Client(bus, OWNER).submit(b"{not json", model=MODEL)
    await follow_to_end(Client(bus, OWNER), submitted.request)
    (letter,) = [one for one in await operators.dead_letters(bus) if one.letter.request == submitted.request]
    again = await operators.replay(bus, letter)
    await follow_to_end(Client(bus, OWNER), again.request)
    for name in (submitted.request, again.request):
        assert (await stranger.get(f"/completions/cmpl-{name}")).json()["error"]["code"] == "not_found"
        assert (await owner.get(f"/completions/cmpl-{name}")).json()["error"]["code"] == "invalid_json"
    assert (await stranger.delete(f"/completions/cmpl-{submitted.request}")).status_code == 404
    assert [one for one in await operators.dead_letters(bus) if one.letter.request == submitted.request]
    assert (await owner.delete(f"/completions/cmpl-{submitted.request}")).status_code == 200
    assert not [one for one in await operators.dead_letters(bus) if one.letter.request == submitted.request]


# ---- by its KV


@pytest.mark.parametrize("order", ["decode-only", "decode-first"])
async def test_kv_is_its_owners(owner: httpx.AsyncClient, stranger: httpx.AsyncClient, bus: Bus, order: str) -> None:
    prompt = [(len(order) * 7 + place) % 1_900 for place in range(320)]

    async def loaded(api: httpx.AsyncClient, tenant: str, order: str) -> tuple[int, int]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        answer = await api.post("/completions", json=body, headers={"Pdq-Order": order})
        assert answer.status_code == 200, answer.text
        kv = (await read_all(Client(bus, tenant), answer.headers["x-pdq-request"])).state.kv
        return kv.promised_tokens, kv.loaded_tokens

    assert min(await loaded(owner, OWNER, "prefill-first")) > 0
    missed = await loaded(stranger, STRANGER, "decode-only")
    again = await loaded(owner, OWNER, order)
    assert missed == (0, 0) and again[1] > 0, (missed, again)


# ---- after all that


async def test_no_key_and_no_prompt_was_written_down(stack: Stack, keys: Two, owner: httpx.AsyncClient) -> None:
    _, name = await asked(owner, "chat")
    for key in ("pdq_nobodys-canary", keys.stranger + "x"):
        headers = {"Authorization": f"Bearer {key}", "X-Api-Key": key}
        assert (await owner.get("/models", headers=headers, params={"key": key})).status_code == 401
    # What is written at a moment's end is there once a service has stopped.
    for service in stack.services:
        await asyncio.to_thread(service.stop)
    written = {
        path.name: path.read_text() for pattern in ("*.log", "*.jsonl") for path in stack.directory.glob(pattern)
    }
    assert sum(name in text for text in written.values()) >= 6, "what is searched tells of the request"
    for marker in (*keys, "pdq_nobodys-canary", SECRET, json.dumps(SECRET)[1:-1]):
        assert [one for one, text in written.items() if marker in text] == []
