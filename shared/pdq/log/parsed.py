"""An answer as the model's parsers see it: its deltas, joined. Pure."""

from __future__ import annotations

import msgspec

from pdq.messages import CallDelta, Delta


class Call(msgspec.Struct):
    """A tool call so far; `arguments` is the text of a JSON object once it is whole."""

    id: str
    name: str
    arguments: str = ""


class Parsed:
    """Add deltas in order: each field grows at its end, and nothing that was added changes."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []

    def add(self, delta: Delta) -> None:
        """Raises ValueError for a piece of a call whose beginning is missing."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.index == len(self.calls):
                self.calls.append(Call(piece.id, piece.name))
            elif piece.index > len(self.calls):
                raise ValueError(f"call {piece.index} comes before call {len(self.calls)}")
            self.calls[piece.index].arguments += piece.arguments

    def since(self, earlier: Parsed) -> Delta:
        """What this has beyond `earlier`; nothing where `earlier` has more. Raises ValueError where they differ."""
        calls: list[CallDelta] = []
        for index, call in enumerate(self.calls):
            before = earlier.calls[index] if index < len(earlier.calls) else None
            if before is not None and (before.id, before.name) != (call.id, call.name):
                raise ValueError(f"call {index} is another")
            more = _beyond(call.arguments, before.arguments if before else "")
            if before is None:
                calls.append(CallDelta(index=index, id=call.id, name=call.name, arguments=more))
            elif more:
                calls.append(CallDelta(index=index, arguments=more))
        return Delta(
            content=_beyond(self.content, earlier.content),
            reasoning=_beyond(self.reasoning, earlier.reasoning),
            tool_calls=tuple(calls),
        )


def _beyond(text: str, earlier: str) -> str:
    if not (text.startswith(earlier) or earlier.startswith(text)):
        raise ValueError("a text has another beginning")
    return text[len(earlier) :]
