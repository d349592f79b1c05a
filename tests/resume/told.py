"""What the events of a stream say, put together as a client does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tests.sse import Frame

DONE = "[DONE]"


class Said(msgspec.Struct):
    """Of one choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = []
    """Name and arguments of each; not the id, which is the request's own."""
    logprobs: list[Any] = []
    ends: list[str] = []
    data: list[str] = []
    """Its chunks as they came."""

    @property
    def size(self) -> int:
        """Characters that were said."""
        return len(self.text) + len(self.reasoning) + sum(len(arguments) for _, arguments in self.calls)

    @property
    def answer(self) -> tuple[Any, ...]:
        """Equal for two answers to the same request, whatever their chunks are."""
        return self.text, self.reasoning, self.calls, self.logprobs, self.ends


class Told:
    """Of a stream, as far as it came."""

    def __init__(self, frames: Iterable[Frame] = ()) -> None:
        self.said: dict[int, Said] = {}
        self.usages: list[Any] = []
        for frame in frames:
            self.take(frame)

    @property
    def size(self) -> int:
        return sum(said.size for said in self.said.values())

    def take(self, frame: Frame) -> None:
        if frame.data == DONE:
            return
        chunk = frame.json
        if not chunk["choices"]:
            self.usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            said = self.said.setdefault(choice["index"], Said())
            said.data.append(frame.data)
            _add(said, choice)


def _add(said: Said, choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {})
    said.text += choice.get("text") or delta.get("content") or ""
    said.reasoning += delta.get("reasoning", "")
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(said.calls):
            said.calls.append([call["function"]["name"], ""])
        said.calls[call["index"]][1] += call["function"].get("arguments", "")
    said.logprobs += _entries(choice.get("logprobs"))
    said.ends += [choice["finish_reason"]] if choice["finish_reason"] else []


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """One for each token, of either shape."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return list(zip(*(logprobs[name] for name in names), strict=True))
