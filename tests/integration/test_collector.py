"""A collector that is away, comes, goes and comes again: no request notices."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from pdq.client import Client

from tests import otlp
from tests.ask import Answer, ask, read_all
from tests.broker import free_port
from tests.stack import Service, Stack, completion

REQUESTS = 20
BOUND_S = 30.0
SPANS_S = 60.0
LOST = "spans are lost"


async def burst(client: Client, word: str) -> list[Answer]:
    """So many requests at one time, each answered within the bound."""
    bodies = [completion(f"{word} {number} " * 20, max_tokens=4, ignore_eos=True) for number in range(REQUESTS)]
    return await asyncio.gather(*(ask(client, body, seconds=BOUND_S) for body in bodies))


async def arrive(collector: otlp.Collector, answers: list[Answer]) -> None:
    """Until the whole trace of each has come: router, prefill and decode export on their own."""
    give_up = time.monotonic() + SPANS_S
    for answer in answers:
        while True:
            with collector.arrived:
                spans = [span for span in collector.spans if span.trace_id == answer.state.trace]
            if otlp.named(spans, "process decode") and [span.name for span in otlp.tops(spans)] == ["route"]:
                break
            assert time.monotonic() < give_up, f"of {answer.request} only {[span.name for span in spans]} came"
            await asyncio.sleep(0.05)
        otlp.assert_no_orphans(spans)


async def until_spans_are_lost(client: Client, services: list[Service], times: int) -> list[Answer]:
    """Bursts until every service has said so for the n-th time: a short outage is not even noticed."""
    answers: list[Answer] = []
    give_up = time.monotonic() + SPANS_S
    while any(service.log.read_text().count(LOST) < times for service in services):
        assert time.monotonic() < give_up, "no service notices that the collector is away"
        answers += await burst(client, "away")
        await asyncio.sleep(0.5)
    return answers


async def test_no_request_is_slower_or_lost_while_the_collector_is_away(tmp_path: Path) -> None:
    port = free_port()
    stack = Stack(
        tmp_path,
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{port}",
        OTEL_EXPORTER_OTLP_TIMEOUT="5",
        OTEL_BSP_SCHEDULE_DELAY="200",
    )
    services = [stack.add(module) for module in ("pdq_router", "pdq_prefill", "pdq_decode")]
    answers: list[Answer] = []
    try:
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        for outage in (1, 2):
            answers += await until_spans_are_lost(client, services, outage)
            with otlp.collector(port) as collector:
                traced = await burst(client, "there")
                await arrive(collector, traced)
            answers += traced
        assert Counter(answer.state.event for answer in answers) == {"finished": len(answers)}
        for answer in answers:
            stored = await read_all(client, answer.request)
            assert stored.terminal == ["finished"] and stored.transcript.ids == answer.transcript.ids
            assert (stored.state.prefill.attempt, stored.state.decode.attempt) == (1, 1)
        assert stack.metric(services[2], "pdq_requests_total") == len(answers) >= 4 * REQUESTS
        await bus.close()
    finally:
        await asyncio.to_thread(stack.stop)
    for service in services:
        told = service.log.read_text()
        # One line as an outage begins and one as it ends; the stop may find the collector away again.
        assert 2 <= told.count(LOST) <= 3, service.module
        assert told.count("spans are exported again") == 2, service.module
