"""A gateway under garbage, byte by byte: what each malformed request is answered with, that nothing of it is left, and
that what is legal, however odd, is served. `test_gateway_errors` has the plainer mistakes."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client

from tests.ask import read_all
from tests.raw_http import (
    CHAT,
    COMPLETIONS,
    SECRET,
    WITHIN_S,
    Raw,
    asked,
    chunked,
    completion,
    exchange,
    get,
    held,
    line,
    nested,
    post,
    said,
    sized,
    spaced,
    turn,
    with_text,
)
from tests.stack import Stack

STALL_S = "1"

ID = CHAT + "/chatcmpl-r-1"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), PDQ_GATEWAY_STALL_S=STALL_S)
    for module in ("pdq_router", "pdq_worker", "pdq_gateway"):
        stack.add(module)
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


# ---- what is refused

GOOD = completion()
BAD_HTTP = (400, "invalid_request", None, "not HTTP/1.1")
TOO_LARGE = (431, "headers_too_large", None, "65536 bytes")
LATE_BODY = (408, "request_timeout", None, "the body did not come within 1 s")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "a"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "b"}}
DEEP = "response_format.json_schema.schema.properties.a.properties.a…erties.a" + ".properties.a" * 4
"""The place of a schema; the middle is left out."""
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}


class Row(NamedTuple):
    name: str
    sent: bytes
    status: int
    code: str
    param: str | None
    told: str
    submits: int = 0
    """How many requests are published for it: none for what the gateway sees by itself."""


FRAMING = [
    Row("length negative", line(f"POST {COMPLETIONS} HTTP/1.1", "Content-Length: -1", body=GOOD), *BAD_HTTP),
    Row("length no number", line(f"POST {COMPLETIONS} HTTP/1.1", "Content-Length: abc", body=GOOD), *BAD_HTTP),
    Row(
        "length with a plus",
        line(f"POST {COMPLETIONS} HTTP/1.1", f"Content-Length: +{len(GOOD)}", body=GOOD),
        *BAD_HTTP,
    ),
    Row("length of 100 bits", line(f"POST {COMPLETIONS} HTTP/1.1", f"Content-Length: {10**30}", body=GOOD), *BAD_HTTP),
    Row("length twice", post(GOOD, sized(GOOD)), *BAD_HTTP),
    Row("two lengths", post(GOOD, "Content-Length: 3"), *BAD_HTTP),
    Row("length as a list", line(f"POST {COMPLETIONS} HTTP/1.1", f"{sized(GOOD)}, {len(GOOD)}", body=GOOD), *BAD_HTTP),
    Row("length too short", line(f"POST {COMPLETIONS} HTTP/1.1", "Content-Length: 5", body=GOOD), *BAD_HTTP),
    Row("length too long", line(f"POST {COMPLETIONS} HTTP/1.1", "Content-Length: 500", body=GOOD), *LATE_BODY),
    Row(
        "length over the limit",
        line(f"POST {COMPLETIONS} HTTP/1.1", "Content-Length: 99999999999"),
        *(413, "payload_too_large", None, "over the limit of 1048576 bytes"),
    ),
    Row("chunk of no size", chunked(end=b"zz\r\n{}\r\n0\r\n\r\n"), *BAD_HTTP),
    Row("chunk of a negative size", chunked(end=b"-1\r\n{}\r\n0\r\n\r\n"), *BAD_HTTP),
    Row("chunk of 100 bits", chunked(end=b"f" * 25 + b"\r\n{}\r\n0\r\n\r\n"), *BAD_HTTP),
    Row("chunk larger than it says", chunked(end=b"2\r\n{}{}\r\n0\r\n\r\n"), *BAD_HTTP),
    Row("chunks without an end", chunked(GOOD, end=b""), *LATE_BODY),
    Row(
        "chunks over the limit",
        chunked(*[b" " * 60_000] * 18, GOOD),
        *(413, "payload_too_large", None, "over the limit of 1048576 bytes"),
    ),
    Row("no chunks", chunked(), 400, "invalid_json", None, "body of 0 bytes is not JSON"),
    Row("encoding unknown", post(GOOD, "Transfer-Encoding: xchunked"), *BAD_HTTP),
    Row("encoding gzip", line(f"POST {COMPLETIONS} HTTP/1.1", "Transfer-Encoding: gzip", body=GOOD), *BAD_HTTP),
    Row("chunked and a length", post(b"0\r\n\r\n", "Transfer-Encoding: chunked"), *BAD_HTTP),
    Row("chunked, spelled oddly, and a length", post(GOOD, "Transfer-Encoding : chunked"), *BAD_HTTP),
]

HEADERS = [
    Row("a header of 100 kB", get("/v1/models", "X-A: " + "a" * 100_000), *TOO_LARGE),
    Row("10,000 headers", get("/v1/models", *(f"X-{number}: 1" for number in range(10_000))), *TOO_LARGE),
    Row("a path of 100 kB", get("/v1/" + "a" * 100_000), *TOO_LARGE),
    Row("a name over 0x7f", get("/v1/models", "X-\xff: a"), *BAD_HTTP),
    Row("a bare LF", get("/v1/models", "X-A: a\nX-B: b"), *BAD_HTTP),
    Row("a bare CR", get("/v1/models", "X-A: a\rX-B: b"), *BAD_HTTP),
    Row("a NUL", get("/v1/models", "X-A: a\0b"), *BAD_HTTP),
    Row("a folded line", get("/v1/models", "X-A: a\r\n b"), *BAD_HTTP),
    Row("no colon", get("/v1/models", "garbage"), *BAD_HTTP),
    Row("no name", get("/v1/models", ": a"), *BAD_HTTP),
    Row("no Host", line("GET /v1/models HTTP/1.1", host=""), 400, "invalid_request", "host", "Host is missing"),
    Row("two Hosts", get("/v1/models", "Host: y"), 400, "invalid_value", "host", "more than once"),
    Row(
        "two keys",
        get("/v1/models", "Authorization: Bearer a", "Authorization: Bearer b"),
        *(400, "invalid_value", "authorization", "more than once"),
    ),
    Row(
        "two idempotency keys",
        asked("Idempotency-Key: a", "Idempotency-Key: b"),
        *(400, "invalid_value", "idempotency-key", "more than once"),
    ),
    Row(
        "an encoding that is none",
        asked("Content-Encoding: sesame"),
        415,
        "unsupported_media_type",
        "Content-Encoding",
        "",
    ),
    Row(
        "JSON lines",
        post(GOOD).replace(b"/json", b"/jsonl"),
        415,
        "unsupported_media_type",
        "Content-Type",
        "application/json",
    ),
    Row(
        "no media type",
        post(GOOD).replace(b"application/json", b";;;"),
        415,
        "unsupported_media_type",
        "Content-Type",
        "",
    ),
    Row("a key of bytes over 0x7f", asked("Idempotency-Key: \xff"), 400, "invalid_value", "Idempotency-Key", "ASCII"),
    Row("a deadline of 0", asked("Pdq-Deadline: 0"), 400, "invalid_value", "Pdq-Deadline", "", 1),
    Row("a deadline without an end", asked("Pdq-Deadline: inf"), 400, "invalid_value", "Pdq-Deadline", "", 1),
    Row("a deadline over 0x7f", asked("Pdq-Deadline: \xff"), 400, "invalid_value", "Pdq-Deadline", "", 1),
    Row("a priority in capitals", asked("Pdq-Priority: HIGH"), 400, "invalid_value", "Pdq-Priority", "'HIGH'", 1),
    Row("an order of 5 kB", asked("Pdq-Order: " + "x" * 5_000), 400, "invalid_value", "Pdq-Order", "xxx", 1),
    Row(
        "a place that is none",
        get(f"{ID}?stream=true", "Last-Event-ID: *"),
        400,
        "invalid_value",
        "Last-Event-ID",
        "'*'",
    ),
    Row(
        "a negative place", get(f"{ID}?stream=true", "Last-Event-ID: -1"), 400, "invalid_value", "Last-Event-ID", "'-1'"
    ),
    Row(
        "a place in 9 choices",
        get(f"{ID}?stream=true", "Last-Event-ID: 1.2.3.4.5.6.7.8.9"),
        *(400, "invalid_value", "Last-Event-ID", "expected an id of a stream"),
    ),
    Row(
        "a place of another stream",
        get(f"{ID}?stream=true", "Last-Event-ID: 1.2"),
        *(400, "invalid_value", "Last-Event-ID", "a stream of 1 choices"),
    ),
]

PATHS = [
    Row("not HTTP", b"\x16\x03\x01\x02\x00\x01\x00" + b"\0" * 100, *BAD_HTTP),
    Row("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", *BAD_HTTP),
    Row("HTTP/9.9", line("GET /v1/models HTTP/9.9"), *BAD_HTTP),
    Row("HTTP/0.9", b"GET /v1/models\r\n", 408, "request_timeout", None, "the headers did not come within 1 s"),
    Row("a verb that is none", get("/v1/models", verb="BREW"), *BAD_HTTP),
    Row("a verb in small letters", get("/v1/models", verb="get"), *BAD_HTTP),
    Row("a tunnel", line("CONNECT x:443 HTTP/1.1"), *BAD_HTTP),
    Row(
        "a tunnel to a path",
        get("/v1/models", verb="CONNECT"),
        405,
        "method_not_allowed",
        None,
        "CONNECT is not served",
    ),
    Row("TRACE", get("/v1/models", verb="TRACE"), 405, "method_not_allowed", None, "TRACE is not served"),
    Row("PATCH", get(ID, verb="PATCH"), 405, "method_not_allowed", None, "GET"),
    Row("OPTIONS of nothing", get("*", verb="OPTIONS"), 404, "not_found", None, "nothing at this path"),
    Row("no slash", get("v1/models"), *BAD_HTTP),
    Row("a byte over 0x7f", get("/v1/models/\xff"), *BAD_HTTP),
    Row("NUL in an id", get(CHAT + "/chatcmpl-%00"), 404, "not_found", "id", r"chatcmpl-\x00"),
    Row("bytes that are no UTF-8", get(CHAT + "/chatcmpl-%ff"), 404, "not_found", "id", "there is no answer"),
    Row("a line end in an id", get(CHAT + "/chatcmpl-%0d%0aX:y"), 404, "not_found", "id", "there is no answer"),
    Row("a wildcard", get(CHAT + "/chatcmpl-%3e"), 404, "not_found", "id", "'chatcmpl->'"),
    Row("all of a subject", get("/v1/responses/resp_r-1.*"), 404, "not_found", "id", "there is no answer"),
    Row("dots", get("/v1/x/../models"), 404, "not_found", None, "nothing at this path"),
    Row("dots, encoded", get("/v1/x/..%2fmodels"), 404, "not_found", None, "nothing at this path"),
    Row("an id of 10 kB", get(CHAT + "/chatcmpl-" + "a" * 10_000), 404, "not_found", "id", "aaaa'…"),
    Row("a model of 10 kB", get("/v1/models/" + "a" * 10_000), 404, "unknown_model", "model", "aaaa'…"),
    Row("DELETE of what there is not", get(ID, verb="DELETE"), 404, "not_found", "id", "'chatcmpl-r-1'"),
    Row("DELETE of a wildcard", get(CHAT + "/chatcmpl-*", verb="DELETE"), 404, "not_found", "id", "'chatcmpl-*'"),
    Row("DELETE of all", get(CHAT, verb="DELETE"), 405, "method_not_allowed", None, "POST"),
    Row("half a DELETE", get(f"{ID}?purge=false", verb="DELETE"), 400, "invalid_value", "purge", "purge is false"),
    Row("a bad query", get(f"{ID}?purge=sesame", verb="DELETE"), 400, "invalid_value", "purge", "Expected `bool`"),
    Row("a query that is no UTF-8", get(f"{ID}?stream=%ff"), 400, "invalid_value", "stream", "Expected `bool`"),
]

JSON = [
    Row("null", post(b"null"), 400, "invalid_json", None, "body is null; expected a JSON object"),
    Row("a string", post(b'"sesame"'), 400, "invalid_json", None, "a string of 6 characters"),
    Row("a number", post(b"7"), 400, "invalid_json", None, "expected a JSON object"),
    Row("cut short", post(GOOD[:-3]), 400, "invalid_json", None, "is not JSON"),
    Row("two values", post(GOOD + GOOD), 400, "invalid_json", None, "is not JSON"),
    Row("a comma too many", post(GOOD[:-1] + b",}"), 400, "invalid_json", None, "is not JSON"),
    Row("a comment", post(b"// sesame\n" + GOOD), 400, "invalid_json", None, "is not JSON"),
    Row("single quotes", post(b"{'model': 'sim'}"), 400, "invalid_json", None, "is not JSON"),
    Row("a field twice, within", with_text('"metadata": {"a": 1, "a": 2}'), 400, "invalid_json", "a", "more than once"),
    Row("a field twice, escaped", with_text(r'"m\u006fdel": "x"'), 400, "invalid_json", "model", "more than once"),
    Row("NaN", with_text('"temperature": NaN'), 400, "invalid_json", None, "is not JSON"),
    Row("Infinity", with_text('"temperature": -Infinity'), 400, "invalid_json", None, "is not JSON"),
    Row("1e400", with_text('"temperature": 1e400'), 400, "invalid_json", None, "out of range"),
    Row("an integer of 5,000 digits", with_text('"seed": ' + "9" * 5_000), 400, "invalid_json", None, "is not JSON"),
    Row(
        "an integer of 65 bits",
        with_text(f'"seed": {2**64}'),
        400,
        "invalid_value",
        "seed",
        "seed is 18446744073709551616",
    ),
    Row(
        "10,000 arrays",
        with_text('"metadata": ' + "[" * 10_000 + "]" * 10_000),
        400,
        "invalid_json",
        None,
        "too deeply",
    ),
    Row("10,000 objects", post(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), 400, "invalid_json", None, "too deeply"),
    Row("half a surrogate pair", with_text(r'"user": "\ud800"'), 400, "invalid_json", None, "is not JSON"),
    Row("a control character", with_text('"user": "a\nb"'), 400, "invalid_json", None, "is not JSON"),
    Row("a byte order mark", post(b"\xef\xbb\xbf" + GOOD), 400, "invalid_json", None, "is not JSON"),
    Row("UTF-16", post(GOOD.decode().encode("utf-16")), 400, "invalid_json", None, "is not UTF-8"),
    Row("UTF-16 without a mark", post(GOOD.decode().encode("utf-16-le")), 400, "invalid_json", None, "is not JSON"),
    Row("latin-1", post(completion(prompt="absent")[:-1] + b', "prompt": "\xe9"}'), 400, "invalid_json", None, "0xe9"),
    Row("an overlong encoding", post(GOOD[:-1] + b', "user": "\xc0\xaf"}'), 400, "invalid_json", None, "0xc0"),
    Row("gzip, unannounced", post(gzip.compress(GOOD, mtime=0)), 400, "invalid_json", None, "is not UTF-8"),
    Row("a form", post(b"model=sim&prompt=sesame"), 400, "invalid_json", None, "is not JSON"),
]

FIELDS = [
    Row("model empty", asked(model=""), 404, "unknown_model", "model", "model is ''"),
    Row("model with a slash", asked(model="pdq/sim/"), 404, "unknown_model", "model", "'pdq/sim/'"),
    Row("model of another's path", asked(model="../sim"), 404, "unknown_model", "model", "'../sim'"),
    Row("model as a subject", asked(model="sim.>"), 404, "unknown_model", "model", "'sim.>'"),
    Row("model with a NUL", asked(model="sim\0"), 404, "unknown_model", "model", r"'sim\x00'"),
    Row("model of 1 MB", asked(model="m" * 1_000_000), 404, "unknown_model", "model", "mmm'…"),
    Row("model as a list", asked(model=["sim"]), 400, "invalid_type", "model", "an array of 1 items"),
    Row("messages as a string", said(messages=SECRET), 400, "invalid_type", "messages", "a string of 6 characters"),
    Row(
        "a message as a string", said(messages=[SECRET]), 400, "invalid_type", "messages[0]", "a string of 6 characters"
    ),
    Row("no role", turn(role="absent"), 400, "missing_field", "messages[0].role", "has no role"),
    Row("a role as a number", turn(role=1), 400, "invalid_type", "messages[0].role", ""),
    Row("content null", turn(content=None), 400, "invalid_type", "messages[0].content", "null"),
    Row("content a number", turn(content=7), 400, "invalid_type", "messages[0].content", ""),
    Row("content blank", turn(content=" \n"), 400, "empty_prompt", "messages", "none with text"),
    Row("no parts", turn(content=[]), 400, "empty_prompt", "messages", "none with text"),
    Row(
        "an image",
        turn(content=[{"type": "image_url", "image_url": {"url": "http://x/sesame"}}]),
        *(400, "unsupported", "messages[0].content[0].type", "only 'text' is served"),
    ),
    Row(
        "a part without text", turn(content=[{"type": "text"}]), 400, "missing_field", "messages[0].content[0].text", ""
    ),
    Row("a tool's answer to nothing", turn(role="tool"), 400, "missing_field", "messages[0].tool_call_id", "needs it"),
    Row(
        "calls of a user", turn(tool_calls=[CALL]), 400, "invalid_value", "messages[0].tool_calls", "only an assistant"
    ),
    Row("a name with a blank", turn(name="a b"), 400, "invalid_value", "messages[0].name", ""),
    Row("prompt empty", asked(prompt=""), 400, "empty_prompt", "prompt", "prompt is empty"),
    Row("prompt without ids", asked(prompt=[]), 400, "empty_prompt", "prompt", "prompt is empty"),
    Row("prompt of strings", asked(prompt=[SECRET]), 400, "invalid_type", "prompt[0]", ""),
    Row("prompt of prompts", asked(prompt=[[1], [2]]), 400, "invalid_type", "prompt[0]", ""),
    Row("prompt as an object", asked(prompt={}), 400, "invalid_type", "prompt", ""),
    Row("a negative token", asked(prompt=[-1]), 400, "token_out_of_range", "prompt[0]", "-1", 1),
    Row("a token of nobody", asked(prompt=[1, 10**9]), 400, "token_out_of_range", "prompt[1]", "1000000000", 1),
    Row("a token of 64 bits", asked(prompt=[2**63]), 400, "token_out_of_range", "prompt[0]", "9223372036854775808", 1),
    Row("too long", asked(prompt=[1] * 4_097), 400, "context_length_exceeded", "prompt", "4096", 1),
    Row(
        "too long, as a stream",
        asked(prompt=[1] * 4_097, stream=True),
        400,
        "context_length_exceeded",
        "prompt",
        "4096",
        1,
    ),
    Row("too long with its answer", asked(max_tokens=4_096), 400, "context_length_exceeded", "max_tokens", "4096", 1),
    Row("n negative", asked(n=-1), 400, "unsupported", "n", "expected 1 to 8"),
    Row("n a float", asked(n=1.5), 400, "invalid_type", "n", ""),
    Row("n a string", asked(n="1"), 400, "invalid_type", "n", ""),
    Row("n true", asked(n=True), 400, "invalid_type", "n", "true"),
    Row("n of 100 bits", asked(n=2**100), 400, "unsupported", "n", "expected 1 to 8"),
    Row("max_tokens negative", asked(max_tokens=-1), 400, "invalid_value", "max_tokens", "-1", 1),
    Row("max_tokens a float", asked(max_tokens=1.5), 400, "invalid_type", "max_tokens", ""),
    Row("max_tokens a string", asked(max_tokens="2"), 400, "invalid_type", "max_tokens", ""),
    Row("max_tokens of 63 bits", asked(max_tokens=2**63 - 1), 400, "context_length_exceeded", "max_tokens", "", 1),
    Row("two limits", said(max_completion_tokens=3), 400, "invalid_value", "max_tokens", "both equal"),
    Row("temperature negative", asked(temperature=-0.1), 400, "invalid_value", "temperature", "-0.1"),
    Row("temperature a string", asked(temperature="1"), 400, "invalid_type", "temperature", ""),
    Row("temperature true", asked(temperature=True), 400, "invalid_type", "temperature", "true"),
    Row("top_p 0", asked(top_p=0), 400, "invalid_value", "top_p", ""),
    Row("top_p 1.1", asked(top_p=1.1), 400, "invalid_value", "top_p", ""),
    Row("presence_penalty 3", asked(presence_penalty=3), 400, "invalid_value", "presence_penalty", ""),
    Row("frequency_penalty -3", asked(frequency_penalty=-3), 400, "invalid_value", "frequency_penalty", ""),
    Row("repetition_penalty 0", asked(repetition_penalty=0), 400, "invalid_value", "repetition_penalty", ""),
    Row("top_k -2", asked(top_k=-2), 400, "invalid_value", "top_k", ""),
    Row("min_p 2", asked(min_p=2), 400, "invalid_value", "min_p", ""),
    Row("stop of five", asked(stop=list("abcde")), 400, "invalid_value", "stop", ""),
    Row("stop empty", asked(stop=""), 400, "invalid_value", "stop", ""),
    Row("stop too long", asked(stop=["x" * 1_025]), 400, "invalid_value", "stop[0]", ""),
    Row("stop a number", asked(stop=7), 400, "invalid_type", "stop", ""),
    Row("a stop token of nobody", asked(stop_token_ids=[10**9]), 400, "token_out_of_range", "stop_token_ids[0]", "", 1),
    Row("a negative stop token", asked(stop_token_ids=[-1]), 400, "token_out_of_range", "stop_token_ids[0]", "", 1),
    Row("min_tokens above max_tokens", asked(min_tokens=3), 400, "invalid_value", "min_tokens", "", 1),
    Row("a bias of a word", asked(logit_bias={"a": 1}), 400, "invalid_value", "logit_bias", "expected a token id"),
    Row("a bias too strong", asked(logit_bias={"1": 101}), 400, "invalid_value", "logit_bias.1", "-100 to 100"),
    Row("a bias as a string", asked(logit_bias={"1": "1"}), 400, "invalid_type", "logit_bias.1", "-100 to 100"),
    Row("a bias of nobody", asked(logit_bias={"999999": 1}), 400, "token_out_of_range", "logit_bias.999999", "", 1),
    Row("a bias as a list", asked(logit_bias=[1]), 400, "invalid_type", "logit_bias", ""),
    Row("seed a string", asked(seed="1"), 400, "invalid_type", "seed", ""),
    Row("seed a float", asked(seed=0.5), 400, "invalid_type", "seed", ""),
    Row("stream a string", asked(stream="true"), 400, "invalid_type", "stream", "'true'"),
    Row("stream_options a string", asked(stream=True, stream_options="x"), 400, "invalid_type", "stream_options", ""),
    Row("logprobs 6", asked(logprobs=6), 400, "invalid_value", "logprobs", ""),
    Row("logprobs of a chat a number", said(logprobs=2), 400, "invalid_type", "logprobs", ""),
    Row("top_logprobs alone", said(top_logprobs=2), 400, "invalid_value", "top_logprobs", "needs logprobs: true"),
    Row("top_logprobs 21", said(logprobs=True, top_logprobs=21), 400, "invalid_value", "top_logprobs", ""),
    Row("a form of a word", said(response_format="json"), 400, "invalid_type", "response_format", ""),
    Row(
        "a form of nobody", said(response_format={"type": "xml"}), 400, "unsupported", "response_format.type", "'text'"
    ),
    Row(
        "a form without a schema",
        said(response_format={"type": "json_schema"}),
        *(400, "missing_field", "response_format.json_schema", "needs it"),
    ),
    Row(
        "a schema that is none",
        said(response_format=held({"type": "date"})),
        400,
        "invalid_value",
        "response_format.json_schema.schema.type",
        "'date'",
    ),
    Row(
        "a schema too deep", said(response_format=held(nested(40))), 400, "invalid_value", DEEP, "nested deeper than 32"
    ),
    Row(
        "a schema too large",
        said(response_format=held({"title": "x" * 70_000})),
        400,
        "invalid_value",
        "response_format.json_schema.schema",
        "at most 65536",
    ),
    Row(
        "a schema of itself",
        said(response_format=held({"$ref": "#"})),
        400,
        "invalid_value",
        "response_format.json_schema.schema",
        "leads back",
    ),
    Row(
        "a schema from elsewhere",
        said(response_format=held({"$ref": "http://x/y"})),
        400,
        "unsupported",
        "response_format.json_schema.schema.$ref",
        "expected #",
    ),
    Row("tools of no kind", said(tools=[{}]), 400, "missing_field", "tools[0].type", "has no"),
    Row(
        "tools of another kind",
        said(tools=[TOOL | {"type": "browser"}]),
        400,
        "unsupported",
        "tools[0].type",
        "only 'function'",
    ),
    Row("a tool twice", said(tools=[TOOL, TOOL]), 400, "invalid_value", "tools[1].function.name", "an earlier tool"),
    Row("129 tools", said(tools=[TOOL] * 129), 400, "invalid_value", "tools", "an array of 129 items"),
    Row(
        "a tool of nobody chosen",
        said(tools=[TOOL], tool_choice=NAMED),
        400,
        "invalid_value",
        "tool_choice.function.name",
        "none of the tools",
    ),
    Row("a call without tools", said(tool_choice="required"), 400, "invalid_value", "tool_choice", "no tools"),
    Row(
        "a choice that is none",
        said(tools=[TOOL], tool_choice="sometimes"),
        400,
        "unsupported",
        "tool_choice",
        "only 'none'",
    ),
    Row("tools of a completion", asked(tools=[TOOL]), 400, "unsupported", "tools", "tools is not served"),
    Row("metadata a string", asked(metadata="x"), 400, "invalid_type", "metadata", "a string of 1 characters"),
    Row(
        "transfer parameters",
        asked(kv_transfer_params={"a": 1}),
        400,
        "unknown_field",
        "kv_transfer_params",
        "not a field",
    ),
    Row("a field with a line end", asked(**{"a\r\nb": 1}), 400, "unknown_field", r"a\r\nb", "not a field"),
    Row("a field of 5 kB", asked(**{"a" * 5_000: 1}), 400, "unknown_field", "a" * 40, "aaa'…"),
]

ROWS = [*FRAMING, *HEADERS, *PATHS, *JSON, *FIELDS]


async def submitted(bus: Bus) -> int:
    info = await bus.stream_info(subjects.SUBMIT)
    assert info is not None
    count: int = info["state"]["last_seq"]
    return count


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_what_is_refused(stack: Stack, bus: Bus, row: Row) -> None:
    before = await submitted(bus)
    answer = await exchange(stack, row.sent)
    assert answer.headers["content-type"] == "application/json", answer
    error = answer.error
    assert (answer.status, error["code"], error["param"]) == (row.status, row.code, row.param), error
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert row.told in error["message"] and error["message"].isprintable() and len(error["message"]) < 400, error
    assert SECRET not in answer.body.decode()
    assert await submitted(bus) - before == row.submits
    assert (await exchange(stack, get("/v1/models"))).status == 200


# ---- what is legal, however odd


class Legal(NamedTuple):
    name: str
    sent: bytes
    status: int = 200


LEGAL = [
    Legal("chunks of one byte", spaced(GOOD)),
    Legal(
        "chunks with an extension and a trailer",
        chunked(end=b"%x;a=b\r\n%s\r\n0\r\nX-A: b\r\n\r\n" % (len(GOOD), GOOD)),
    ),
    Legal("HTTP/1.0", post(GOOD).replace(b"HTTP/1.1", b"HTTP/1.0")),
    Legal("HTTP/1.0 without a Host", line("GET /v1/models HTTP/1.0", host="")),
    Legal("an absolute URI", post(GOOD, path="http://elsewhere:1" + COMPLETIONS)),
    Legal("two slashes", post(GOOD, path="/" + COMPLETIONS)),
    Legal("a slash at the end", post(GOOD, path=COMPLETIONS + "/")),
    Legal("an encoded path", post(GOOD, path="/v1/%63ompletions")),
    Legal("a query nobody reads", post(GOOD, path=COMPLETIONS + "?a=b&c&=d&%ff")),
    Legal("line ends before a request", b"\r\n\r\n" + post(GOOD)),
    Legal("a body of a GET", line("GET /v1/models HTTP/1.1", "Content-Length: 5", body=b"hello")),
    Legal("a header of 60 kB", asked("X-A: " + "a" * 60_000)),
    Legal("1,000 headers", asked(*(f"X-{number}: 1" for number in range(1_000)))),
    Legal("a header of bytes over 0x7f", asked("X-A: \xff\xfe")),
    Legal(
        "another protocol, if there was one",
        asked("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA"),
    ),
    Legal("… in chunks", spaced(GOOD).replace(b"\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", 1)),
    Legal("a web socket, if there was one", get("/v1/models", "Connection: Upgrade", "Upgrade: websocket")),
    Legal("an expectation of nobody", asked("Expect: tea")),
    Legal("a key where none is needed", asked("Authorization: Basic sesame")),
    Legal("a trace that is none", asked("traceparent: 00-sesame-01")),
    Legal("a trace of zeros", asked(f"traceparent: 00-{'0' * 32}-{'0' * 16}-01")),
    Legal("an id over 0x7f", asked("X-Request-Id: \xff")),
    Legal("an odd key", asked("Idempotency-Key: * > a.b ../ %00 {}")),
    Legal("a deadline of an hour", asked("Pdq-Deadline: 3600")),
    Legal("OPTIONS", get("/v1/models", verb="OPTIONS"), 204),
    Legal("HEAD", get("/v1/models", verb="HEAD"), 405),
    Legal("blanks around JSON", post(b"\r\n\t " + GOOD + b"\n ")),
    Legal("a pair of surrogates", with_text(r'"user": "\ud83d\ude00\u0000"')),
    Legal("1e-400", with_text('"temperature": 1e-400')),
    Legal(
        "fields that are null", asked(stop=None, seed=None, n=None, stream=None, logit_bias=None, response_format=None)
    ),
    Legal("a float that is an integer", with_text('"seed": 7').replace(b'"temperature": 1', b'"temperature": 1.0')),
    Legal("metadata 100 deep", asked(metadata={"a": json.loads("[" * 100 + "]" * 100)})),
    Legal("seeds at the end of their range", asked(seed=2**63 - 1, n=2)),
    Legal("the whole context", asked(prompt=[1] * 4_094)),
    Legal("300 biases", asked(logit_bias={str(token): -100 for token in range(300)})),
    Legal("four stops", asked(stop=["\0", "\U0001f600" * 1_024, "\r\n", "*"])),
    Legal(
        "everything at its bound", asked(temperature=2, top_p=1e-9, top_k=-1, min_p=1, presence_penalty=-2, logprobs=5)
    ),
    Legal("parts", turn(content=[{"type": "text", "text": ""}, {"type": "text", "text": SECRET}])),
]


@pytest.mark.parametrize("row", LEGAL, ids=lambda row: row.name)
async def test_what_is_legal(stack: Stack, row: Legal) -> None:
    answer = await exchange(stack, row.sent)
    assert answer.status == row.status, answer
    if b"prompt" in row.sent and row.status == 200:
        usage, choices = json.loads(answer.body)["usage"], len(json.loads(answer.body)["choices"])
        assert usage["completion_tokens"] == 2 * choices, usage


ECHOED = [
    ("a-1.B_2", True),
    ("*", True),
    (">", True),
    ("a.b", True),
    ("a" * 129, False),
    ("a b", False),
    ("a" * 10_000, False),
]


@pytest.mark.parametrize(("sent", "echoed"), ECHOED)
async def test_a_callers_id_is_echoed_where_it_is_plain(stack: Stack, sent: str, echoed: bool) -> None:
    answer = await exchange(stack, asked(f"X-Request-Id: {sent}"))
    assert answer.status == 200 and answer.headers.get("x-request-id") == (sent if echoed else None)


# ---- what goes on in one connection


async def test_requests_one_after_another(stack: Stack) -> None:
    """Without waiting; with bodies after an upgrade that is not served, and refusals in between."""
    h2c = asked("Connection: Upgrade", "Upgrade: h2c")
    async with Raw(stack) as raw:
        await raw.send(get("/v1/models") + asked() + asked(n=0) + h2c + get("/v1/nothing") + h2c + get("/v1/models"))
        assert [(await raw.answer()).status for _ in range(7)] == [200, 200, 400, 200, 404, 200, 200]


async def test_the_body_after_an_upgrade_is_no_request(stack: Stack) -> None:
    hidden = get("/v1/models")
    async with Raw(stack) as raw:
        await raw.send(
            post(b"", "Connection: Upgrade", "Upgrade: x").replace(b"Length: 0", b"Length: %d" % len(hidden))
        )
        await asyncio.sleep(0.05)
        await raw.send(hidden)
        assert (await raw.answer()).error["code"] == "invalid_json"
        await raw.send(get("/v1/nothing"))
        assert (await raw.answer()).error["code"] == "not_found", "no answer was to what the body held"


async def test_a_body_that_waits_to_be_asked_for(stack: Stack) -> None:
    async with Raw(stack) as raw:
        head, _, body = asked("Expect: 100-continue").partition(b"\r\n\r\n")
        await raw.send(head + b"\r\n\r\n")
        assert (await raw.answer()).status == 100
        await raw.send(body)
        assert (await raw.answer()).status == 200


async def test_garbage_ends_a_connection_and_not_an_answer(stack: Stack) -> None:
    async with Raw(stack) as raw:
        await raw.send(get("/v1/models"))
        assert (await raw.answer()).status == 200
        await raw.send(b"sesame\r\n\r\n")
        assert (await raw.answer()).error["code"] == "invalid_request" and await raw.closed()
    async with Raw(stack) as raw:
        await raw.send(asked(stream=True, max_tokens=2_000, ignore_eos=True))
        assert (await raw.answer(body=False)).status == 200
        await raw.send(b"sesame\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            rest = await raw.reader.read()
        assert b"HTTP/1.1" not in rest.partition(b"[DONE]")[0]


@pytest.mark.parametrize("before", [False, True])
async def test_headers_that_drip_are_not_waited_for(stack: Stack, before: bool) -> None:
    """`before`: a request was served on the connection."""
    async with Raw(stack) as raw:
        if before:
            await raw.send(get("/v1/models"))
            assert (await raw.answer()).status == 200
        dripping = asyncio.create_task(drip(raw, b"GET /v1/models HTTP/1.1\r\nX-A: "))
        answer = await raw.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout") and await raw.closed()
        dripping.cancel()


async def test_a_body_that_drips_is_not_waited_for(stack: Stack) -> None:
    async with Raw(stack) as raw:
        dripping = asyncio.create_task(drip(raw, asked().partition(b"{")[0]))
        answer = await raw.answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        dripping.cancel()


async def drip(raw: Raw, begin: bytes) -> None:
    await raw.send(begin)
    while True:
        await raw.send(b" ")
        await asyncio.sleep(0.05)


async def test_a_connection_without_a_request_is_closed(stack: Stack) -> None:
    async with Raw(stack) as silent, Raw(stack) as nearly:
        await nearly.send(b"\r\n")
        assert await silent.closed() and await nearly.closed()


@pytest.mark.parametrize("left", [1, 20, len(asked()) - 5])
async def test_a_client_that_leaves_in_its_request_leaves_nothing(stack: Stack, bus: Bus, left: int) -> None:
    before = await submitted(bus)
    async with Raw(stack) as raw:
        await raw.send(asked()[:left])
        await asyncio.sleep(0.05)
    assert (await exchange(stack, get("/v1/models"))).status == 200
    assert await submitted(bus) == before


# ---- after all that


async def test_nothing_is_left_and_nothing_was_written_down(stack: Stack, bus: Bus) -> None:
    answer = await exchange(stack, asked())
    assert answer.status == 200
    client = Client(bus, "local")
    stored = await bus.read(subjects.LOG, "pdq.log.local.*.state", limit=10_000)
    requests = {subjects.parse_log(one.subject).request for one in stored}
    assert answer.headers["x-pdq-request"] in requests
    if len(requests) <= 40:
        pytest.skip("the tests before this one ran in another process, on another stack")
    gateway, worker = stack.services[2], stack.services[1]
    async with asyncio.timeout(WITHIN_S):
        while stack.metric(gateway, "pdq_gateway_open_streams") or stack.metric(worker, "pdq_worker_busy_slots"):
            await asyncio.sleep(0.05)
        for request in requests:
            while not (await read_all(client, request)).terminal:
                await asyncio.sleep(0.05)
    for name in (subjects.SUBMIT, subjects.PREFILL, subjects.DECODE):
        info = await bus.stream_info(name)
        assert info is not None and info["state"]["messages"] == 0, name
    text = gateway.get("/metrics")[1]
    assert 'status="499"' in text and 'status="500"' not in text
    assert len([one for one in text.splitlines() if one.startswith("pdq_gateway_requests_total")]) < 60
    assert gateway.get("/readyz")[0] == 200
    written = {
        path.name: path.read_text() for pattern in ("*.log", "*.jsonl") for path in stack.directory.glob(pattern)
    }
    written |= {f"metrics of {service.module}": service.get("/metrics")[1] for service in stack.services}
    assert sum(answer.headers["x-pdq-request"] in one for one in written.values()) >= 4
    for name, one in written.items():
        assert SECRET not in one, name
        assert "Traceback" not in one and "level=error" not in one and "level=warning" not in one, name
