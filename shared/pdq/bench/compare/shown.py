"""Who is told how far a comparison is."""

from __future__ import annotations

from typing import Protocol

from pdq.bench.records import Record


class Shown(Protocol):
    """A bar, or lines."""

    def doing(self, text: str) -> None: ...

    def ended(self, record: Record) -> None: ...

    def skipped(self, num_requests: int) -> None: ...

    def say(self, text: str) -> None: ...
