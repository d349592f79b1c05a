"""Server-sent events, read as a client would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx


class Frame(NamedTuple):
    """One event, as its bytes and as what they say. `comment`: a line that is none. `type`: its `event`."""

    raw: bytes
    id: str
    data: str
    comment: bool = False
    type: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def parse(raw: bytes) -> Frame:
    id, data, type = "", [], ""
    for line in raw.decode().splitlines():
        name, _, value = line.partition(": ")
        assert name in ("id", "data", "event", ""), line
        id = value if name == "id" else id
        type = value if name == "event" else type
        data += [value] if name == "data" else []
    return Frame(raw, id, "\n".join(data), comment=raw.startswith(b":"), type=type)


def frames(body: bytes) -> list[Frame]:
    """Of a whole stream."""
    assert body.endswith(b"\n\n"), body[-100:]
    return [parse(raw) for raw in body[:-2].split(b"\n\n")]


async def read(response: httpx.Response) -> AsyncIterator[Frame]:
    """As they come; what was begun and not completed is left out."""
    rest = b""
    async for piece in response.aiter_raw():
        *whole, rest = (rest + piece).split(b"\n\n")
        for raw in whole:
            yield parse(raw)


def text_of(found: list[Frame], index: int = 0) -> str:
    """The text of one choice, of either shape."""
    parts = []
    for frame in found:
        for choice in frame.json["choices"] if frame.data not in ("", "[DONE]") else ():
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(parts)
