"""Traces as a Jaeger gives them: its query API, `pdq trace --jaeger`, and the same assertions on three back ends.

The back ends: a real OTLP receiver, a local server that answers as the API is documented, and a real Jaeger where
PDQ_JAEGER_URL names one (its OTLP port is OTEL_EXPORTER_OTLP_ENDPOINT, else 4318 on the same host).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pdq import jaeger as jaeger_module
from pdq import otlp as wire
from pdq.client import Client, new_request_id
from pdq.errors import Misconfigured, Unavailable
from pdq.jaeger import Jaeger
from pdq.settings import TelemetrySettings
from pdq.telemetry import Telemetry

from tests import otlp
from tests.ask import Answer, ask
from tests.broker import free_port
from tests.stack import MODEL, Stack, completion

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
NOT_FOUND = b'{"error":{"httpCode":404,"message":"trace not found"}}\n'
SPANS_S = 20.0

Answering = Callable[[str], tuple[int, bytes]]
"""From the path of a GET to the status and the body of its answer."""


@contextmanager
def serving(answering: Answering) -> Iterator[str]:
    """A local HTTP server; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answering(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Tests have a log of their own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


async def asked(status: int, body: bytes, path: str = "") -> Any:
    with serving(lambda _: (status, body)) as url:
        return await Jaeger(url + path).trace(TRACE)


def documented(*spans: dict[str, Any], wrapped: bool = True) -> bytes:
    """A trace as Jaeger 2 writes it: OTLP JSON, ids in hex, 64-bit numbers as strings."""
    export = {
        "resourceSpans": [
            {
                "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "pdq-router"}}]},
                "scopeSpans": [{"scope": {"name": "pdq", "version": "0.1.0"}, "spans": list(spans)}],
                "schemaUrl": "",
            }
        ]
    }
    return json.dumps({"result": export} if wrapped else export).encode()


SPAN = {
    "traceId": TRACE,
    "spanId": "00f067aa0ba902b7",
    "parentSpanId": "",
    "flags": 257,
    "name": "route",
    "kind": 5,
    "startTimeUnixNano": "1700000000000000000",
    "endTimeUnixNano": "1700000000004000000",
    "attributes": [
        {"key": "pdq.request.id", "value": {"stringValue": "r-1"}},
        {"key": "pdq.prompt_tokens", "value": {"intValue": "33"}},
        {"key": "other.bytes", "value": {"bytesValue": "AAA="}},
    ],
    "droppedAttributesCount": 0,
    "status": {"code": 2, "message": "no room"},
}


# The query API.


@pytest.mark.parametrize("wrapped", [True, False], ids=["in a result", "bare, as older ones answer"])
async def test_a_trace_is_read(wrapped: bool) -> None:
    child = SPAN | {"spanId": "00f067aa0ba902b8", "parentSpanId": SPAN["spanId"], "name": "queue", "status": {}}
    trace = await asked(200, documented(child, SPAN, wrapped=wrapped))
    (root,) = trace.roots
    assert (trace.trace_id, root.service, root.name, root.error) == (TRACE, "router", "route", "no room")
    assert root.attributes == {"pdq.request.id": "r-1", "pdq.prompt_tokens": 33}
    assert root.end_ns - root.start_ns == 4_000_000
    assert [span.name for span in root.children] == ["queue"]


async def test_the_path_is_that_of_the_api_below_any_base_path() -> None:
    paths: list[str] = []

    def answering(path: str) -> tuple[int, bytes]:
        paths.append(path)
        return 200, documented(SPAN)

    with serving(answering) as url:
        assert await Jaeger(url).trace(TRACE) is not None
        assert await Jaeger(f"{url}/jaeger/ui/").trace(TRACE) is not None
    assert paths == [f"/api/v3/traces/{TRACE}", f"/jaeger/ui/api/v3/traces/{TRACE}"]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, NOT_FOUND),
        (404, b'{"error":{"httpCode":404,"message":"No traces found"}}'),
        (500, b'{"error":{"httpCode":500,"message":"trace not found"}}'),
        (200, b'{"error":{"httpCode":404,"message":"trace not found","grpcCode":5}}'),
        (200, b'{"result":{}}'),
        (200, b'{"result":{"resourceSpans":[]}}'),
        (200, documented(SPAN | {"traceId": "0" * 31 + "1"})),
    ],
)
async def test_a_trace_that_is_not_there_is_none(status: int, body: bytes) -> None:
    assert await asked(status, body) is None


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (
            500,
            b'{"error":{"httpCode":500,"message":"storage\\u001b[2J is away"}}',
            r"answers 500: storage \[2J is away",
        ),
        (400, b'{"error":{"httpCode":400,"message":"malformed parameter"}}', "answers 400: malformed parameter"),
        (404, b"404 page not found\n", r"does not answer as a Jaeger does \(HTTP 404\)"),
        (200, b"<!doctype html><title>Jaeger UI</title>", "does not answer as a Jaeger does"),
        (200, b"[]", "does not answer as a Jaeger does"),
        (200, b'{"result":{"resourceSpans":7}}', "does not answer as a Jaeger does"),
        (200, b"", "does not answer as a Jaeger does"),
        (200, documented(SPAN | {"startTimeUnixNano": "soon"}), "spans that cannot be read"),
    ],
)
async def test_what_is_no_answer_is_unavailable(status: int, body: bytes, told: str) -> None:
    with pytest.raises(Unavailable, match=told):
        await asked(status, body)


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaeger_module, "MAX_BYTES", 1 << 20)
    with pytest.raises(Unavailable, match="more than 1 MiB"):
        await asked(200, b" " * (2 << 20) + documented(SPAN))


