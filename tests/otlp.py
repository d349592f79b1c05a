"""A real OTLP/HTTP receiver for tests, and what must hold of every trace.

It runs in threads of its own, so that a test may block (`Telemetry.close`) while spans arrive.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

CONSUMER = trace_pb2.Span.SPAN_KIND_CONSUMER
ERROR = trace_pb2.Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Received:
    """One span as it arrived; ids are hex, times Unix nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: dict[str, int]
    links: list[tuple[str, str]]
    status: int
    message: str

    @property
    def attempt(self) -> int:
        return int(self.attributes.get("pdq.attempt", 0))


@dataclass
class Collector:
    """What has arrived; `answer` is the HTTP status it answers with from now on."""

    endpoint: str
    answer: int = 200
    requests: int = 0
    spans: list[Received] = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def wait(self, *, spans: int = 0, requests: int = 0, bound_s: float = 20.0) -> list[Received]:
        """Until so many spans and requests have arrived; fails the test when they do not."""
        with self.arrived:
            came = self.arrived.wait_for(lambda: len(self.spans) >= spans and self.requests >= requests, bound_s)
            assert came, f"only {len(self.spans)} spans in {self.requests} requests: {[s.name for s in self.spans]}"
            return list(self.spans)

    def of_request(self, request: str, *, ended: str, outside: str = "", bound_s: float = 20.0) -> list[Received]:
        """All spans of the trace of one request, once its span named `ended` has arrived with all above it, up to
        the root (whose parent may be the span id `outside`).

        Fails the test when `ended` does not come; spans that miss their parents are left to `assert_no_orphans`.
        """
        deadline = time.monotonic() + bound_s
        while True:
            with self.arrived:
                traces = {s.trace_id for s in self.spans if s.attributes.get("pdq.request.id") == request}
                found = [s for s in self.spans if s.trace_id in traces]
            came = bool(named(found, ended))
            if came and [span.parent_id for span in tops(found)] == [outside]:
                return found
            if time.monotonic() > deadline:
                assert came, f"no span {ended!r} of request {request} arrived, only {[s.name for s in found]}"
                return found
            time.sleep(0.02)


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """A collector on a port of the loopback; 0: a free one."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    server.collector = found = Collector(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        found: Collector = self.server.collector  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        with found.arrived:
            found.requests += 1
            if found.answer == 200:
                found.spans.extend(parse(body))
            found.arrived.notify_all()
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(found.answer)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Tests have a log of their own."""


def parse(body: bytes) -> list[Received]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        _received(_plain(resource.resource.attributes)["service.name"], span)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _received(service: str, span: trace_pb2.Span) -> Received:
    return Received(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events={event.name: event.time_unix_nano for event in span.events},
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        status=span.status.code,
        message=span.status.message,
    )


def _plain(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def named(spans: Iterable[Received], name: str) -> list[Received]:
    return [span for span in spans if span.name == name]


def tops(spans: list[Received]) -> list[Received]:
    """Spans whose parents are not among them."""
    ids = {span.span_id for span in spans}
    return [span for span in spans if span.parent_id not in ids]


def assert_one_trace(spans: list[Received]) -> str:
    """All spans are of one trace; its id."""
    ids = {span.trace_id for span in spans}
    assert len(ids) == 1, f"{len(ids)} traces: {[(s.trace_id, s.service, s.name) for s in spans]}"
    return ids.pop()


def assert_services(spans: list[Received], *services: str) -> None:
    found = {span.service for span in spans}
    assert found == {f"pdq-{service}" for service in services}, found


def assert_no_orphans(spans: list[Received], *, outside: str = "") -> Received:
    """Every parent is here, but for one root, which is returned; its parent may be the span id `outside`."""
    found = tops(spans)
    assert [span.parent_id for span in found] == [outside], [(s.name, s.parent_id) for s in found]
    return found[0]


def assert_linked(spans: list[Received]) -> None:
    """Every consumer of a message has the producer's context as parent and as link."""
    consumers = [span for span in spans if span.kind == CONSUMER and span.parent_id]
    assert consumers, "no consumer span has a parent"
    for span in consumers:
        assert span.links == [(span.trace_id, span.parent_id)], (span.name, span.links)


def assert_stages_within_root(spans: list[Received]) -> None:
    """Route and process spans begin within the root, and do not sum to more than it.

    A stage still acknowledges its message when its answer is out; that rest is not counted.
    """
    root = assert_no_orphans(spans)
    stages = [span for span in spans if span.kind == CONSUMER]
    assert stages, "no stage at all"
    for span in stages:
        assert root.start_ns <= span.start_ns <= root.end_ns, span.name
        assert span.start_ns <= span.end_ns, span.name
    total_ns = sum(min(span.end_ns, root.end_ns) - span.start_ns for span in stages)
    assert total_ns <= root.end_ns - root.start_ns, [(s.name, s.end_ns - s.start_ns) for s in (root, *stages)]


def assert_waits_visible(spans: list[Received], *stages: str) -> None:
    """Each stage has a child `queue`, which ends where the stage begins."""
    for stage in stages:
        found = named(spans, stage)
        assert found, f"no span {stage!r}"
        for span in found:
            waits = [child for child in named(spans, "queue") if child.parent_id == span.span_id]
            assert [wait.end_ns for wait in waits] == [span.start_ns], stage
            assert waits[0].start_ns <= waits[0].end_ns, stage
