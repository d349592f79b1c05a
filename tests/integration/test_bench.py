"""`pdq bench` against a stack of sim, over NATS and over HTTP; and against endpoints that do wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pdq import subjects
from pdq.bench import over_http, records
from pdq.bench.metrics import ttft_s
from pdq.bench.over_http import OverHttp
from pdq.bench.target import Ask, Failed, Hearing
from pdq.errors import Unavailable
from pdq.messages import State, decode_json

from tests.stack import Service, Stack

BOUND_S = 120.0
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:00.0000000,3000,24
2023-11-16 18:17:01.5000000,100,24
2023-11-16 18:17:02.5000000,1500,24
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A worker whose prefill takes as long as a prompt is."""
    stack = Stack(tmp_path_factory.mktemp("stack"), PDQ_ROUTER_ORDER="decode-only")
    stack.add("pdq_router")
    stack.add("pdq_worker", PDQ_ENGINE_SIM_PROFILE="llama2-70b-h100-tp8")
    stack.add("pdq_gateway")
    asyncio.run(stack.start())
    yield stack
    stack.stop()


def gateway(stack: Stack) -> Service:
    return stack.services[-1]


def start(stack: Stack, *options: str) -> subprocess.Popen[str]:
    environ = {**stack.environment("cli"), "PDQ_HOME": str(stack.directory / "home")}
    command = [sys.executable, "-m", "pdq", "bench", *options]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    try:
        out, err = process.communicate(timeout=BOUND_S)
    finally:
        process.kill()
    assert process.returncode == code, out + err
    return out, err


