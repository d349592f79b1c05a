"""The broker's disk: full, or cut off from its power."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.errors import NotStored
from pdq.init import init
from pdq.settings import BusSettings, LimitSettings

from tests.ask import ask, follow_to_end, read_all, submit_command
from tests.broker import Broker, Cluster
from tests.memory import grown, memories
from tests.stack import MODEL, Stack, completion

SLOW = {"PDQ_ENGINE_SIM_PROFILE": "llama2-70b-h100-tp8"}
"""About 30 ms a token."""
NUM_REQUESTS = 12


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)


class FileLimit:
    """No file of the broker may grow: to the broker a full disk, and it needs no privilege."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def prepare(self) -> None:
        pass

    def fill(self) -> None:
        self._limit(0)

    def make_room(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def close(self) -> None:
        pass

    def _limit(self, size: int) -> None:
        assert self._broker.process is not None
        resource.prlimit(self._broker.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class SmallDisk:
    """The broker's store on a file system of its own, filled up by a file."""

    def __init__(self, broker: Broker) -> None:
        self._store = broker.directory / "store"
        self._ballast = self._store / "ballast"

    def prepare(self) -> None:
        self._store.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(self._store)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")

    def fill(self) -> None:
        with open(self._ballast, "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    def make_room(self) -> None:
        self._ballast.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._store)], capture_output=True)


Disk = FileLimit | SmallDisk


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=2.0), PDQ_NATS_PUBLISH_TIMEOUT_S="3")
    yield stack
    stack.stop()


@pytest.fixture(params=[FileLimit, SmallDisk])
def disk(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Disk]:
    disk: Disk = request.param(stack.broker)
    disk.prepare()
    yield disk
    stack.stop()
    disk.close()


async def test_a_broker_with_a_full_disk_refuses_and_loses_nothing(stack: Stack, disk: Disk) -> None:
    router = stack.add("pdq_router")
    worker = stack.add("pdq_worker", PDQ_WORKER_SLOTS="4", **SLOW)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    body = completion("k" * 100, max_tokens=40, ignore_eos=True, temperature=0)
    reference = await ask(client, body)
    accepted = [new_request_id() for _ in range(NUM_REQUESTS)]
    for request in accepted:
        await client.submit(body, model=MODEL, request=request)
    await until(lambda: stack.metric(worker, "pdq_worker_busy_slots") >= 4)
    before = memories(stack)
    disk.fill()

    # What was begun of the last block may still fit.
    with pytest.raises(NotStored, match=f"{stack.broker.port}.* disk is full"):
        for request in (new_request_id() for _ in range(50)):
            await client.submit(body, model=MODEL, request=request, timeout_s=3)
            accepted.append(request)
    code, said = await asyncio.to_thread(submit_command, stack)
    assert code == 3 and "not_stored" in said and "disk is full" in said and str(stack.broker.port) in said
    for service in (router, worker):
        await until(lambda service=service: service.get("/readyz")[0] == 503)
        assert "disk is full" in service.get("/readyz")[1]
        assert service.get("/healthz")[0] == 200
    await until(lambda: stack.metric(router, "pdq_broker_stores") == 0 < stack.metric(router, "pdq_broker_up"))
    await asyncio.sleep(5)
    assert grown(before, memories(stack)) == {}

    disk.make_room()
    with pytest.raises(NotStored):
        # Room alone does not help: the broker must be started again, and that is what the error says.
        await client.submit(body, model=MODEL, timeout_s=3)
    await asyncio.to_thread(stack.broker.stop)
    stack.broker.start()
    for request in accepted:
        answer = await follow_to_end(client, request)
        assert answer.transcript.complete() and answer.transcript.ids == reference.transcript.ids
        stored = await read_all(client, request)
        assert stored.terminal == ["finished"] and stored.story == answer.story
    for service in (router, worker):
        await until(lambda service=service: service.get("/readyz")[0] == 200)
    await until(lambda: stack.metric(router, "pdq_broker_stores") == 1)
    assert (await ask(client, body)).terminal == ["finished"]
    await bus.close()


