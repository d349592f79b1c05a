"""What came of a run at the edge, for people and for machines."""

from __future__ import annotations

import statistics

import msgspec

MOST_SHOWN = 20


class Outage(msgspec.Struct, kw_only=True):
    """Requests while something was broken."""

    what: str
    lasts_s: float
    requests: int
    asked_meanwhile: int
    """Requests that were due while it was broken."""
    answered: int = 0
    """Whose end their client at the site has seen."""
    logs: int = 0
    """Logs of them at the hub: as many as requests, or something ran twice or was lost."""
    overtaken: int = 0
    left_waiting: int = 0
    took_s: float = 0.0
    failures: list[str] = []

    @property
    def ok(self) -> bool:
        whole = self.answered == self.logs == self.requests
        return whole and not (self.failures or self.overtaken or self.left_waiting)

    def lines(self) -> list[str]:
        told = (
            f"{self.what} for {self.lasts_s:g} s: {self.requests} requests, {self.asked_meanwhile} of them meanwhile; "
            f"{self.answered} answered at the site, {self.logs} logs at the hub, {self.overtaken} overtaken, "
            f"{self.left_waiting} left waiting; {self.took_s:g} s"
        )
        return [told, *(f"  {line}" for line in self.failures[:MOST_SHOWN])]


class Flow(msgspec.Struct, kw_only=True):
    """Times from the moment that something is back, in seconds."""

    what: str
    away_s: list[float] = []
    accepted_s: list[float] = []
    first_token_s: list[float] = []

    def lines(self) -> list[str]:
        lasted = f"{min(self.away_s):g} to {max(self.away_s):g} s"
        return [
            f"{self.what}, {len(self.away_s)} times, {lasted}: from its return to "
            f"acceptance at the hub {_spread(self.accepted_s)}, to the first token at the site "
            f"{_spread(self.first_token_s)}"
        ]


class Report(msgspec.Struct, kw_only=True):
    seed: int
    outages: list[Outage] = []
    flows: list[Flow] = []

    @property
    def ok(self) -> bool:
        return all(outage.ok for outage in self.outages)

    def lines(self) -> list[str]:
        outages = [line for outage in self.outages for line in outage.lines()]
        flows = [line for flow in self.flows for line in flow.lines()]
        return [f"seed {self.seed}", *outages, *flows, "ok" if self.ok else "NOT ok"]


def _spread(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