def measured(stack: Stack, *options: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(finish(start(stack, *options, "--json"), code)[0])
    return found


async def states(stack: Stack) -> dict[str, State]:
    """The newest state of each request in the log."""
    bus = await stack.connect()
    found, after = {}, 0
    try:
        while page := await bus.read(subjects.LOG, "pdq.log.*.*.state", after=after, limit=1_000):
            for stored in page:
                found[subjects.parse_log(stored.subject).request] = decode_json(stored.data, State)
            after = page[-1].seq
    finally:
        await bus.close()
    return found


# ---- a stack


async def test_both_ways_tell_the_same(stack: Stack, tmp_path: Path) -> None:
    """The same requests over NATS and over HTTP: their tokens are the same, and so is what takes longer."""
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    found = {}
    for name, way in (("nats", ()), ("http", ("--url", gateway(stack).api))):
        saved = tmp_path / f"{name}.jsonl"
        options = ("--replay", str(trace), "--goodput", "ttft:20000", "tpot:5000", "--save", str(saved))
        found[name] = await asyncio.to_thread(measured, stack, *way, *options, "--order", "decode-only")
        ended = records.read(saved)
        assert [(record.input_tokens, record.output_tokens) for record in ended] == [(3000, 24), (100, 24), (1500, 24)]
        by_length = sorted(ended, key=lambda record: record.input_tokens)
        assert [ttft_s(record) for record in by_length] == sorted(ttft_s(record) for record in ended)
        assert all(record.chunks[-1][0] <= record.end_s - record.sent_s + 1e-6 for record in ended)
        # Over NATS the log tells how many tokens came at a time; a request has its name either way.
        assert all((sum(num for _, num in record.chunks) == 24) == (name == "nats") for record in ended)
        logged = await states(stack)
        assert {logged[record.request].order for record in ended} == {"decode-only"}
    for name, ours in found.items():
        assert (ours["completed"], ours["failed"], ours["input_tokens"], ours["output_tokens"]) == (3, 0, 4600, 72), (
            name
        )
        assert ours["good_fraction"] == 1
        # A decode step of the profile takes 30 ms, whoever counts.
        assert ours["tpot_ms"]["mean"] > 29, name
    assert abs(found["nats"]["tpot_ms"]["p50"] - found["http"]["tpot_ms"]["p50"]) < 10


def test_a_chat_has_the_length_that_is_wanted(stack: Stack) -> None:
    options = ("--api", "chat", "--rate", "20", "--requests", "3", "--input-tokens", "700", "--output-tokens", "4")
    for way in ((), ("--url", gateway(stack).api)):
        found = measured(stack, *way, *options)
        assert (found["completed"], found["output_tokens"]) == (3, 12)
        assert abs(found["input_tokens"] - 3 * 700) <= 9


def test_a_model_that_nobody_serves_is_a_failure_that_counts(stack: Stack) -> None:
    for way in ((), ("--url", gateway(stack).api)):
        found = measured(stack, *way, "--model", "nobody", "--rate", "50", "--requests", "4", code=1)
        assert (found["completed"], found["failed"], found["errors"]) == (0, 4, {"unknown_model": 4})


async def test_ctrl_c_ends_what_runs_and_tells_what_was_measured(stack: Stack) -> None:
    before = set(await states(stack))
    process = start(stack, "--rate", "4", "--requests", "100", "--arrivals", "constant", "--output-tokens", "3000")
    new: dict[str, State] = {}
    async with asyncio.timeout(BOUND_S):
        while sum(state.decode.attempt > 0 for state in new.values()) < 2:
            await asyncio.sleep(0.1)
            new = {name: state for name, state in (await states(stack)).items() if name not in before}
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.to_thread(finish, process, 130)
        while not all(state.ended for state in new.values()):
            await asyncio.sleep(0.1)
            new = {name: state for name, state in (await states(stack)).items() if name not in before}
    assert {state.event for state in new.values()} == {"cancelled"}
    assert "stopped: this is what was measured so far" in err
    assert f"Interrupted requests:                    {len(new)}\n" in out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--goodput", "itl:5"), "objective 'itl:5'"),
        (("--replay", "nowhere.csv"), "nowhere.csv"),
        (("--speed", "2"), "--speed is for a --replay"),
        (("--arrivals", "bursty"), "name one with --generate"),
        (("--replay", "x", "--rate", "2"), "times of its own"),
        (("--replay", "x", "--generate", "mooncake"), "either --replay or --generate"),
        (("--generate", "mooncake", "--input-tokens", "5"), "lengths are the trace's"),
        (("--format", "azure"), "--format is for a --replay"),
        (("--url", "ftp://nobody/v1"), "no URL of http"),
        (("--warm-up", "100", "--duration", "5", "--rate", "0.001"), "ends with its warm-up"),
    ],
)
def test_options_that_cannot_be(options: tuple[str, ...], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    from pdq import cli

    assert cli.main(["bench", *options]) in (1, 2)
    assert why in capfd.readouterr().err


# ---- endpoints that do wrong

TEXT = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
SAID = b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
CALL = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
OVER = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'


class Endpoint:
    """An endpoint that answers with the pieces it was given, each as one write."""

    def __init__(self) -> None:
        self.status = 200
        self.pieces: list[bytes] = []
        self.left = asyncio.Event()
        self.headers: dict[str, str] = {}
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers = dict(request.headers)
        if self.status != 200:
            return web.Response(status=self.status, body=b"".join(self.pieces))
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.02)
        if not self.pieces:
            try:
                await asyncio.sleep(BOUND_S)
            finally:
                self.left.set()
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status, body=b"".join(self.pieces), content_type="application/json")


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    app = web.Application()
    app.add_routes([web.post("/v1/completions", made.answer), web.get("/v1/models", made.models)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


async def heard(endpoint: Endpoint, **headers: str) -> Hearing:
    hearing = Hearing()
    async with asyncio.timeout(BOUND_S), over_http.session(headers) as http:
        await OverHttp(http, endpoint.url, "m", "completions").ask(Ask(b"{}", BOUND_S), hearing)
    return hearing


@pytest.mark.parametrize(
    ("pieces", "chunks"),
    [
        ([TEXT, TEXT, USAGE, DONE], 2),
        ([TEXT + TEXT, USAGE + DONE], 2),
        ([TEXT[:9], TEXT[9:], TEXT, USAGE[:30], USAGE[30:], DONE], 2),
        ([b": ping\n\n", TEXT.replace(b"\n", b"\r\n"), b"event: x\n", USAGE, DONE], 1),
        # What says nothing is no first token: a role alone, an end.
        ([ROLE, SAID, CALL, OVER, USAGE, DONE], 2),
    ],
)
async def test_streams(endpoint: Endpoint, pieces: list[bytes], chunks: int) -> None:
    endpoint.pieces = pieces
    found = await heard(endpoint, Authorization="Bearer secret")
    assert len(found.chunks) == chunks
    assert (found.prompt_tokens, found.completion_tokens) == (7, 5)
    assert endpoint.headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "pieces", "code"),
    [
        (429, [b'{"error":{"code":"queue_full","message":"later"}}'], "queue_full"),
        (400, [b'{"error":{"code":null,"message":"wrong"}}'], "http_400"),
        (404, [b"<html>"], "http_404"),
        (503, [b'{"error":"down"}'], "http_503"),
        (200, [TEXT], "incomplete"),
        (200, [TEXT, b'data: {"error":{"code":"engine_died","message":"x"}}\n\n'], "engine_died"),
        (200, [b"data: <html>\n\n"], "not_an_endpoint"),
        (200, [b'data: {"choices":7}\n\n'], "not_an_endpoint"),
    ],
)
async def test_what_an_endpoint_does_wrong_has_a_code(
    endpoint: Endpoint, status: int, pieces: list[bytes], code: str
) -> None:
    endpoint.status, endpoint.pieces = status, pieces
    with pytest.raises(Failed) as failed:
        await heard(endpoint)
    assert failed.value.code == code


