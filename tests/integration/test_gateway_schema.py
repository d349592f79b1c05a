"""The OpenAPI document is true: requests made from it, valid and not, find no fault of the server, and no answer that
it does not describe. The same checks do find what is planted in a server that is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from pdq_gateway.openapi import document
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.stack import MODEL, Stack

CHECKS: Any = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [(verb, path) for path, verbs in document()["paths"].items() for verb in verbs]
QUESTIONS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "prompt": "hello",
    "input": "hello",
}
MOST_EXAMPLES = 25
MOST_TOKENS = 8
BOUND_S = 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"))
    for module in ("pdq_router", "pdq_worker", "pdq_gateway"):
        stack.add(module)
    try:
        asyncio.run(stack.start())
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def schema(stack: Stack) -> Any:
    return schema_at(stack.services[2].api.removesuffix("/v1"))


def schema_at(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def try_out(operation: Any, mode: GenerationMode) -> list[int]:
    """Call an operation with what the document makes of it; the statuses. Raises what the checks find."""
    statuses: list[int] = []

    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=MOST_EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def calls(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and len(statuses) % 2 and isinstance(case.body, dict):
            case.body = plain(case.body, len(statuses))
            case.headers.pop("Last-Event-ID", None)
        if "Pdq-Deadline" in (case.headers or {}):
            # One that passes at once is a 504, and no fault.
            case.headers["Pdq-Deadline"] = str(BOUND_S)
        case.body = served(case.body)
        statuses.append(case.call_and_validate(checks=CHECKS, timeout=BOUND_S).status_code)

    calls()
    return statuses


def plain(body: dict[str, Any], number: int) -> dict[str, Any]:
    """One that may be answered: a plain question, and one field more."""
    rest = sorted(body.keys() - {"model", *QUESTIONS})
    more = {name: body[name] for name in rest[number % (len(rest) or 1) :][:1]}
    return {"model": MODEL} | {name: QUESTIONS[name] for name in QUESTIONS if name in body} | more


def served(body: Any) -> Any:
    """A body for the model that there is, with a short answer; one that is no object stays as it is."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return body
    limit = "max_output_tokens" if "input" in body else "max_tokens"
    rest = {name: value for name, value in body.items() if name not in ("max_tokens", "max_completion_tokens")}
    return rest | {"model": MODEL, limit: MOST_TOKENS}


@pytest.mark.parametrize(("verb", "path"), OPERATIONS)
def test_what_the_document_allows(schema: Any, verb: str, path: str) -> None:
    statuses = try_out(schema[path][verb.upper()], GenerationMode.POSITIVE)
    assert statuses and ("{id}" in path or 200 in statuses), statuses


@pytest.mark.parametrize("path", [path for verb, path in OPERATIONS if verb == "post" and "{id}" not in path])
def test_what_the_document_does_not_allow(schema: Any, path: str) -> None:
    statuses = try_out(schema[path]["POST"], GenerationMode.NEGATIVE)
    assert statuses.count(400) > MOST_EXAMPLES / 2, statuses


# ---- the control: a server with a fault is caught

ERROR = {"error": {"message": "m", "type": "server_error", "param": None, "code": "c"}}
FAULTS: dict[str, tuple[int, str, Any]] = {
    "fault of the server": (500, "application/json", ERROR),
    "status": (418, "application/json", ERROR),
    "media type": (400, "text/html", ERROR),
    "shape": (400, "application/json", {"error": "m"}),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_what_is_planted_is_found(fault: str | None) -> None:
    """Answers as the document has them, but for one body in some."""
    answer = FAULTS[fault] if fault else (400, "application/json", ERROR)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, "application/json", document())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(*(answer if b"stop" in body else (400, "application/json", ERROR)))

        def answer(self, status: int, media: str, what: Any) -> None:
            data = json.dumps(what).encode()
            self.send_response(status)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            operation = schema_at(f"http://127.0.0.1:{server.server_port}")["/v1/completions"]["POST"]
            with pytest.raises(FailureGroup) if fault else contextlib.nullcontext():
                assert try_out(operation, GenerationMode.POSITIVE)
        finally:
            server.shutdown()
