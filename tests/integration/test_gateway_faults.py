"""The gateway when something is missing, full, slow, or stops."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pdq import subjects
from pdq.client import REQUEST_HEADER, Client, idempotent_id

from tests import sse
from tests.ask import read_all
from tests.certificates import Authority
from tests.stack import MODEL, Service, Stack

SLOW = "llama3-8b-h100"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack to add services to; it ends with the test."""
    stack = Stack(tmp_path)
    yield stack
    await asyncio.to_thread(stack.stop)


async def served(stack: Stack, decode: dict[str, str], *gateways: dict[str, str]) -> list[Service]:
    """Start a stack with these gateways."""
    stack.add("pdq_router")
    stack.add("pdq_decode", **decode)
    found = [stack.add("pdq_gateway", **settings) for settings in gateways]
    await stack.start()
    return found


def http(gateway: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.api, timeout=30)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 12, "ignore_eos": True} | fields


def terminate(service: Service) -> None:
    assert service.process is not None
    service.process.terminate()


async def told(asking: Any) -> tuple[int, str, str | None]:
    """Status, code and Retry-After of an error."""
    answer = await asking
    return answer.status_code, answer.json()["error"]["code"], answer.headers.get("retry-after")


async def kept(stack: Stack) -> list[str]:
    """What names begin with of the requests that wait for a router."""
    bus = await stack.connect()
    names, stored = [], await bus.first(subjects.SUBMIT, "pdq.submit.>", after=0)
    while stored is not None:
        names.append(stored.headers[REQUEST_HEADER][:2])
        stored = await bus.first(subjects.SUBMIT, "pdq.submit.>", after=stored.seq)
    await bus.close()
    return names


async def test_no_router_is_unavailable(stack: Stack) -> None:
    [gateway] = await served(stack, {}, {"PDQ_GATEWAY_ACCEPT_S": "1"})
    stack.services[0].kill()
    async with http(gateway) as client:
        assert await told(client.post("/completions", json=completion())) == (503, "unavailable", "1")
        assert await told(client.post("/completions", json=completion(stream=True))) == (503, "unavailable", "1")
        named = {"Idempotency-Key": "later"}
        assert await told(client.post("/completions", json=completion(), headers=named)) == (503, "unavailable", "1")
        assert await told(client.get("/completions/cmpl-r-1")) == (503, "unavailable", "1")
        assert sorted(await kept(stack)) == ["k-", "r-", "r-"]
        assert gateway.get("/readyz")[0] == 200 and '"degraded": true' in gateway.get("/readyz")[1]
        stack.services[0].start()
        await asyncio.to_thread(stack.services[0].wait_ready)
        answer = await client.post("/completions", json=completion(), headers=named)
    assert answer.status_code == 200


async def test_no_broker_is_unavailable_and_then_it_serves_again(stack: Stack) -> None:
    [gateway] = await served(stack, {}, {})
    async with http(gateway) as client:
        assert (await client.post("/completions", json=completion())).status_code == 200
        stack.broker.kill()
        assert await told(client.post("/completions", json=completion())) == (503, "unavailable", "1")
        assert gateway.get("/readyz")[0] == 503 and gateway.get("/healthz")[0] == 200
        stack.broker.start()
        await asyncio.to_thread(gateway.wait_ready)
        await asyncio.to_thread(stack.services[0].wait_ready)
        answer = await client.post("/completions", json=completion())
    assert answer.status_code == 200


async def test_a_broker_that_is_killed_in_mid_stream_costs_nothing(stack: Stack) -> None:
    [gateway] = await served(stack, {"PDQ_ENGINE_SIM_PROFILE": SLOW}, {})
    async with http(gateway) as client:
        async with client.stream("POST", "/completions", json=completion(max_tokens=300, stream=True)) as answer:
            frames = sse.read(answer)
            seen = [await anext(frames) for _ in range(3)]
            stack.broker.kill()
            stack.broker.start()
            seen += [frame async for frame in frames]
    bus = await stack.connect()
    stored = await read_all(Client(bus, "local"), answer.headers["x-pdq-request"])
    await bus.close()
    assert stored.terminal == ["finished"]
    assert sse.text_of(seen) == stored.transcript.text and seen[-1].data == "[DONE]"


