"""One request's run inside an engine: what the connector told of it, and what follows from that."""

from __future__ import annotations

import asyncio

from pdq.engines.base import Phase, Work
from pdq.engines.reports import Loaded, Looked, Report, Stored
from pdq.kv.where import Served, TierName

Attributes = dict[str, str | int | float | bool]


class Run:
    """Collects the reports of one request. `id` is its name inside the engine."""

    def __init__(self, id: str, work: Work) -> None:
        self.id = id
        self.work = work
        self.aborted = False
        self.looked: Looked | None = None
        self.loaded: Loaded | None = None
        self._stores: list[Stored] = []
        self._changed = asyncio.Event()

    def hear(self, report: Report) -> None:
        match report:
            case Looked() if self.loaded is None:  # a preempted request is looked up again: the first load counts
                self.looked = report
            case Loaded() if self.loaded is None:
                self.loaded = report
            case Stored():
                self._stores.append(report)
        self._changed.set()

    @property
    def local_tokens(self) -> int:
        return self.looked.local_tokens if self.looked else 0

    @property
    def loaded_tokens(self) -> int:
        if self.looked is None or self.loaded is None or not self.loaded.ok:
            return 0
        return self.looked.external_tokens

    @property
    def stored_tokens(self) -> int:
        """Tokens from the prompt's begin that the tier had or has stored, without a gap."""
        end = self.looked.tier_tokens if self.looked else 0
        for store in sorted(self._stores, key=lambda store: store.first):
            if store.ok and store.first <= end:
                end = max(end, store.end)
        return end

    @property
    def lookup_s(self) -> float:
        """How long the tiers took to say what they hold; 0 where they were not asked."""
        return (self.looked.end_ns - self.looked.start_ns) / 1e9 if self.looked else 0.0

    @property
    def stores(self) -> bool:
        """Whether anything of the prompt is new to the tier."""
        return bool(self._stores)

    @property
    def store_failed(self) -> bool:
        return any(not store.ok for store in self._stores)

    async def wait_stored(self, tokens: int, timeout_s: float) -> str:
        """Wait until `tokens` are stored. Returns the cause when they are not: `store_failed` or `store_late`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.stored_tokens < tokens:
                    if self.store_failed:
                        return "store_failed"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return "store_late"
        return ""

    def kv_phases(self, bytes_per_token: int, served: Served | None) -> list[Phase]:
        """`kv.lookup`, and `kv.load` where there was one. `served`: which tier it came from, where that is known."""
        phases = []
        if self.looked:
            found: Attributes = {"pdq.kv.tokens": self.looked.tier_tokens, "pdq.kv.local_tokens": self.local_tokens}
            phases.append(_phase("kv.lookup", self.looked, found))
        if self.loaded:
            moved: Attributes = {
                "pdq.kv.tokens": self.loaded_tokens,
                "pdq.kv.bytes": self.loaded_tokens * bytes_per_token,
            }
            if served:
                moved |= {"pdq.kv.tier": served.tier, "pdq.kv.near_tokens": served.near_tokens}
            phases.append(_phase("kv.load", self.loaded, moved))
        return phases

    def store_phase(self, end_ns: int, tokens: int, bytes_per_token: int, tier: TierName, cause: str) -> Phase | None:
        """`kv.store`, from the first store's begin: with chunked prefill it overlaps `engine.prefill`.

        tier: where the tokens were confirmed.
        """
        if not self._stores:
            return None
        start_ns = min(store.start_ns for store in self._stores)
        attributes: Attributes = {
            "pdq.kv.tokens": tokens,
            "pdq.kv.bytes": tokens * bytes_per_token,
            "pdq.kv.transfer_ms": sum(store.end_ns - store.start_ns for store in self._stores) / 1e6,
        }
        attributes |= {"pdq.kv.cause": cause} if cause else {"pdq.kv.tier": tier}
        return Phase(name="kv.store", start_ns=start_ns, end_ns=max(start_ns, end_ns), attributes=attributes)


def _phase(name: str, report: Looked | Loaded, attributes: Attributes) -> Phase:
    return Phase(name=name, start_ns=report.start_ns, end_ns=report.end_ns, attributes=attributes)
