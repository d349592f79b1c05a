"""The tool calls of one answer, as deltas: numbered without gaps, named after the request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from pdq.engines.base import Work
from pdq.messages import CallDelta, Delta

ID_CHARS = 24
MISTRAL_ID_CHARS = 9
"""What Mistral's chat templates accept, and its parser makes."""


class Calls:
    """Give it what a parser finds of each call; the first piece that it gives of a call has its name and id."""

    def __init__(self, work: Work) -> None:
        tools = work.sampling.tools
        # The attempt is part of a work's name, and must not be part of a call's.
        self._request = work.request.rsplit(".d", 1)[0]
        self._most = 1 if tools is not None and not tools.parallel else None
        self._places: dict[int, int] = {}
        self._arguments: list[str] = []
        self._early: dict[int, str] = {}

    @property
    def whole(self) -> bool:
        """There is a call, and the arguments of each are a JSON object."""
        return bool(self._arguments) and all(map(_is_object, self._arguments))

    def piece(self, number: int, name: str, arguments: str, id: str = "") -> CallDelta | None:
        """More of call `number` (the parser's). None: nothing to show, as of a second call where one is the most."""
        if number in self._places:
            index = self._places[number]
            self._arguments[index] += arguments
            return CallDelta(index=index, arguments=arguments) if arguments else None
        arguments = self._early.pop(number, "") + arguments
        if not name:
            self._early[number] = arguments
            return None
        if len(self._arguments) == self._most:
            return None
        index = self._places[number] = len(self._arguments)
        self._arguments.append(arguments)
        return CallDelta(index=index, id=self._id(index, id), name=name, arguments=arguments)

    def _id(self, index: int, given: str) -> str:
        """Fixed, where vLLM's is random. One that says something (Kimi's `functions.<name>:<number>`) stays."""
        if given.startswith("functions."):
            return given
        digest = hashlib.sha256(f"{self._request}:{index}".encode()).hexdigest()
        return digest[:MISTRAL_ID_CHARS] if len(given) == MISTRAL_ID_CHARS else f"call_{digest[:ID_CHARS]}"


def joined(deltas: Iterable[Delta]) -> Delta:
    """Deltas that follow one another as one."""
    content, reasoning, calls = "", "", list[CallDelta]()
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        calls += delta.tool_calls
    return Delta(content=content, reasoning=reasoning, tool_calls=tuple(calls))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
