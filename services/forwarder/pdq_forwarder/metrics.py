"""What a forwarder counts, in the registry of its service."""

from __future__ import annotations

import math
from typing import Literal, get_args

from pdq.telemetry import Metrics
from prometheus_client import Counter, Gauge

Outcome = Literal["arrived", "without_body", "dropped"]
Refusal = Literal["queue_full", "payload_too_large", "unavailable"]


class ForwarderMetrics:
    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._forwarded = Counter(
            "pdq_site_forwarded", "Requests that left the site, by how.", ("outcome",), registry=registry
        )
        self._refusals = Counter(
            "pdq_site_refusals", "Tries at which the hub did not take a request.", ("cause",), registry=registry
        )
        # From 0 on: an increase from nothing to 1 is none to Prometheus.
        for outcome in get_args(Outcome):
            self._forwarded.labels(outcome)
        for cause in get_args(Refusal):
            self._refusals.labels(cause)
        self._uplink = Gauge("pdq_site_uplink_up", "Whether the hub answered the last time.", registry=registry)
        self._waiting = Gauge("pdq_site_waiting", "Requests that the site holds.", registry=registry)
        self._oldest = Gauge("pdq_site_oldest_seconds", "Age of the oldest of them.", registry=registry)

    def forwarded(self, outcome: Outcome) -> None:
        self._forwarded.labels(outcome).inc()

    def refused(self, cause: str) -> None:
        """`cause`: the code of the error."""
        self._refusals.labels(cause if cause in get_args(Refusal) else "unavailable").inc()

    def uplink(self, up: bool) -> None:
        self._uplink.set(up)

    def waiting(self, requests: float = math.nan, oldest_s: float = math.nan) -> None:
        """Without arguments: the site's broker did not answer, and no alert looks at old numbers."""
        self._waiting.set(requests)
        self._oldest.set(oldest_s)
