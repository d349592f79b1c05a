"""How an answer is named over HTTP, and the pdq requests that it is made of.

An answer of one choice is one pdq request. Of several, each choice is one: the first has the name itself, the others
add their number. The id that clients see tells how many there are, as the gateway remembers nothing:
`chatcmpl-r-1f…` has one, `chatcmpl-r-1f…-n3` three: `r-1f…`, `r-1f…-1` and `r-1f…-2`.
"""

from __future__ import annotations

import re

import msgspec
from pdq import subjects

MOST_CHOICES = 8
_COUNTED = re.compile(rf"(.+)-n([2-{MOST_CHOICES}])\Z")
_PLACE = re.compile(rf"([0-9]{{1,19}}(?:\.[0-9]{{1,19}}){{0,{MOST_CHOICES - 1}}})(\.end)?\Z")


class Name(msgspec.Struct, frozen=True):
    request: str
    """Of the first choice."""
    choices: int = 1

    @property
    def requests(self) -> tuple[str, ...]:
        return (self.request, *(f"{self.request}-{index}" for index in range(1, self.choices)))

    def public(self, prefix: str) -> str:
        """`prefix`: `chatcmpl` or `cmpl`."""
        count = f"-n{self.choices}" if self.choices > 1 else ""
        return f"{prefix}-{self.request}{count}"

    @classmethod
    def parse(cls, public: str, prefix: str) -> Name | None:
        """The inverse of `public`; None for what cannot be the id of an answer."""
        if not public.startswith(f"{prefix}-"):
            return None
        request = public.removeprefix(f"{prefix}-")
        counted = _COUNTED.match(request)
        name = cls(counted[1], int(counted[2])) if counted else cls(request)
        return name if all(map(subjects.is_token, name.requests)) else None


class Place(msgspec.Struct, frozen=True):
    """A place in a stream, as SSE's `id`: per choice the log's sequence of the last event, then whether the usage was
    told. `17`, `17.23` (two choices), `17.23.end`."""

    seqs: tuple[int, ...]
    end: bool = False

    def __str__(self) -> str:
        return ".".join(map(str, self.seqs)) + (".end" if self.end else "")

    @classmethod
    def parse(cls, text: str) -> Place | None:
        found = _PLACE.match(text)
        return cls(tuple(map(int, found[1].split("."))), bool(found[2])) if found else None
