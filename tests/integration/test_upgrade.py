"""A rolling upgrade: old and new builds, and old and new message versions, side by side. docs/upgrades.md; at length
`python -m tests.upgrade`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import REQUEST_HEADER, Client
from pdq.errors import NewerVersion, Unavailable
from pdq.log import first
from pdq.telemetry import Metrics
from pdq_router.endings import Endings
from pdq_router.endpoints import Endpoints

from tests.stack import MODEL, Service, completion
from tests.upgrade import builds
from tests.upgrade.builds import ADDED, Build
from tests.upgrade.fleet import Fleet, Seen, look, violations
from tests.upgrade.traffic import Traffic

ONE_GATEWAY = ("pdq_router", "pdq_prefill", "pdq_decode", "pdq_decode", "pdq_gateway")
REQUESTS = [f"early-{number}" for number in range(3)]
NEWER = msgspec.json.encode(msgspec.structs.replace(first("accepted"), v=2))
BOUND_S = 120.0


async def test_no_request_fails_while_services_are_upgraded_and_rolled_back(tmp_path: Path) -> None:
    """A release with more fields, which reads version 2 of the messages; then one that writes it, half-way and back."""
    reads = builds.made("reads", tmp_path, builds.more_fields, builds.reads_two)
    writes = builds.made("writes", tmp_path, builds.more_fields, builds.reads_two, builds.writes_two)
    fleet = Fleet(tmp_path, builds.present(), ONE_GATEWAY)
    try:
        await fleet.stack.start()
        async with Traffic(fleet.gateways, seed=7) as traffic:
            for place in range(len(ONE_GATEWAY)):
                await fleet.replace(place, reads)
                await traffic.more(2)
            for place, build in ((2, writes), (0, writes), (2, reads), (0, reads)):
                await fleet.replace(place, build)
                await traffic.more(2)
        seen = await look(fleet)
    finally:
        fleet.stack.stop()
    assert violations(traffic.asked, seen) == []
    assert len(traffic.asked) == len(seen.ends) > 20
    assert seen.records["v1"] and seen.records["v2"] and seen.records[ADDED]
    assert seen.crossed and seen.continued


@pytest.fixture
async def early(tmp_path: Path) -> AsyncIterator[Fleet]:
    """A router that is ahead of its time: it writes jobs of version 2. `early` has no worker yet."""
    router = builds.made("router", tmp_path, builds.reads_two, builds.jobs_of_two)
    fleet = Fleet(tmp_path, router, ["pdq_router"], PDQ_ROUTER_ORDER="decode-only")
    await fleet.stack.start()
    yield fleet
    fleet.stack.stop()


async def up(fleet: Fleet, build: Build) -> Service:
    service = fleet.add("pdq_decode", build)
    service.start()
    await asyncio.to_thread(service.wait_ready)
    return service


async def submit(fleet: Fleet, bus: Bus) -> None:
    for request in REQUESTS:
        body = completion("hello", max_tokens=5, ignore_eos=True)
        await bus.publish(subjects.submit("local", MODEL), body, headers={REQUEST_HEADER: request})


async def ended(fleet: Fleet, requests: int) -> Seen:
    """What is there once so many have ended."""
    async with asyncio.timeout(BOUND_S):
        while len((seen := await look(fleet)).ends) < requests:
            await asyncio.sleep(0.1)
    return seen


async def test_an_old_worker_leaves_newer_jobs_to_an_upgraded_one(early: Fleet, tmp_path: Path) -> None:
    old = await up(early, builds.present())
    bus = await early.stack.connect()
    await submit(early, bus)
    await bus.close()
    async with asyncio.timeout(BOUND_S):
        while early.stack.metric(old, "pdq_given_back_total") < len(REQUESTS):
            await asyncio.sleep(0.1)
    assert 'pdq_given_back_total{cause="newer_version",stage="decode"}' in old.get("/metrics")[1]
    assert (await look(early)).ends == {}
    await up(early, builds.made("upgraded", tmp_path, builds.reads_two))
    seen = await ended(early, len(REQUESTS))
    assert (seen.ends, seen.dead) == ({request: ["finished"] for request in REQUESTS}, 0)


async def test_without_that_rule_they_fail(early: Fleet, tmp_path: Path) -> None:
    await up(early, builds.made("buries", tmp_path, builds.buries_newer))
    bus = await early.stack.connect()
    await submit(early, bus)
    await bus.close()
    seen = await ended(early, len(REQUESTS))
    assert (seen.ends, seen.dead) == ({request: ["failed"] for request in REQUESTS}, len(REQUESTS))


async def test_an_answer_that_ends_after_a_newer_record_is_left_to_an_upgraded_worker(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, builds.present(), ["pdq_router", "pdq_decode"], PDQ_ROUTER_ORDER="decode-only")
    worker = fleet.stack.services[1]
    try:
        await fleet.stack.start()
        bus = await fleet.stack.connect()
        body = completion("hello", max_tokens=60, ignore_eos=True)
        await bus.publish(subjects.submit("local", MODEL), body, headers={REQUEST_HEADER: "r"})
        async with asyncio.timeout(BOUND_S):
            while (last := await bus.last(subjects.LOG, subjects.state("local", "r"))) is None or (
                (state := msgspec.json.decode(last.data))["event"] != "claim"
            ):
                await asyncio.sleep(0.01)
            # Another release's way to write a register: nobody here can say what it means.
            newer = msgspec.json.encode(state | {"v": 2, "deadline": "in a while", "nonce": "another"})
            await bus.publish(subjects.state("local", "r"), newer, expect_last=last.seq)
            while not fleet.stack.metric(worker, "pdq_given_back_total"):
                await asyncio.sleep(0.05)
        await bus.close()
        seen = await look(fleet)
    finally:
        fleet.stack.stop()
    assert (seen.ends, seen.dead) == ({}, 0)
    assert "Traceback" not in worker.log.read_text()


async def test_an_answer_that_is_newer_than_its_gateway_is_not_cancelled(tmp_path: Path) -> None:
    """It has a key: its client can ask for it again."""
    fleet = Fleet(tmp_path, builds.present(), ["pdq_router", "pdq_gateway"], PDQ_ROUTER_ORDER="decode-only")
    fleet.add("pdq_decode", builds.made("writes", tmp_path, builds.reads_two, builds.writes_two))
    content = completion("hello", model=MODEL, max_tokens=20, ignore_eos=True)
    try:
        await fleet.stack.start()
        async with httpx.AsyncClient(timeout=BOUND_S) as http:
            url, key = f"{fleet.gateways[0]}/completions", {"Idempotency-Key": "upgrade"}
            answer = await http.post(url, content=content, headers=key)
        seen = await ended(fleet, 1)
    finally:
        fleet.stack.stop()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "newer_version")
    assert answer.headers["retry-after"]
    assert list(seen.ends.values()) == [["finished"]]


async def test_a_reader_of_newer_records_is_told_so_and_asks_an_old_router_again(bus: Bus) -> None:
    await Endpoints(bus, Endings(bus, Metrics([MODEL]))).start()
    client = Client(bus, "t")
    async with client.follow("r", catch_up=False) as follower:
        await bus.publish(subjects.state("t", "r"), NEWER, expect_last=0)
        with pytest.raises(NewerVersion, match="State has version 2"):
            [event async for event in follower.events(10)]
    with pytest.raises(Unavailable, match="State has version 2"):
        await client.read("r")
    reply = await client.cancel("r")
    assert reply.error is not None and reply.error.code == "newer_version"
