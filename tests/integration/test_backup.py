"""What is in a backup of the broker, and what becomes of requests when it is put back: docs/backup.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from nats.aio.client import Client as Nats
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.errors import Unavailable
from pdq.settings import BusSettings, LimitSettings

from tests import snapshot
from tests.ask import Answer, ask, follow_to_end, read_all
from tests.broker import free_port
from tests.secured import SecuredStack
from tests.snapshot import Snapshot
from tests.stack import MODEL, Service, Stack, completion

SLOW = "llama2-70b-h100-tp8"
"""About 30 ms a token."""
LIMITS = LimitSettings(ack_wait_s=2.0)
QUEUES = (subjects.SUBMIT, subjects.PREFILL, subjects.DECODE, subjects.REAP)
KEPT = (*QUEUES, subjects.DEAD, subjects.TENANTS, subjects.LOG)
"""What docs/backup.md says to keep, in the order in which it says to take it."""
SERVICES = ("pdq_router", "pdq_prefill", "pdq_decode")
BRIEF_S = 8.0

Backup = Mapping[str, Snapshot]


class Two(NamedTuple):
    """Backups of one broker at two times: `waiting` and `brief` were accepted before the first and ended before the
    second, `later` came and ended between them, `last` came between them and waits. Answers as they were."""

    first: Backup
    second: Backup
    answers: Mapping[str, Answer]


@contextlib.asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[Client]:
    """The services of a stack whose broker may run already; a client at its side."""
    for module in SERVICES:
        stack.add(module)
    try:
        await stack.start()
        bus = await stack.connect()
        yield Client(bus, "local")
        await bus.close()
    finally:
        stack.stop()


async def take(url: str, seed: str | None = None) -> Backup:
    nats = Nats()
    await nats.connect(url, nkeys_seed_str=seed)
    taken = {stream: await snapshot.take(nats, stream) for stream in KEPT}
    await nats.close()
    return taken


async def put_back(url: str, backup: Backup, seed: str | None = None) -> None:
    nats = Nats()
    await nats.connect(url, nkeys_seed_str=seed)
    for one in backup.values():
        await snapshot.put_back(nats, one)
    await nats.close()


@contextlib.asynccontextmanager
async def restored(directory: Path, backup: Backup) -> AsyncIterator[tuple[Stack, Client]]:
    """A new broker that got a backup, and new services."""
    stack = Stack(directory, limits=LIMITS, PDQ_ENGINE_SIM_PROFILE=SLOW)
    stack.broker.start()
    await put_back(stack.url, backup)
    stack.broker.stop()
    async with running(stack) as client:
        yield stack, client


async def submit(client: Client, *requests: str) -> None:
    for request in requests:
        body = completion(f"tell me {request}", max_tokens=20, temperature=0)
        deadline_s = BRIEF_S if request in ("brief", "last") else 600
        await client.submit(body, model=MODEL, request=request, deadline_s=deadline_s)


async def until_routed(client: Client, *requests: str) -> None:
    for request in requests:
        async with asyncio.timeout(30):
            while not await is_routed(client, request):
                await asyncio.sleep(0.02)


async def is_routed(client: Client, request: str) -> bool:
    # A router that is ready may not answer reads yet.
    with contextlib.suppress(Unavailable):
        return "routed" in (await read_all(client, request)).story
    return False


def stop(workers: list[Service]) -> None:
    for worker in workers:
        worker.stop()


def start(workers: list[Service]) -> None:
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.wait_ready()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    async def make() -> Two:
        stack = Stack(tmp_path_factory.mktemp("first"), limits=LIMITS, PDQ_ENGINE_SIM_PROFILE=SLOW)
        async with running(stack) as client:
            await submit(client, "early")
            await follow_to_end(client, "early")
            workers = stack.services[1:]
            stop(workers)
            await submit(client, "waiting", "brief")
            await until_routed(client, "waiting", "brief")
            first = await take(stack.url)
            start(workers)
            await submit(client, "later")
            ended = [await follow_to_end(client, request) for request in ("early", "waiting", "brief", "later")]
            stop(workers)
            await submit(client, "last")
            await until_routed(client, "last")
            answers = {answer.request: answer for answer in (*ended, await read_all(client, "last"))}
            return Two(first, await take(stack.url), answers)

    return asyncio.run(make())


def rearm(stack: Stack, **settings: str) -> int:
    """`pdq rearm`: how many requests it found."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environment = {**kept, "PDQ_NATS_URL": stack.url, "PDQ_HOME": str(stack.directory / "home"), **settings}
    command = [sys.executable, "-m", "pdq", "rearm", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return int(json.loads(done.stdout)["requests"])


async def held(bus: Bus, stream: str) -> int:
    info = await bus.stream_info(stream)
    assert info is not None
    return int(info["state"]["messages"])


async def until_holds(stack: Stack, stream: str, messages: int) -> None:
    bus = await stack.connect()
    try:
        async with asyncio.timeout(30):
            while await held(bus, stream) != messages:
                await asyncio.sleep(0.05)
    finally:
        await bus.close()


async def until_worked_off(stack: Stack) -> None:
    for stream in subjects.STAGE_STREAM.values():
        await until_holds(stack, stream, 0)


async def test_a_backup_goes_on_where_it_was_taken(two: Two, tmp_path: Path) -> None:
    async with restored(tmp_path, two.first) as (stack, client):
        waiting = await follow_to_end(client, "waiting")
        assert waiting.terminal == ["finished"]
        assert waiting.transcript.text == two.answers["waiting"].transcript.text
        assert (await read_all(client, "early")).events == two.answers["early"].events
        # What was accepted after it is as if it never was.
        assert (await read_all(client, "later")).events == []
        await until_worked_off(stack)
        assert rearm(stack) == 0


async def test_queues_that_are_older_than_the_log(two: Two, tmp_path: Path) -> None:
    """The job of what has ended since is dropped; what came since has no job, and ends at its deadline."""
    async with restored(tmp_path, {**two.first, subjects.LOG: two.second[subjects.LOG]}) as (stack, client):
        await until_worked_off(stack)
        for request in ("early", "waiting", "brief", "later"):
            assert (await read_all(client, request)).events == two.answers[request].events
        assert rearm(stack) == 1
        assert (await follow_to_end(client, "last")).terminal == ["expired"]


async def test_a_log_that_is_older_than_the_queues(two: Two, tmp_path: Path) -> None:
    """A job without a log is dropped; what had ended since has neither an end nor a job."""
    async with restored(tmp_path, {**two.second, subjects.LOG: two.first[subjects.LOG]}) as (stack, client):
        await until_worked_off(stack)
        assert (await read_all(client, "last")).events == []
        assert rearm(stack) == 2
        assert (await follow_to_end(client, "brief")).terminal == ["expired"]
        assert (await read_all(client, "waiting")).terminal == []
        # The timer of what has no log removes itself; that of `waiting` is not due.
        await until_holds(stack, subjects.REAP, 1)


async def test_names_are_not_given_out_again(two: Two, tmp_path: Path) -> None:
    """A request without a name has that of its sequence: with older queues it would read another's answer."""
    async with restored(tmp_path, {**two.first, subjects.LOG: two.second[subjects.LOG]}) as (stack, client):
        given = two.second[subjects.SUBMIT].head["state"]["last_seq"]
        body = completion("who am I", max_tokens=1)
        bus = await stack.connect()
        assert (await client.submit(body, model=MODEL)).seq <= given
        await bus.api(f"STREAM.PURGE.{subjects.SUBMIT}", {"seq": given + 1})
        await bus.close()
        submitted = await client.submit(body, model=MODEL)
        assert submitted.seq == given + 1
        assert (await follow_to_end(client, f"s-{given + 1}")).terminal == ["finished"]


ENCRYPTED = 'cipher: "chachapoly"\nkey: $JETSTREAM_KEY\n'


def encrypted(directory: Path, key: str) -> Stack:
    stack = Stack(directory, limits=LIMITS, PDQ_ENGINE_SIM_PROFILE=SLOW)
    stack.broker.jetstream = ENCRYPTED
    stack.broker.environment = {"JETSTREAM_KEY": key}
    return stack


async def test_a_cold_copy_under_load(tmp_path: Path) -> None:
    """Its services are killed with work at every stage, the broker is stopped, its store copied."""
    names = [f"request-{number}" for number in range(20)]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    stack = encrypted(tmp_path / "first", "a-key")
    async with running(stack) as client:
        await submit(client, *names)
        await follow_to_end(client, names[0])
        for service in stack.services:
            service.kill()
        stack.broker.stop()
        shutil.copytree(stack.directory / "store", tmp_path / "second/store")
    async with running(encrypted(tmp_path / "second", "a-key")) as client:
        answers = [await follow_to_end(client, name) for name in names]
        assert all(answer.terminal == ["finished"] and answer.transcript.complete() for answer in answers)
        again = [ask(client, completion(f"tell me {name}", max_tokens=20, temperature=0)) for name in names]
        texts = [answer.transcript.text for answer in await asyncio.gather(*again)]
        assert [answer.transcript.text for answer in answers] == texts


async def test_a_store_without_its_key(tmp_path: Path) -> None:
    """The broker starts, says that it is not healthy, and has no streams; with the key all is there."""
    stack = encrypted(tmp_path, "a-key")
    async with running(stack) as client:
        await ask(client, completion("hello", max_tokens=1), request="kept")
    port = free_port()
    broker = encrypted(tmp_path, "another-key").broker
    broker.more = f'http: "127.0.0.1:{port}"\n'
    broker.start()
    try:
        bus = await Bus.connect(BusSettings(url=broker.url), "test")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/healthz", timeout=5)
        assert await bus.stream_info(subjects.LOG) is None
        await bus.close()
    finally:
        broker.stop()
    async with running(encrypted(tmp_path, "a-key")) as client:
        assert (await read_all(client, "kept")).terminal == ["finished"]


async def test_a_backup_with_accounts(tmp_path: Path) -> None:
    """One more user of the account PDQ takes it and puts it back; the router's key is enough for `pdq rearm`."""
    stacks = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        stacks.append(SecuredStack(tmp_path / name, ["acme"], observed=["PDQ"], PDQ_ROUTER_ORDER="decode-only"))
        stacks[-1].add("pdq_router")
    first, second = stacks
    try:
        await first.start()
        bus = await first.connect("acme")
        client = Client(bus, "acme")
        await client.submit(completion("hello", max_tokens=2), model=MODEL, request="waits")
        await until_routed(client, "waits")
        await bus.close()
        backup = await take(first.url, first.seed("PDQ"))
    finally:
        first.stop()
    try:
        second.broker.start()
        await put_back(second.url, backup, second.seed("PDQ"))
        second.broker.stop()
        await second.start()
        assert rearm(second, PDQ_NATS_NKEY_SEED=second.seed("router")) == 1
        worker = second.add("pdq_decode")
        worker.start()
        bus = await second.connect("acme")
        assert (await follow_to_end(Client(bus, "acme"), "waits")).terminal == ["finished"]
        await bus.close()
    finally:
        second.stop()
