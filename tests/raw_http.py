"""HTTP byte by byte: requests as no client library would send them, and their answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from tests.stack import MODEL, Stack

SECRET = "sesame"
"""What a client wrote: in no refusal, log, span or metric."""
WITHIN_S = 30.0

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


class Raw:
    """A connection of bytes."""

    def __init__(self, stack: Stack) -> None:
        self._port = int(
            next(one for one in stack.services if one.module == "pdq_gateway").environment["PDQ_GATEWAY_PORT"]
        )

    async def __aenter__(self) -> Raw:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bool = True) -> Answer:
        """The next one. `body`: whether one follows its head."""
        async with asyncio.timeout(WITHIN_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
            size = int(headers.get("content-length", "0")) if body else 0
            return Answer(int(head[0].split()[1]), headers, await self.reader.readexactly(size))

    async def closed(self) -> bool:
        async with asyncio.timeout(WITHIN_S):
            return await self.reader.read() == b""


async def exchange(stack: Stack, data: bytes) -> Answer:
    async with Raw(stack) as raw:
        await raw.send(data)
        return await raw.answer(body=not data.startswith(b"HEAD "))


def line(text: str, *headers: str, body: bytes = b"", host: str = "Host: x") -> bytes:
    head = [text, *([host] if host else []), *headers]
    return "".join(f"{one}\r\n" for one in head).encode("latin-1") + b"\r\n" + body


def sized(body: bytes) -> str:
    return f"Content-Length: {len(body)}"


def post(body: bytes, *headers: str, path: str = COMPLETIONS) -> bytes:
    return line(f"POST {path} HTTP/1.1", "Content-Type: application/json", sized(body), *headers, body=body)


def get(path: str, *headers: str, verb: str = "GET") -> bytes:
    return line(f"{verb} {path} HTTP/1.1", *headers)


def dumped(asked: dict[str, Any], fields: dict[str, Any]) -> bytes:
    return json.dumps({name: value for name, value in (asked | fields).items() if value != "absent"}).encode()


def completion(**fields: Any) -> bytes:
    return dumped({"model": MODEL, "prompt": SECRET, "max_tokens": 2, "ignore_eos": True}, fields)


def chat(**fields: Any) -> bytes:
    return dumped({"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}, fields)


def said(*headers: str, **fields: Any) -> bytes:
    return post(chat(**fields), *headers, path=CHAT)


def asked(*headers: str, **fields: Any) -> bytes:
    return post(completion(**fields), *headers)


def turn(**fields: Any) -> bytes:
    """A chat of one message."""
    return said(messages=[dumped_turn(fields)])


def dumped_turn(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ({"role": "user", "content": SECRET} | fields).items() if value != "absent"}


def with_text(text: str) -> bytes:
    """A completion with some JSON that no encoder writes."""
    return post(completion()[:-1] + f", {text}}}".encode())


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end
    return line(f"POST {COMPLETIONS} HTTP/1.1", "Transfer-Encoding: chunked", body=body)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def held(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def spaced(body: bytes, size: int = 1) -> bytes:
    return chunked(*(body[at : at + size] for at in range(0, len(body), size)))
