"""What a worker's work costs, measured from the phases that its engine reports: what an order is decided by."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pdq.engines.base import Phase
from pdq.messages import Costs

WEIGHT = 0.1
"""Least share of the newest measurement in a mean."""
FORGET_S = 600.0
"""A measurement that is so old says nothing of now: what is not known is tried again, and measured."""
LEAST_S = 1e-6


class CostMeter:
    """One stage of one worker. Work on less than a chunk is not measured: its cost is not that of its tokens."""

    def __init__(self, chunk_tokens: int, kv_bytes_per_token: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._bytes_per_token = kv_bytes_per_token
        self._computed, self._stored, self._loaded = _Rate(), _Rate(), _Rate()

    def saw(self, phases: tuple[Phase, ...], prompt_tokens: int) -> None:
        """Take one request's phases into account; `prompt_tokens` is its whole prompt."""
        by_name = {phase.name: phase for phase in phases}
        load, store = by_name.get("kv.load"), by_name.get("kv.store")
        compute = by_name.get("engine.prefill") or by_name.get("engine.decode")
        if compute is not None:
            had = _number(load, "pdq.kv.tokens") + _number(by_name.get("kv.lookup"), "pdq.kv.local_tokens")
            if prompt_tokens - had >= self._chunk_tokens:
                self._computed.saw(prompt_tokens - had, _prompt_s(compute))
        if load is not None and (moved := _number(load, "pdq.kv.bytes")):
            self._loaded.saw(moved, load.duration_ms / 1e3)
        if store is not None and compute is not None and (moved := _number(store, "pdq.kv.bytes")):
            # A store may begin while the prompt is computed: what counts is what it adds.
            self._stored.saw(moved, (store.end_ns - max(store.start_ns, compute.end_ns)) / 1e9)

    def costs(self) -> Costs:
        """The means so far."""
        return Costs(
            prompt_tokens_s=self._computed.per_s,
            store_bytes_s=self._stored.per_s,
            load_bytes_s=self._loaded.per_s,
            kv_bytes_per_token=self._bytes_per_token,
        )


class _Rate:
    """Amount by seconds, each an exponentially weighted mean: long work counts more than short work."""

    def __init__(self) -> None:
        self._amount = self._seconds = self._at = 0.0
        self._count = 0

    def saw(self, amount: float, seconds: float) -> None:
        self._at, self._count = time.monotonic(), self._count + 1
        weight = max(WEIGHT, 1 / self._count)
        self._amount += (amount - self._amount) * weight
        self._seconds += (max(seconds, LEAST_S) - self._seconds) * weight

    @property
    def per_s(self) -> float:
        known = self._count and time.monotonic() - self._at < FORGET_S
        return round(self._amount / self._seconds, 3) if known else 0.0


def _number(phase: Phase | None, name: str) -> float:
    attributes: Mapping[str, str | int | float | bool] = phase.attributes if phase is not None else {}
    return float(attributes.get(name, 0))


def _prompt_s(compute: Phase) -> float:
    """How long the prompt itself took: of a decode, up to its first token."""
    first_ns = dict(compute.events).get("first_token", compute.end_ns)
    return (first_ns - compute.start_ns) / 1e9
