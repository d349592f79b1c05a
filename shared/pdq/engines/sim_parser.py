"""The sim's parser: thoughts and calls in tags, as `sim_script` writes them. Its stand-in for vLLM's parsers."""

from __future__ import annotations

import re
from typing import Literal

from pdq.engines.base import Work
from pdq.engines.calls import Calls, joined
from pdq.engines.sim_model import StopStrings
from pdq.messages import CallDelta, Delta, FinishReason

Mode = Literal["content", "reasoning", "call"]

_TAGS: dict[Mode, dict[str, Mode]] = {
    "content": {"<think>": "reasoning", "<tool_call>": "call"},
    "reasoning": {"</think>": "content"},
    "call": {"</tool_call>": "content"},
}
_HEAD = re.compile(r'\{"name": "([^"]+)", "arguments": ')


class SimReading:
    """One answer: give it text as it comes. What it gives follows from the text, however it was cut."""

    def __init__(self, work: Work) -> None:
        self._calls = Calls(work)
        self._mode: Mode = "content"
        self._tags = StopStrings(tuple(_TAGS["content"]))
        self._number = -1
        self._call = ""
        self._told = 0
        self._before = Delta()

    def resume(self, text: str) -> None:
        """Read what was shown before; it counts with the next text."""
        self._before = self._read(text, final=False)

    def take(self, text: str, final: bool) -> Delta:
        before, self._before = self._before, Delta()
        return joined((before, self._read(text, final)))

    def reason(self, reason: FinishReason) -> FinishReason:
        """How it ended, once all is read."""
        return "tool_calls" if reason == "stop" and self._calls.whole else reason

    def _read(self, text: str, final: bool) -> Delta:
        made = [self._delta(*self._next(char)) for char in text]
        if final:
            made.append(self._delta(self._tags.held, ""))
        return joined(made)

    def _next(self, char: str) -> tuple[str, str]:
        """The text that is clear now, and the tag that ended with this character."""
        text = self._tags.held + char
        shown, found = self._tags.push(char, check=True, final=False)
        return shown, text[len(shown) :] if found else ""

    def _delta(self, shown: str, tag: str) -> Delta:
        mode = self._mode
        if mode == "call":
            delta = Delta(tool_calls=self._more(shown))
        else:
            delta = Delta(content=shown) if mode == "content" else Delta(reasoning=shown)
        if tag:
            self._enter(_TAGS[mode][tag])
        return delta

    def _enter(self, mode: Mode) -> None:
        self._mode = mode
        self._tags = StopStrings(tuple(_TAGS[mode]))
        if mode == "call":
            self._number, self._call, self._told = self._number + 1, "", 0

    def _more(self, text: str) -> tuple[CallDelta, ...]:
        """The call's last brace closes the call, and is none of its arguments: the newest character waits."""
        self._call += text
        head = _HEAD.match(self._call)
        if head is None:
            return ()
        arguments = self._call[head.end() : -1]
        more, self._told = arguments[self._told :], len(arguments)
        piece = self._calls.piece(self._number, head[1], more)
        return (piece,) if piece is not None else ()
