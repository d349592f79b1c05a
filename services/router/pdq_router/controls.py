"""Control tokens in what people write are text: found before the template is filled, and tokenised as characters.

A text is marked where it holds a control token's characters, the template is filled with the marked text, and what
comes out is split at the marks. So the template sees the text as it is, but for those few characters.

In tools and their calls a part of a control token is marked too, at either end of a string: a template may put it next
to its own characters, or to another string (`<` and a parameter named `|im_end|`). Messages stand between whole control
tokens, and keep the ids that the library itself gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MARK = "\ue000"
"""A private-use character. In a text it is a literal like any control token, so it cannot forge a mark."""
_MARKED = re.compile(f"{_MARK}([0-9]+){_MARK}")

SHORTEST_PART = 2
"""Of a control token, at a string's end. A single `<` there is common, and the rest of the token would be missing."""


class Guard:
    """`controls`: the strings of a model's control tokens. Marks hold until `split`, in the same Guard."""

    def __init__(self, controls: Sequence[str]) -> None:
        literals = [_MARK, *controls]
        self._beginnings = {text[:size] for text in controls for size in range(SHORTEST_PART, len(text))}
        self._ends = {text[-size:] for text in controls for size in range(SHORTEST_PART, len(text))}
        self._cores = {core for text in controls for core in _cores(text)}
        self._longest = max(map(len, controls), default=0)
        self._texts = list(dict.fromkeys([*literals, *self._beginnings, *self._ends, *self._cores]))
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._literal = re.compile(any_of(literals))

    def mark(self, text: str) -> str:
        """A message's text."""
        return self._literal.sub(self._marked, text)

    def mark_all(self, value: Any) -> Any:
        """Tools, or calls of them: every string within, names of fields included."""
        if isinstance(value, str):
            return self._mark_ends(value)
        if isinstance(value, Mapping):
            return {self._mark_ends(name): self.mark_all(each) for name, each in value.items()}
        return [self.mark_all(each) for each in value] if isinstance(value, list) else value

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """The pieces of a filled template, each with whether it is text only."""
        for index, piece in enumerate(_MARKED.split(rendered)):
            # Pieces alternate: the template with marked text, then the number of what was marked.
            yield (self._texts[int(piece)], True) if index % 2 else (piece, False)

    def _marked(self, found: re.Match[str]) -> str:
        return self._mark_of(found[0])

    def _mark_of(self, text: str) -> str:
        return f"{_MARK}{self._numbers[text]}{_MARK}"

    def _mark_ends(self, text: str) -> str:
        if text in self._cores:
            return self._mark_of(text)
        first, last = self._end(text), self._beginning(text)
        if first + last > len(text):
            last = 0
        head, middle, tail = text[:first], text[first : len(text) - last], text[len(text) - last :]
        return "".join([head and self._mark_of(head), self.mark(middle), tail and self._mark_of(tail)])

    def _end(self, text: str) -> int:
        """How many characters the text begins with that are the end of a control token."""
        sizes = range(min(len(text), self._longest), SHORTEST_PART - 1, -1)
        return next((size for size in sizes if text[:size] in self._ends), 0)

    def _beginning(self, text: str) -> int:
        sizes = range(min(len(text), self._longest), SHORTEST_PART - 1, -1)
        return next((size for size in sizes if text[-size:] in self._beginnings), 0)


def _cores(control: str) -> Iterator[str]:
    """Inner parts of a control token that hold all of its letters: a template may have the brackets around."""
    word = re.search(r"\w.*\w|\w", control)
    if word is None:
        return
    for begin in range(1, word.start() + 1):
        for end in range(word.end(), len(control)):
            yield control[begin:end]


def any_of(texts: Sequence[str]) -> str:
    """A regular expression for the longest of `texts` at a place. Common beginnings are shared: a model may have
    a thousand control tokens, and tried one by one they make a text of "<<<<" take seconds with the GIL held."""
    tails: dict[str, list[str]] = {}
    for text in texts:
        tails.setdefault(text[:1], []).append(text[1:])
    may_end = tails.pop("", None) is not None
    branches = [re.escape(head) + any_of(rest) for head, rest in tails.items()]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' * may_end}"
