"""Responses when a gateway, a worker, the router or the broker goes away: the same events, in the same numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pdq.client import Client, idempotent_id
from pdq.settings import LimitSettings

from tests import sse
from tests.ask import read_all
from tests.integration.test_responses import FORMAT, WEATHER, text_of
from tests.integration.test_structured import PARSERS
from tests.stack import MODEL, MODELS, Service, Stack

SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama2-70b-h100-tp8"}
"""About 30 ms a token."""
LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A router, a slow decode worker and two gateways, started."""
    stack = Stack(tmp_path, limits=LIMITS, PDQ_ROUTER_ORDER="decode-only")
    (tmp_path / "models.toml").write_text(f"{MODELS}{PARSERS}")
    for module, settings in (("pdq_router", {}), ("pdq_decode", SLOW), ("pdq_gateway", {}), ("pdq_gateway", {})):
        stack.add(module, **settings)
    await stack.start()
    yield stack
    await asyncio.to_thread(stack.stop)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    bus = await stack.connect()
    yield Client(bus, "local")
    await bus.close()


def http(gateway: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.api, timeout=60)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "@weather", "max_output_tokens": 120, "temperature": 0, "stream": True} | fields


def whole(found: list[sse.Frame]) -> bytes:
    return b"".join(frame.raw + b"\n\n" for frame in found if not frame.comment)


async def test_a_killed_gateway_costs_nothing(stack: Stack, client: Client) -> None:
    first, second = stack.services[2:]
    headers = {"Idempotency-Key": "killed"}
    seen: list[sse.Frame] = []
    async with http(first) as api:
        with pytest.raises(httpx.RemoteProtocolError):
            async with api.stream("POST", "/responses", json=body(text=FORMAT), headers=headers) as answer:
                async for frame in sse.read(answer):
                    seen.append(frame)
                    if len(seen) == 12:
                        first.kill()
    async with http(second) as api:
        after = headers | {"Last-Event-ID": seen[-1].id}
        rest = await api.post("/responses", json=body(text=FORMAT), headers=after)
        later = await api.get(f"/responses/resp_{idempotent_id('killed')}?stream=true")
    assert whole(seen) + rest.content == later.content
    stored = await read_all(client, idempotent_id("killed"))
    assert stored.terminal == ["finished"] and stored.state.decode.attempt == 1


@pytest.mark.parametrize("fields", [{"text": FORMAT}, {"tools": [WEATHER]}], ids=["replayed", "gone on with"])
async def test_a_killed_worker_is_not_to_be_seen(stack: Stack, client: Client, fields: dict[str, Any]) -> None:
    """What was live at one gateway while the worker died is what another reads afterwards, number by number."""
    decode, first, second = stack.services[1:]
    spare = stack.add("pdq_decode")
    seen: list[sse.Frame] = []
    async with http(first) as api:
        async with api.stream("POST", "/responses", json=body(**fields)) as answer:
            async for frame in sse.read(answer):
                seen.append(frame)
                if frame.id == "10":
                    decode.kill()
                    spare.start()
    id = seen[0].json["response"]["id"]
    async with http(second) as api:
        later = await api.get(f"/responses/{id}?stream=true")
        read = (await api.get(f"/responses/{id}")).json()
    assert whole(seen) == later.content and seen[-1].json["response"] == read
    stored = await read_all(client, id.removeprefix("resp_"))
    assert stored.terminal == ["finished"] and stored.state.decode.attempt == 2
    content = stored.transcript.parsed.content if stored.transcript.parsed is not None else ""
    assert text_of(seen) == ("" if "tools" in fields else content)


async def test_a_broker_that_is_killed_in_mid_stream_costs_nothing(stack: Stack) -> None:
    first, second = stack.services[2:]
    async with http(first) as api:
        async with api.stream("POST", "/responses", json=body()) as answer:
            frames = sse.read(answer)
            seen = [await anext(frames) for _ in range(8)]
            stack.broker.kill()
            stack.broker.start()
            seen += [frame async for frame in frames]
    async with http(second) as api:
        later = await api.get(f"/responses/{seen[0].json['response']['id']}?stream=true")
    assert seen[-1].type == "response.incomplete" and whole(seen) == later.content


async def test_no_router_is_unavailable(stack: Stack) -> None:
    stack.services[0].kill()
    async with http(stack.services[2]) as api:
        for asking in (
            api.get("/responses/resp_r-1"),
            api.get("/responses/resp_r-1?stream=true"),
            api.post("/responses/resp_r-1/cancel"),
            api.delete("/responses/resp_r-1"),
            api.post("/responses", json=body(background=True), headers={"Idempotency-Key": "later"}),
        ):
            answer = await asking
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert answer.headers["retry-after"] == "1"


async def test_a_gateway_that_stops_breaks_off_without_an_end(stack: Stack) -> None:
    """An event that closes the stream would pass for the end of the answer."""
    gateway = stack.add("pdq_gateway", PDQ_GATEWAY_DRAIN_S="0.2")
    gateway.start()
    await asyncio.to_thread(gateway.wait_ready)
    seen: list[sse.Frame] = []
    async with http(gateway) as api:
        with pytest.raises(httpx.RemoteProtocolError):
            async with api.stream("POST", "/responses", json=body(background=True)) as answer:
                async for frame in sse.read(answer):
                    seen.append(frame)
                    if len(seen) == 5:
                        assert gateway.process is not None
                        gateway.process.terminate()
    assert all(frame.type not in ("error", "response.failed") for frame in seen)
    async with http(stack.services[2]) as api:
        id = seen[0].json["response"]["id"]
        rest = await api.get(f"/responses/{id}?stream=true&starting_after={seen[-1].id}")
        later = await api.get(f"/responses/{id}?stream=true")
    assert whole(seen) + rest.content == later.content