async def test_a_full_disk_outlasts_every_delivery_and_no_request_waits_for_ever(tmp_path: Path) -> None:
    """What the broker gives up it tells in a message that cannot be stored either, and a broker that is stopped in
    order remembers that it gave up."""
    stack = Stack(tmp_path, limits=LimitSettings(ack_wait_s=1.0, max_deliver=2), PDQ_NATS_PUBLISH_TIMEOUT_S="1")
    disk = FileLimit(stack.broker)
    router, worker = stack.add("pdq_router", PDQ_LIMIT_MAX_DELIVER="2"), stack.add("pdq_worker")
    try:
        stack.services.clear()
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        body = completion("k" * 100, max_tokens=5)
        never_seen, due = new_request_id(), new_request_id()
        router.start()
        router.wait_ready()
        await client.submit(body, model=MODEL, request=due, deadline_s=5)
        while await client.state(due) is None:
            await asyncio.sleep(0.05)
        router.stop()
        await client.submit(body, model=MODEL, request=never_seen)
        disk.fill()
        stack.services += [router, worker]
        router.start()
        worker.start()
        await asyncio.sleep(10)
        disk.make_room()
        await asyncio.to_thread(stack.broker.stop)
        stack.broker.start()
        await until(lambda: bus.connected)
        ends = [(await follow_to_end(client, request)).terminal for request in (never_seen, due)]
        await bus.close()
        assert ends == [["finished"], ["expired"]]
    finally:
        stack.stop()


class Block:
    """The broker's store on ext4 in a file. A copy of that file is the disk as a loss of power leaves it: without what
    the kernel held in memory."""

    def __init__(self, broker: Broker) -> None:
        self._store = broker.directory / "store"
        self._image = broker.directory / "disk"
        self._mounted = False

    def prepare(self) -> None:
        self._store.mkdir()
        with open(self._image, "wb") as image:
            image.truncate(256 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", str(self._image)], capture_output=True)
        if made.returncode or not self._mount():
            pytest.skip("no file system can be mounted here")

    def lose_power(self) -> None:
        """Call it while the broker runs; kill it afterwards, then `come_back`."""
        shutil.copy(self._image, self._image.with_name("after"))

    def come_back(self) -> None:
        self.close()
        self._image = self._image.with_name("after")
        assert self._mount()

    def close(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self._store)], capture_output=True)

    def _mount(self) -> bool:
        mount = ["mount", "-o", "loop", str(self._image), str(self._store)]
        self._mounted = subprocess.run(mount, capture_output=True).returncode == 0
        return self._mounted


@pytest.fixture
def block(broker_of_deployments: Broker) -> Iterator[Block]:
    block = Block(broker_of_deployments)
    block.prepare()
    yield block
    broker_of_deployments.stop()
    block.close()


@pytest.fixture
def broker_of_deployments(tmp_path: Path) -> Broker:
    """Syncs as infra/nats says."""
    deployed = (Path(__file__).parents[2] / "infra/nats/jetstream.conf").read_text()
    broker = Broker(tmp_path)
    broker.jetstream = next(line for line in deployed.splitlines(keepends=True) if "sync_interval" in line)
    return broker


async def test_what_was_acknowledged_outlives_a_loss_of_power(broker_of_deployments: Broker, block: Block) -> None:
    broker_of_deployments.start()
    bus = await Bus.connect(BusSettings(url=broker_of_deployments.url), "test")
    await init(bus, LimitSettings(log_max_bytes=50 << 20, queue_max_bytes=20 << 20), [MODEL])
    for number in range(300):
        await bus.publish(subjects.state("local", f"r{number}"), b"x" * 600)
    block.lose_power()
    broker_of_deployments.kill()
    await bus.close()
    block.come_back()
    broker_of_deployments.start()
    bus = await Bus.connect(BusSettings(url=broker_of_deployments.url), "test")
    info = await bus.stream_info(subjects.LOG)
    await bus.close()
    assert info is not None and info["state"]["messages"] == 300


async def test_a_full_disk_of_one_broker_of_three_stops_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    limits = LimitSettings(replicas=3, ack_wait_s=3.0)
    stack = Stack(tmp_path, cluster=cluster, limits=limits, PDQ_NATS_PUBLISH_TIMEOUT_S="5")
    disks = {broker.port: SmallDisk(broker) for broker in cluster.brokers}
    stack.add("pdq_router")
    stack.add("pdq_worker")
    body = completion("k" * 100, max_tokens=30, ignore_eos=True, temperature=0)
    try:
        for disk in disks.values():
            disk.prepare()
        await stack.start()
        bus = await stack.connect()
        client = Client(bus, "local")
        reference = await ask(client, body)
        info = await bus.stream_info(subjects.LOG)
        assert info is not None
        full = cluster.brokers[int(info["cluster"]["leader"].removeprefix("n"))]
        disks[full.port].fill()
        answers = []
        async with asyncio.timeout(60):
            while "no space left" not in (full.directory / "nats.log").read_text() or len(answers) < 20:
                answers.append(await ask(client, body))
        disks[full.port].make_room()
        await asyncio.to_thread(full.stop)
        full.start()
        answers += [await ask(client, body) for _ in range(20)]
        await bus.close()
        assert all(answer.transcript.ids == reference.transcript.ids for answer in answers)
    finally:
        await asyncio.to_thread(stack.stop)
        for disk in disks.values():
            disk.close()