async def test_silence_and_nobody_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="cannot be asked"):
        await Jaeger(f"http://127.0.0.1:{free_port()}").trace(TRACE)
    monkeypatch.setattr(jaeger_module, "TIMEOUT_S", 0.2)
    silent = threading.Event()
    with serving(lambda _: (200, b"") if silent.wait(10) else (500, b"")) as url:
        with pytest.raises(Unavailable, match="no answer"):
            await Jaeger(url).trace(TRACE)
        silent.set()


@pytest.mark.parametrize("url", ["", "127.0.0.1:16686", "ftp://host", "http://", "http:///path"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured):
        Jaeger(url)


async def test_a_password_is_never_shown() -> None:
    jaeger = Jaeger(f"http://me:secret@127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable) as raised:
        await jaeger.trace(TRACE)
    assert "secret" not in str(raised.value) + jaeger.place


# The same assertions on every back end.


class Backend:
    """Where a stack's spans go."""

    def __init__(self, environment: dict[str, str], file: str = "") -> None:
        self.environment = environment
        """What the services need to know."""
        self.file = file
        """The trace file of the test's own client."""

    async def now(self, trace_id: str) -> list[otlp.Received]:
        """What has arrived of a trace."""
        raise NotImplementedError

    async def spans(self, answer: Answer, ended: str) -> list[otlp.Received]:
        """A trace, once its span `ended` is there and all above it, up to the root."""
        give_up = time.monotonic() + SPANS_S
        while True:
            found = await self.now(answer.state.trace)
            if otlp.named(found, ended) and [span.parent_id for span in otlp.tops(found)] == [""]:
                return found
            assert time.monotonic() < give_up, f"no whole trace, only {[span.name for span in found]}"
            await asyncio.sleep(0.1)


class Receiver(Backend):
    """A real OTLP receiver, in protobuf."""

    def __init__(self, collector: otlp.Collector) -> None:
        super().__init__(exported_to(collector.endpoint))
        self._collector = collector

    async def now(self, trace_id: str) -> list[otlp.Received]:
        with self._collector.arrived:
            return [span for span in self._collector.spans if span.trace_id == trace_id]


class QueryApi(Backend):
    """A Jaeger's query API, real or not."""

    def __init__(self, url: str, environment: dict[str, str], file: str = "") -> None:
        super().__init__(environment, file)
        self._jaeger = Jaeger(url)

    async def now(self, trace_id: str) -> list[otlp.Received]:
        export = await self._jaeger.export(trace_id)
        return received(export) if export is not None else []


def exported_to(endpoint: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}


def from_files(directory: Path) -> Answering:
    """Answers from the trace files of a stack, as Jaeger does from its store."""

    def answering(path: str) -> tuple[int, bytes]:
        wanted = re.fullmatch(r"/api/v3/traces/([0-9a-f]{32})", path)
        assert wanted, path
        resources: list[Any] = []
        for file in directory.glob("*.jsonl"):
            for line in file.read_bytes().splitlines():
                for resource in json.loads(line)["resourceSpans"]:
                    for scope in resource["scopeSpans"]:
                        scope["spans"] = [span for span in scope["spans"] if span["traceId"] == wanted[1]]
                    resources += [resource] if any(scope["spans"] for scope in resource["scopeSpans"]) else []
        return (200, json.dumps({"result": {"resourceSpans": resources}}).encode()) if resources else (404, NOT_FOUND)

    return answering


def received(export: wire.ExportRequest) -> list[otlp.Received]:
    """OTLP JSON as what the receiver of tests/otlp.py makes of protobuf."""
    return [
        otlp.Received(
            service=str(wire.plain(resource.resource.attributes)["service.name"]),
            name=span.name,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_span_id,
            kind=span.kind,
            start_ns=int(span.start_time_unix_nano),
            end_ns=int(span.end_time_unix_nano),
            attributes=dict(wire.plain(span.attributes)),
            events={event.name: int(event.time_unix_nano) for event in span.events},
            links=[(link.trace_id, link.span_id) for link in span.links],
            status=span.status.code,
            message=span.status.message,
        )
        for resource in export.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@pytest.fixture(scope="module", params=["receiver", "api", "jaeger"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    if request.param == "receiver":
        with otlp.collector() as collector:
            yield Receiver(collector)
    elif request.param == "api":
        directory = tmp_path_factory.mktemp("api")
        with serving(from_files(directory)) as url:
            # The services write their files where the stack is.
            yield QueryApi(url, {"DIRECTORY": str(directory)}, str(directory / "cli.jsonl"))
    else:
        url = os.environ.get("PDQ_JAEGER_URL", "")
        if not url:
            pytest.skip("PDQ_JAEGER_URL names no Jaeger: the same assertions ran on an OTLP receiver")
        here = f"http://{urlsplit(url).hostname}:4318"
        yield QueryApi(url, exported_to(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", here)))


@pytest.fixture(scope="module")
def stack(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its first decode fails: the first request has two attempts."""
    environment = dict(backend.environment)
    directory = Path(environment.pop("DIRECTORY", "")) if "DIRECTORY" in environment else None
    stack = Stack(
        directory or tmp_path_factory.mktemp("traced"), PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100", **environment
    )
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    stack.add("pdq_decode", PDQ_ENGINE_SIM_FAULTS="decode.fail_first=1")
    asyncio.run(stack.start())
    yield stack
    stack.stop()


@pytest.fixture(scope="module")
def answers(stack: Stack, backend: Backend) -> tuple[Answer, Answer]:
    """A request whose first decode failed, and one that a client traces from its submit on."""
    environ = {name: value for name, value in backend.environment.items() if name.startswith("OTEL_")}

    async def work() -> tuple[Answer, Answer]:
        bus = await stack.connect()
        client = Client(bus, "local")
        failing = await ask(client, completion("a" * 100, max_tokens=2))
        request = new_request_id()
        with telemetry.submit(request, "local", MODEL) as root:
            body = completion("x" * 300, max_tokens=8, ignore_eos=True)
            whole = await ask(client, body, request=request, headers=root.headers())
        await bus.close()
        return failing, whole

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        telemetry = Telemetry.start("cli", TelemetrySettings(file=backend.file), "test")
    try:
        return asyncio.run(work())
    finally:
        telemetry.close()


async def test_one_request_is_one_trace(answers: tuple[Answer, Answer], backend: Backend) -> None:
    _, answer = answers
    spans = await backend.spans(answer, "process decode")
    assert otlp.assert_one_trace(spans) == answer.state.trace
    otlp.assert_services(spans, "cli", "router", "prefill", "decode")
    top = otlp.assert_no_orphans(spans)
    assert (top.name, top.service) == ("submit", "pdq-cli")
    otlp.assert_linked(spans)
    otlp.assert_stages_within_root(spans)
    otlp.assert_waits_visible(spans, "route", "process prefill", "process decode")
    by_id = {span.span_id: span for span in spans}
    parents = {span.name: by_id[span.parent_id].name for span in spans if span.parent_id and span.name != "queue"}
    assert (parents["route"], parents["process prefill"]) == ("submit", "route")
    assert (parents["process decode"], parents["engine.decode"]) == ("process prefill", "process decode")
    assert list(otlp.named(spans, "engine.decode")[0].events) == ["first_token", "second_token", "last_token"]
    assert {span.attributes["pdq.request.id"] for span in spans if span.kind == otlp.CONSUMER} == {answer.request}


async def test_a_second_attempt_is_a_second_span(answers: tuple[Answer, Answer], backend: Backend) -> None:
    answer, _ = answers
    assert answer.state.decode.attempt == 2
    attempts = otlp.named(await backend.spans(answer, "engine.decode"), "process decode")
    assert sorted(span.attempt for span in attempts) == [1, 2]
    assert len({span.parent_id for span in attempts}) == 1
    assert [span.status == otlp.ERROR for span in sorted(attempts, key=lambda span: span.attempt)] == [True, False]


async def test_a_worker_that_stops_says_why_its_attempt_ended(tmp_path: Path) -> None:
    stack = Stack(tmp_path, PDQ_ENGINE_SIM_PROFILE="llama2-70b-h100-tp8")
    stack.add("pdq_router")
    first = stack.add("pdq_decode", PDQ_WORKER_DRAIN_S="0.1")
    try:
        await stack.start()
        bus = await stack.connect()
        answer, client = Answer(new_request_id()), Client(bus, "local")
        async with client.follow(answer.request, catch_up=False) as follower:
            body = completion("d" * 40, max_tokens=60, ignore_eos=True)
            await client.submit(body, model=MODEL, request=answer.request)
            async for event in follower.events(30):
                answer.take(event)
                if len(answer.transcript.ids) == 5:
                    second = stack.add("pdq_decode")
                    second.start()
                    first.process.terminate()  # type: ignore[union-attr]
        await bus.close()
        assert (answer.terminal, answer.state.decode.attempt) == (["finished"], 2)
        with serving(from_files(tmp_path)) as url:
            spans = await QueryApi(url, {}).spans(answer, "engine.decode")
    finally:
        await asyncio.to_thread(stack.stop)
    attempts = sorted(otlp.named(spans, "process decode"), key=lambda span: span.attempt)
    assert [span.attributes["pdq.outcome"] for span in attempts] == ["drain", "finished"]


# The command line, over the local server.


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str, Answer]]:
    """A stack, the URL of what answers for its Jaeger, and a request that has ended."""
    stack = Stack(tmp_path_factory.mktemp("told"))
    for module in ("pdq_router", "pdq_worker"):
        stack.add(module)
    asyncio.run(stack.start())

    async def work() -> Answer:
        bus = await stack.connect()
        try:
            return await ask(Client(bus, "local"), completion("t" * 100, max_tokens=4, ignore_eos=True))
        finally:
            await bus.close()

    with serving(from_files(stack.directory)) as url:
        yield stack, url, asyncio.run(work())
    stack.stop()


@pytest.fixture
async def pdq(told: tuple[Stack, str, Answer], tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    stack, _, _ = told
    environ = {"PATH": os.environ["PATH"], "PDQ_HOME": str(tmp_path), "PDQ_NATS_URL": stack.broker.url}

    def command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "pdq", "trace", *arguments]
        return subprocess.run(line, env=environ | more, capture_output=True, text=True, timeout=60, check=False)

    yield lambda *arguments, **more: asyncio.to_thread(command, *arguments, **more)


async def test_a_request_is_shown_from_jaeger(told: tuple[Stack, str, Answer], pdq: Callable[..., Any]) -> None:
    _, url, answer = told
    shown = await pdq(answer.request, "--jaeger", url)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(f"trace {answer.state.trace}\n")
    spans = [line.split("|")[0] for line in shown.stdout.splitlines()[3:]]
    for name in ("route", "process prefill", "process decode", "engine.decode", "queue"):
        assert any(name in span for span in spans), name
    by_variable = await pdq(answer.request, PDQ_JAEGER_URL=url)
    assert by_variable.stdout == shown.stdout
    as_json = json.loads((await pdq(answer.request, "--json", "--jaeger", url)).stdout)
    assert as_json["trace_id"] == answer.state.trace and as_json["roots"][0]["name"] == "route"


async def test_a_trace_id_needs_no_broker(told: tuple[Stack, str, Answer], pdq: Callable[..., Any]) -> None:
    _, url, answer = told
    shown = await pdq(answer.state.trace, "--jaeger", url, PDQ_NATS_URL=f"nats://127.0.0.1:{free_port()}")
    assert shown.returncode == 0, shown.stderr
    assert "process decode" in shown.stdout


async def test_what_is_found_in_the_files_is_not_asked_for(
    told: tuple[Stack, str, Answer], pdq: Callable[..., Any], tmp_path: Path
) -> None:
    stack, _, answer = told
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert (await pdq(answer.request, PDQ_JAEGER_URL=nowhere)).returncode == 3
    traces = tmp_path / "stack" / "traces"
    traces.mkdir(parents=True)
    for file in stack.directory.glob("*.jsonl"):
        (traces / file.name).write_bytes(file.read_bytes())
    shown = await pdq(answer.request, PDQ_JAEGER_URL=nowhere)
    assert shown.returncode == 0 and "process decode" in shown.stdout
    assert (await pdq(answer.request, "--jaeger", nowhere)).returncode == 3


async def test_what_is_not_there_is_said(
    told: tuple[Stack, str, Answer], pdq: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url, answer = told
    unknown = await pdq("r-nobody", "--jaeger", url)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == "pdq: not_found: no request r-nobody (id)\n"
    no_trace = await pdq("f" * 32, "--jaeger", url)
    assert no_trace.returncode == 2 and f"{url} has no trace {'f' * 32}" in no_trace.stderr
    assert (await pdq(answer.request, "--jaeger", "nonsense")).returncode == 2
    assert (await pdq("no such.id", "--jaeger", url)).returncode == 2
