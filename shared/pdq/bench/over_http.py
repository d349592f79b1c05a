"""Any OpenAI endpoint as a target: streamed answers over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec

from pdq.bench.target import Api, Ask, Failed, Hearing
from pdq.errors import Unavailable

PATHS: Mapping[Api, str] = {"completions": "/completions", "chat": "/chat/completions"}
CONNECT_TIMEOUT_S = 10.0
MOST_ERROR_BYTES = 1 << 16
TOLD_CHARS = 300


NOTHING = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = NOTHING

    @property
    def says(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning) or self.tool_calls != NOTHING


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def says(self) -> bool:
        return bool(self.text) or (self.delta is not None and self.delta.says)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = NOTHING


_decode = msgspec.json.Decoder(_Chunk).decode


@contextlib.asynccontextmanager
async def session(headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientSession]:
    """Connections to an endpoint, as many as are wanted."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as made:
        yield made


async def first_model(http: aiohttp.ClientSession, url: str) -> str:
    """The id of the first model that an endpoint lists. Raises Unavailable, or Failed."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S), http.get(f"{url}/models") as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise Unavailable(f"{url} does not answer: {exc or 'it took too long'}") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise Failed("not_an_endpoint", f"{url}/models lists no model: name one with --model") from exc


class OverHttp:
    """`url`: up to and including `/v1`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, api: Api) -> None:
        self.api = api
        self.model = model
        self._http = http
        self._url = url + PATHS[api]

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        """As `Target.ask`. Tokens are counted by the server's `usage`; leaving ends the request."""
        try:
            async with self._http.post(self._url, data=ask.body) as answer:
                hearing.request = answer.headers.get("x-pdq-request", "")
                if answer.status != 200:
                    raise await _refusal(answer)
                await _hear(answer, hearing)
        except aiohttp.ClientError as exc:
            raise Failed("connection", str(exc) or type(exc).__name__) from exc


async def _hear(answer: aiohttp.ClientResponse, hearing: Hearing) -> None:
    """Take a stream of server-sent events to its end. Raises Failed."""
    rest = b""
    async for data in answer.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            if (event := line[5:].strip()) == b"[DONE]":
                return
            _take(event, hearing)
    raise Failed("incomplete", "the stream broke off before the end of the answer")


def _take(event: bytes, hearing: Hearing) -> None:
    try:
        chunk = _decode(event)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise Failed("not_an_endpoint", f"an event is not a chunk of an answer: {exc}") from None
    if chunk.error != NOTHING:
        raise _failed(bytes(chunk.error), "stream_error")
    if any(choice.says for choice in chunk.choices):
        hearing.chunk()
    elif chunk.choices and hearing.chunks:
        hearing.end()
    if chunk.usage is not None:
        hearing.usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)


async def _refusal(answer: aiohttp.ClientResponse) -> Failed:
    body = await answer.content.read(MOST_ERROR_BYTES)
    with contextlib.suppress(msgspec.MsgspecError):
        body = bytes(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("error", body))
    return _failed(body, f"http_{answer.status}")


def _failed(error: bytes, code: str) -> Failed:
    """Of OpenAI's error object; `code`: where it has none."""
    told: dict[str, Any] = {}
    with contextlib.suppress(msgspec.MsgspecError):
        told = msgspec.json.decode(error, type=dict[str, Any])
    found = told.get("code")
    message = str(told.get("message") or error.decode("utf-8", "replace"))
    return Failed(found if isinstance(found, str) and found else code, message[:TOLD_CHARS])
