"""What a gateway counts, in the registry of its service. Labels have few values, whatever clients send."""

from __future__ import annotations

from pdq.telemetry import Metrics
from prometheus_client import Counter, Gauge, Histogram

_FIRST_BYTE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

LEFT = "left"
"""The status of a request whose client left before there was any."""


class GatewayMetrics:
    def __init__(self, metrics: Metrics) -> None:
        registry = metrics.registry
        self._requests = Counter(
            "pdq_gateway_requests", "HTTP requests that ended, by status.", ("route", "status"), registry=registry
        )
        self._first_byte = Histogram(
            "pdq_gateway_first_byte_seconds",
            "From the request's headers to the first byte of an answer's body.",
            ("route",),
            buckets=_FIRST_BYTE,
            registry=registry,
        )
        self._streams = Gauge("pdq_gateway_open_streams", "Answers being streamed.", registry=registry)

    def ended(self, route: str, status: int) -> None:
        """`status` 0: the client left before there was one."""
        self._requests.labels(route, str(status) if status else LEFT).inc()

    def first_byte(self, route: str, seconds: float) -> None:
        self._first_byte.labels(route).observe(seconds)

    def stream_began(self) -> None:
        self._streams.inc()

    def stream_ended(self) -> None:
        self._streams.dec()
