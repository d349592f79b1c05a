"""The output of a response as the log's pieces make it: its items, one after the other, and the events of each. Pure.

An item begins with the first of its text that is not white space, and ends where another begins: white space between
calls, or around thoughts, is no message. The log does not tell the order within one record; what goes on with the item
at hand comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from pdq.api.responses import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemEvent,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    StreamEvent,
    TextDelta,
    TextDone,
    TextLogprob,
    text_logprobs,
)
from pdq.log import Piece
from pdq.messages import CallDelta

Kind = Literal["message", "reasoning"]
Events = Iterator[StreamEvent]


class _Text:
    """A message or reasoning so far."""

    def __init__(self, kind: Kind, request: str, index: int) -> None:
        self.kind = kind
        self.id = f"{'msg' if kind == 'message' else 'rs'}_{request}_{index}"
        self.index = index
        self.texts: list[str] = []
        self.logprobs: list[TextLogprob] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def shown(self, status: ItemStatus, begun: bool = True) -> OutputItem:
        if self.kind == "message":
            return OutputMessage(id=self.id, status=status, content=(self._text_part(),) if begun else ())
        return OutputReasoning(id=self.id, status=status, content=(ReasoningText(text=self.text),) if begun else ())

    def part(self) -> OutputText | ReasoningText:
        return self._text_part() if self.kind == "message" else ReasoningText(text=self.text)

    def _text_part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=tuple(self.logprobs))


class _Call:
    """A call so far."""

    def __init__(self, call: CallDelta, request: str, index: int) -> None:
        self.id = f"fc_{request}_{index}"
        self.index = index
        self.call_id = call.id
        self.name = call.name
        self.arguments = ""

    def shown(self, status: ItemStatus) -> OutputItem:
        return OutputCall(id=self.id, status=status, call_id=self.call_id, name=self.name, arguments=self.arguments)


class Items:
    """`number`: gives each event its own."""

    def __init__(self, request: str, number: Callable[[], int]) -> None:
        self.num_reasoning_tokens = 0
        self._request = request
        self._number = number
        self._items: list[_Text | _Call] = []
        self._open: _Text | _Call | None = None
        self._calls: dict[int, _Call] = {}
        self._white: dict[Kind, str] = {"message": "", "reasoning": ""}
        self._logprobs: tuple[TextLogprob, ...] = ()
        """Of a message, before there is text that they could come with."""
        self._cut = False

    def output(self) -> tuple[OutputItem, ...]:
        """All items, as far as they are."""
        open_status: ItemStatus = "incomplete" if self._cut else "in_progress"
        return tuple(item.shown(open_status if item is self._open else "completed") for item in self._items)

    def add(self, piece: Piece) -> Events:
        delta = piece.delta
        if delta is None:
            yield from self._add_text("message", piece.text, text_logprobs(piece.logprobs or ()))
            return
        self.num_reasoning_tokens += len(piece.ids) if delta.reasoning else 0
        texts: list[tuple[Kind, str]] = [("reasoning", delta.reasoning), ("message", delta.content)]
        if isinstance(self._open, _Text) and self._open.kind == "message":
            texts.reverse()
        at_hand = [call for call in delta.tool_calls if self._calls.get(call.index) is self._open is not None]
        for call in at_hand:
            yield from self._add_call(call)
        for kind, text in texts:
            logprobs = text_logprobs(piece.logprobs or ()) if kind == "message" and text else ()
            yield from self._add_text(kind, text, logprobs)
        for call in delta.tool_calls:
            if call not in at_hand:
                yield from self._add_call(call)

    def end(self, cut: bool) -> Events:
        """No more comes. `cut`: the answer is not whole."""
        if not self._items and not cut:
            yield from self._begin_text("message")
        self._cut = cut
        yield from self._close("incomplete" if cut else "completed")

    # ---- messages and reasoning

    def _add_text(self, kind: Kind, text: str, logprobs: tuple[TextLogprob, ...]) -> Events:
        self._logprobs += logprobs
        if not (isinstance(self._open, _Text) and self._open.kind == kind):
            self._white[kind] += text
            if not self._white[kind].strip():
                return
            yield from self._begin_text(kind)
        elif text:
            yield from self._more(text)

    def _begin_text(self, kind: Kind) -> Events:
        text = self._white[kind]
        yield from self._close("completed")
        item = _Text(kind, self._request, len(self._items))
        yield from self._added(item, item.shown("in_progress", begun=False))
        yield self._part(item, "response.content_part.added")
        if text:
            yield from self._more(text)

    def _more(self, text: str) -> Events:
        item = self._open
        assert isinstance(item, _Text)
        item.texts.append(text)
        if item.kind == "reasoning":
            yield ReasoningDelta(sequence_number=self._number(), item_id=item.id, output_index=item.index, delta=text)
            return
        logprobs, self._logprobs = self._logprobs, ()
        item.logprobs += logprobs
        yield TextDelta(
            sequence_number=self._number(), item_id=item.id, output_index=item.index, delta=text, logprobs=logprobs
        )

    # ---- calls

    def _add_call(self, more: CallDelta) -> Events:
        """A call that had ended goes on where it was, and ends anew."""
        call = self._calls.get(more.index)
        if call is None:
            yield from self._close("completed")
            call = self._calls[more.index] = _Call(more, self._request, len(self._items))
            yield from self._added(call, call.shown("in_progress"))
        elif call is not self._open:
            yield from self._close("completed")
            self._open = call
        if more.arguments:
            call.arguments += more.arguments
            yield ArgumentsDelta(
                sequence_number=self._number(), item_id=call.id, output_index=call.index, delta=more.arguments
            )

    # ---- items

    def _added(self, item: _Text | _Call, shown: OutputItem) -> Events:
        self._items.append(item)
        self._open = item
        self._white = {"message": "", "reasoning": ""}
        if not (isinstance(item, _Text) and item.kind == "message"):
            self._logprobs = ()
        yield self._item(item, "response.output_item.added", shown)

    def _close(self, status: ItemStatus) -> Events:
        item = self._open
        if item is None:
            return
        if isinstance(item, _Call):
            yield ArgumentsDone(
                sequence_number=self._number(),
                item_id=item.id,
                output_index=item.index,
                name=item.name,
                arguments=item.arguments,
            )
        else:
            yield from self._text_done(item)
        yield self._item(item, "response.output_item.done", item.shown(status))
        self._open = item if status == "incomplete" else None

    def _text_done(self, item: _Text) -> Events:
        at: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if item.kind == "reasoning":
            yield ReasoningDone(sequence_number=self._number(), text=item.text, **at)
        else:
            logprobs, self._logprobs = self._logprobs, ()
            item.logprobs += logprobs
            yield TextDone(sequence_number=self._number(), text=item.text, logprobs=tuple(item.logprobs), **at)
        yield self._part(item, "response.content_part.done")

    def _part(
        self, item: _Text, type: Literal["response.content_part.added", "response.content_part.done"]
    ) -> PartEvent:
        return PartEvent(
            type=type, sequence_number=self._number(), item_id=item.id, output_index=item.index, part=item.part()
        )

    def _item(
        self,
        item: _Text | _Call,
        type: Literal["response.output_item.added", "response.output_item.done"],
        shown: OutputItem,
    ) -> ItemEvent:
        return ItemEvent(type=type, sequence_number=self._number(), output_index=item.index, item=shown)
