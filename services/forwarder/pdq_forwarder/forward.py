"""Forwarding: from a message that the site stored to one that the hub has stored.

A request leaves the site's queue when the hub has acknowledged it, not before. It may be published twice (an
acknowledgement was lost, a forwarder died): it has the same name both times, and the router accepts a name once.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping

from pdq import subjects
from pdq.bus import Delivery
from pdq.client import REQUEST_HEADER, SITE_SEQ_HEADER, SITE_TIME_HEADER, SITE_TOO_LARGE_HEADER
from pdq.errors import Interrupted, Rejected, Retryable
from pdq.stage.run import Run
from pdq.telemetry import Metrics, StageSpan, Telemetry

from pdq_forwarder.metrics import ForwarderMetrics, Outcome
from pdq_forwarder.uplink import Uplink
from pdq_forwarder.window import Window

log = logging.getLogger("pdq.forwarder")

STAGE = "forward"
NOT_THE_CLIENTS = ("nats-", "pdq-site-", "traceparent", "tracestate")
"""How headers begin that are words to the site's broker, the forwarder's own, or replaced by its span's."""
SENDABLE = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+\Z")


class Forwarder:
    """`process` is what the worker loop calls for each message of PDQ_EDGE."""

    def __init__(
        self,
        uplink: Uplink,
        window: Window,
        telemetry: Telemetry,
        metrics: Metrics,
        counts: ForwarderMetrics,
        worker: str,
    ) -> None:
        self._uplink = uplink
        self._window = window
        self._telemetry = telemetry
        self._metrics = metrics
        self._counts = counts
        self._worker = worker

    async def process(self, delivery: Delivery, run: Run) -> None:
        request = name_of(delivery)
        if delivery.num_delivered > 1:
            self._metrics.redelivered(STAGE)
        with self._telemetry.process(
            STAGE,
            delivery.stream,
            delivery.headers,
            request=request,
            model=subjects.parse_edge_submit(delivery.subject),
            worker=self._worker,
            stored_ns=delivery.stored_ns,
            message_id=str(delivery.seq),
            deliveries=delivery.num_delivered,
        ) as span:
            try:
                # As long as it takes: a request is given back only when this forwarder stops.
                outcome = await run.guard(self._forward(delivery, request, span), math.inf)
            except Interrupted as exc:
                span.end(exc.cause)
                await delivery.nak()
                return
            await self._settle(delivery, outcome)
            self._tell(request, outcome, span, delivery.stored_s)

    async def _forward(self, delivery: Delivery, request: str, span: StageSpan) -> Outcome:
        """Until the hub has it, in its turn; what the hub never takes goes without its body, to fail there."""
        model, body = subjects.parse_edge_submit(delivery.subject), delivery.data
        headers = onward(delivery, span.headers())
        outcome: Outcome = "arrived"
        tries = 0
        with self._window.place(delivery.seq) as place:
            while True:
                await self._window.turn(place)
                tries += 1
                span.set(tries=tries)
                try:
                    await self._uplink.submit(model, body, headers)
                    self._window.arrived()
                    return outcome
                except Retryable as exc:
                    self._counts.refused(exc.code)
                    self._window.failed()
                except Rejected as exc:
                    self._counts.refused(exc.code)
                    span.fail(exc.code)
                    log.error("the hub does not take it: %s", exc, extra={"request_id": request, "code": exc.code})
                    if outcome == "without_body":
                        return "dropped"
                    outcome = "without_body"
                    headers[SITE_TOO_LARGE_HEADER] = str(len(body))
                    body = b""

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        if outcome == "dropped":
            await delivery.term("the hub takes not even its headers")
        else:
            await delivery.ack()

    def _tell(self, request: str, outcome: Outcome, span: StageSpan, stored_s: float) -> None:
        self._counts.forwarded(outcome)
        self._metrics.queue_wait(STAGE, span.queue_wait_s)
        waited_s = round(time.time() - stored_s, 3)
        log.info(
            "forwarded",
            extra={"action": "forward.done", "request_id": request, "outcome": outcome, "waited_s": waited_s},
        )


def name_of(delivery: Delivery) -> str:
    """The request's name, as far as it may stand in a trace: the client's own, else by its sequence here."""
    name = delivery.headers.get(REQUEST_HEADER, "")
    return name if subjects.is_token(name) else subjects.sequence_name(subjects.EDGE, delivery.seq)


def onward(delivery: Delivery, trace: Mapping[str, str]) -> dict[str, str]:
    """Headers for the hub: the client's, the forwarder's span, and where and when the site stored it."""
    kept = {name: value for name, value in delivery.headers.items() if _is_the_clients(name)}
    site = {SITE_SEQ_HEADER: str(delivery.seq), SITE_TIME_HEADER: f"{delivery.stored_s:.3f}"}
    return {**kept, **trace, **site}


def _is_the_clients(name: str) -> bool:
    return SENDABLE.match(name) is not None and not name.lower().startswith(NOT_THE_CLIENTS)