async def test_a_deadline_is_a_504_or_the_last_event(stack: Stack) -> None:
    [gateway] = await served(stack, {"PDQ_ENGINE_SIM_PROFILE": SLOW}, {})
    headers = {"Pdq-Deadline": "2"}
    async with http(gateway) as client:
        whole = await client.post("/completions", json=completion(max_tokens=1000), headers=headers)
        stream = await client.post("/completions", json=completion(max_tokens=1000, stream=True), headers=headers)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert whole.headers["x-should-retry"] == "false"
    *chunks, last = sse.frames(stream.content)
    assert stream.status_code == 200 and chunks
    assert last.json["error"]["code"] == "deadline_exceeded"
    assert all(chunk.json["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_openais_client_raises_an_error_in_mid_stream(stack: Stack) -> None:
    [gateway] = await served(stack, {"PDQ_ENGINE_SIM_PROFILE": SLOW}, {})
    async with openai.AsyncOpenAI(base_url=gateway.api, api_key="none", max_retries=0) as api:
        stream = await api.completions.create(
            model=MODEL,
            prompt="x",
            max_tokens=1000,
            stream=True,
            extra_headers={"Pdq-Deadline": "2"},
            extra_body={"ignore_eos": True},
        )
        with pytest.raises(openai.APIError, match="deadline"):
            async for _ in stream:
                pass


async def test_a_failing_engine_is_an_error_of_the_server(stack: Stack) -> None:
    [gateway] = await served(stack, {"PDQ_ENGINE_SIM_FAULTS": "decode.fail=1", "PDQ_WORKER_MAX_ATTEMPTS": "1"}, {})
    async with http(gateway) as client:
        answer = await client.post("/completions", json=completion())
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


async def test_a_full_queue_is_a_429_with_a_hint(stack: Stack) -> None:
    stack.add("pdq_router", PDQ_ROUTER_QUEUE_LIMIT="1")
    gateway = stack.add("pdq_gateway")
    await stack.start()
    async with http(gateway) as client:
        headers = {"Pdq-Deadline": "5"}
        async with client.stream("POST", "/completions", json=completion(stream=True), headers=headers) as waiting:
            assert waiting.status_code == 200, "the first of the queue is routed"
            refused = await client.post("/completions", json=completion(stream=True))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1


async def test_a_silent_stream_shows_that_it_lives(stack: Stack) -> None:
    [gateway] = await served(stack, {"PDQ_ENGINE_SIM_FAULTS": "decode.delay_s=2"}, {"PDQ_GATEWAY_KEEP_ALIVE_S": "0.3"})
    async with http(gateway) as client:
        answer = await client.post("/completions", json=completion(stream=True))
    found = sse.frames(answer.content)
    assert [frame.raw for frame in found if frame.comment].count(b": keep-alive") >= 3
    assert found[-1].data == "[DONE]"


async def test_a_client_that_reads_late_gets_it_all(stack: Stack) -> None:
    """It holds up nobody, and what the gateway keeps for it is bounded: more comes than that."""
    [gateway] = await served(stack, {}, {})
    asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
    body = json.dumps({"model": MODEL, "max_tokens": 4000, "stream": True, **asked}).encode()
    late = socket.socket()
    late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = gateway.api.removeprefix("http://").removesuffix("/v1").split(":")
    late.connect((host, int(port)))
    late.sendall(
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: late\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    bus = await stack.connect()
    client = Client(bus, "local")
    async with asyncio.timeout(60):
        while (state := await client.state(idempotent_id("late"))) is None or not state.ended:
            await asyncio.sleep(0.1)
    stored = await read_all(client, idempotent_id("late"))
    await bus.close()
    async with http(gateway) as other:
        assert (await other.post("/completions", json=completion())).status_code == 200
    received = await asyncio.to_thread(_all_of, late)
    _, _, stream = received.partition(b"\r\n\r\n")
    found = sse.frames(_unchunked(stream))
    assert len(received) > 2_000_000 and stored.terminal == ["finished"]
    assert sse.text_of(found) == stored.transcript.text and found[-1].data == "[DONE]"


def _all_of(connection: socket.socket) -> bytes:
    pieces = []
    with connection:
        connection.settimeout(30)
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def _unchunked(data: bytes) -> bytes:
    found = []
    while data:
        size, _, data = data.partition(b"\r\n")
        found.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(found)


async def test_a_client_that_never_reads_is_given_up(stack: Stack) -> None:
    [gateway] = await served(stack, {}, {"PDQ_GATEWAY_STALL_S": "1"})
    body = json.dumps(completion(max_tokens=4000, stream=True, logprobs=5)).encode()
    with socket.socket() as never:
        never.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = gateway.api.removeprefix("http://").removesuffix("/v1").split(":")
        never.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        never.sendall(head.encode() + body)
        async with asyncio.timeout(20):
            while not stack.metric(gateway, "pdq_gateway_open_streams"):
                await asyncio.sleep(0.02)
            while stack.metric(gateway, "pdq_gateway_open_streams"):
                await asyncio.sleep(0.1)


async def test_a_body_that_does_not_come_is_not_waited_for(stack: Stack) -> None:
    [gateway] = await served(stack, {}, {"PDQ_GATEWAY_STALL_S": "1"})
    host, port = gateway.api.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    async with asyncio.timeout(20):
        assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_a_gateway_that_stops_lets_answers_end(stack: Stack) -> None:
    [gateway] = await served(stack, {"PDQ_ENGINE_SIM_PROFILE": SLOW}, {"PDQ_GATEWAY_DRAIN_S": "30"})
    async with http(gateway) as client:
        async with client.stream("POST", "/completions", json=completion(max_tokens=200, stream=True)) as answer:
            frames = sse.read(answer)
            await anext(frames)
            stopping = asyncio.create_task(asyncio.to_thread(gateway.stop, 60))
            rest = [frame async for frame in frames]
        assert rest[-1].data == "[DONE]"
        assert await stopping == 0
        with pytest.raises(httpx.ConnectError):
            await client.get("/models")


@pytest.mark.parametrize("stream", [True, False])
async def test_what_does_not_end_in_the_drain_time_goes_on_elsewhere(stack: Stack, stream: bool) -> None:
    slow = {"PDQ_ENGINE_SIM_PROFILE": SLOW}
    first, second = await served(stack, slow, {"PDQ_GATEWAY_DRAIN_S": "0.3"}, {})
    body, headers = completion(max_tokens=400, stream=stream), {"Idempotency-Key": "drained"}
    seen: list[sse.Frame] = []
    bus = await stack.connect()
    log = Client(bus, "local")
    async with http(first) as client:
        if stream:
            with pytest.raises(httpx.RemoteProtocolError):
                async with client.stream("POST", "/completions", json=body, headers=headers) as answer:
                    async for frame in sse.read(answer):
                        seen.append(frame)
                        if len(seen) == 3:
                            terminate(first)
            assert all(frame.data != "[DONE]" for frame in seen)
        else:
            asking = asyncio.create_task(client.post("/completions", json=body, headers=headers))
            while (state := await log.state(idempotent_id("drained"))) is None or not state.decode.attempt:
                await asyncio.sleep(0.05)
            terminate(first)
            assert await told(asking) == (503, "unavailable", "1")
    assert first.process is not None and await asyncio.to_thread(first.process.wait, 60) == 0
    assert "Traceback" not in first.log.read_text() and "level=error" not in first.log.read_text()
    resumed = headers | ({"Last-Event-ID": seen[-1].id} if stream else {})
    async with http(second) as client:
        answer = await client.post("/completions", json=body, headers=resumed)
    stored = await read_all(log, idempotent_id("drained"))
    await bus.close()
    assert stored.terminal == ["finished"] and stored.state.decode.attempt == 1
    if stream:
        assert sse.text_of([*seen, *sse.frames(answer.content)]) == stored.transcript.text
    else:
        assert answer.json()["choices"][0]["text"] == stored.transcript.text


async def test_a_killed_gateway_costs_nothing(stack: Stack) -> None:
    slow = {"PDQ_ENGINE_SIM_PROFILE": SLOW}
    first, second = await served(stack, slow, {}, {})
    body, headers = completion(max_tokens=300, stream=True), {"Idempotency-Key": "killed"}
    seen: list[sse.Frame] = []
    async with http(first) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/completions", json=body, headers=headers) as answer:
                async for frame in sse.read(answer):
                    seen.append(frame)
                    if len(seen) == 3:
                        first.kill()
    async with http(second) as client:
        answer = await client.post("/completions", json=body, headers=headers | {"Last-Event-ID": seen[-1].id})
        whole = await client.post("/completions", json=body, headers=headers)
    joined = [*seen, *sse.frames(answer.content)]
    assert b"\n\n".join(frame.raw for frame in joined) + b"\n\n" == whole.content


async def test_a_port_that_is_taken_is_a_misconfiguration(stack: Stack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        await stack.start()
        gateway = stack.add("pdq_gateway", PDQ_GATEWAY_PORT=str(port))
        gateway.start()
        assert gateway.process is not None
        assert await asyncio.to_thread(gateway.process.wait, 60) == 2
    assert f"PDQ_GATEWAY_PORT {port}" in gateway.log.read_text()
    assert "Traceback" not in gateway.log.read_text()


async def test_https(stack: Stack, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    pair = authority.sign("gateway")
    [gateway] = await served(stack, {}, {"PDQ_GATEWAY_TLS_CERT": pair.cert, "PDQ_GATEWAY_TLS_KEY": pair.key})
    trusted = ssl.create_default_context(cafile=authority.file)
    async with httpx.AsyncClient(base_url=gateway.api.replace("http:", "https:"), verify=trusted) as client:
        answer = await client.post("/completions", json=completion(stream=True))
        assert sse.frames(answer.content)[-1].data == "[DONE]"
    async with httpx.AsyncClient(base_url=gateway.api) as plain:
        with pytest.raises(httpx.HTTPError):
            await plain.get("/models")


async def test_a_certificate_that_is_not_there_is_a_misconfiguration(stack: Stack) -> None:
    await stack.start()
    gateway = stack.add("pdq_gateway", PDQ_GATEWAY_TLS_CERT="/no/such.pem")
    gateway.start()
    assert gateway.process is not None
    assert await asyncio.to_thread(gateway.process.wait, 60) == 2
    assert "PDQ_GATEWAY_TLS_CERT '/no/such.pem'" in gateway.log.read_text()
    assert "Traceback" not in gateway.log.read_text()
