"""What came of each request: kept while a load runs, written as JSON lines, and all that metrics are made of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from pdq.errors import Rejected

INTERRUPTED = "interrupted"
"""The error of what ran when the load was stopped: it is no failure."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times are seconds; `planned_s`, `sent_s` and `end_s` count from the beginning of the load."""

    planned_s: float
    sent_s: float
    end_s: float
    """Its last chunk, or its failure."""
    input_tokens: int
    """As the server counted them, else as planned."""
    output_tokens: int = 0
    """As the server counted them, else by the chunks."""
    chunks: tuple[tuple[float, int], ...] = ()
    """When text came, after it was sent, and how many tokens that was; 0: not known."""
    error: str = ""
    """A code; empty: the whole answer came."""
    message: str = ""
    request: str = ""
    warm_up: bool = False
    planned_input_tokens: int = 0
    planned_output_tokens: int = 0
    held: bool = False
    """It was sent late, because as many ran as may."""

    @property
    def succeeded(self) -> bool:
        return not self.error


def write(path: Path, records: Iterable[Record]) -> None:
    """JSON lines, in the order in which they were sent. Raises OSError."""
    with open(path, "wb") as out:
        for record in sorted(records, key=lambda record: record.planned_s):
            out.write(msgspec.json.encode(record) + b"\n")


def read(path: Path) -> list[Record]:
    """Raises OSError, and Rejected naming the line."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=Record))
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise Rejected(f"{path}, line {number}: {exc}", code="usage", param="FILE") from None
    return found
