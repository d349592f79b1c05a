"""Keys and tenants change while the broker and the services run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from pdq.client import Client, new_request_id
from pdq.errors import Misconfigured, Unavailable

from tests.ask import Answer, ask
from tests.secured import SecuredStack
from tests.stack import MODEL, Service, chat

BOUND_S = 25.0
"""A connection that is refused is given up after ten seconds."""
LONG = {"max_tokens": 300, "ignore_eos": True}


@pytest.fixture
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    stack = SecuredStack(tmp_path_factory.mktemp("reload"), ("acme",), PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100*2")
    for module in ("pdq_router", "pdq_worker"):
        stack.add(module)
    asyncio.run(stack.start())
    yield stack
    stack.stop()


async def test_a_new_tenant_disturbs_nobody(stack: SecuredStack) -> None:
    bus = await stack.connect("acme")
    running = [asyncio.create_task(ask(Client(bus, "acme"), chat(f"hello {n}", **LONG))) for n in range(4)]
    for name in ("globex", "initech", "umbrella"):
        await asyncio.sleep(0.5)
        with pytest.raises(StopIteration):
            stack.seed(name)
        stack.write(name)
        await stack.reload()
        other = await stack.connect(name)
        assert (await ask(Client(other, name), chat("hello", max_tokens=4))).terminal == ["finished"]
        await other.close()
        assert not all(task.done() for task in running), "the requests were too short to see the reload"
    answers = await asyncio.gather(*running)
    assert [len(answer.transcript.ids) for answer in answers] == [300] * 4
    assert bus.reconnects == 0
    await bus.close()
    for service in stack.services:
        assert "lost the broker" not in service.log.read_text()


async def test_a_removed_tenant_is_cut_off(stack: SecuredStack) -> None:
    stack.write("globex")
    await stack.reload()
    bus, other = await stack.connect("globex"), await stack.connect("acme")
    answer, began = Answer(new_request_id()), asyncio.Event()

    async def follow() -> None:
        async with Client(bus, "globex").follow(answer.request, catch_up=False) as follower:
            await Client(bus, "globex").submit(chat("hello", **LONG), model=MODEL, request=answer.request)
            async for event in follower.events(60):
                answer.take(event)
                began.set()

    following = asyncio.create_task(follow())
    bystander = asyncio.create_task(ask(Client(other, "acme"), chat("hello", **LONG)))
    await began.wait()
    seed = stack.seed("globex")
    stack.seed_file("globex").unlink()
    stack.write()
    await stack.reload()
    at = time.monotonic()
    with pytest.raises(Unavailable):
        await following
    assert time.monotonic() - at < BOUND_S and bus.closed.is_set()
    with pytest.raises(Misconfigured, match="refuses these credentials"):
        await stack.connect_with(seed)
    assert (await bystander).terminal == ["finished"]
    await other.close()
    await bus.close()


async def test_a_key_is_replaced_while_services_run(stack: SecuredStack) -> None:
    old = stack.seed_file("worker")
    # The service was given its file, which is another key's from now on: it has read it already.
    old.rename(old.with_name("worker.old.nk"))
    stack.write()
    await stack.reload()
    bus = await stack.connect("acme")
    client = Client(bus, "acme")
    assert (await ask(client, chat("hello", max_tokens=4))).terminal == ["finished"]
    second = stack.add("pdq_worker")
    second.start()
    second.wait_ready()
    old.with_name("worker.old.nk").unlink()
    stack.write()
    await stack.reload()
    first = stack.services[1]
    assert await ended(first) == 1
    assert "refuses these credentials" in first.log.read_text()
    assert (await ask(client, chat("hello", max_tokens=4))).terminal == ["finished"]
    await bus.close()


async def test_no_service_outlives_its_key(stack: SecuredStack) -> None:
    for name in ("router", "worker"):
        stack.seed_file(name).unlink()
    stack.write(roles=())
    await stack.reload()
    assert [await ended(service) for service in stack.services] == [1, 1]


async def ended(service: Service) -> int:
    """The exit code of a service that ends by itself."""
    assert service.process is not None
    give_up = time.monotonic() + BOUND_S + 10
    while service.process.poll() is None:
        assert time.monotonic() < give_up, service.log.read_text()[-2_000:]
        await asyncio.sleep(0.05)
    return service.process.returncode