@pytest.mark.parametrize("by_file", [True, False])
async def test_a_key_and_an_order_go_along(endpoint: Endpoint, tmp_path: Path, by_file: bool) -> None:
    endpoint.pieces = [TEXT, USAGE, DONE]
    (tmp_path / "key").write_text("secret\n")
    command = [sys.executable, "-m", "pdq", "bench", "--url", f"{endpoint.url}/", "--model", "m", "--requests", "1"]
    command += ["--order", "decode-first", "--save", str(tmp_path / "times")]
    command += ["--api-key-file", str(tmp_path / "key")] if by_file else []
    environ = os.environ | {"OPENAI_API_KEY": "another" if by_file else "secret"}
    done = await asyncio.to_thread(
        subprocess.run, command, env=environ, capture_output=True, text=True, timeout=BOUND_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert endpoint.headers["Authorization"] == "Bearer secret"
    assert endpoint.headers["Pdq-Order"] == "decode-first"
    assert "secret" not in done.stdout + done.stderr + (tmp_path / "times").read_text()


async def test_who_leaves_closes_the_connection(endpoint: Endpoint) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await heard(endpoint)
    async with asyncio.timeout(BOUND_S):
        await endpoint.left.wait()


async def test_nobody_there(endpoint: Endpoint) -> None:
    endpoint.url = "http://127.0.0.1:1/v1"
    with pytest.raises(Failed) as failed:
        await heard(endpoint)
    assert failed.value.code == "connection"
    async with over_http.session({}) as http:
        with pytest.raises(Unavailable, match="does not answer"):
            await over_http.first_model(http, endpoint.url)


async def test_the_first_model(endpoint: Endpoint) -> None:
    async with over_http.session({}) as http:
        endpoint.pieces = [b'{"data":[{"id":"one"},{"id":"two"}]}']
        assert await over_http.first_model(http, endpoint.url) == "one"
        endpoint.pieces = [b'{"data":[]}']
        with pytest.raises(Failed, match="lists no model"):
            await over_http.first_model(http, endpoint.url)
