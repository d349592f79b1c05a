"""What was computed before is used again: routers know it, and conversations come back to their worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pdq.client import Client, new_request_id
from pdq.settings import LimitSettings

from tests.ask import Answer, ask, follow_to_end, read_all
from tests.integration.test_faults import continued_from
from tests.integration.test_lifecycle import until
from tests.integration.test_metrics import value
from tests.integration.test_orders import body, ran
from tests.stack import MODEL, Service, Stack

CHUNK = 32
LIMITS = LimitSettings(ack_wait_s=2.0, worker_ttl_s=3.0)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LIMITS)
    yield stack
    stack.stop()


def decoders(stack: Stack, count: int, **settings: str) -> dict[str, Service]:
    """Decode workers by their names."""
    named = [f"d{number}" for number in range(count)]
    return {name: stack.add("pdq_decode", PDQ_WORKER_ID=name, **settings) for name in named}


def decoded_by(answer: Answer) -> str:
    """The worker that claimed decode last."""
    states = [event.state for event in answer.events if event.state is not None]
    return [state.worker for state in states if state.event == "claim" and state.stage == "decode"][-1]


def preferred(services: dict[str, Service], result: str) -> float:
    return sum(value(service, "pdq_decode_preference_total", result=result) for service in services.values())


def told(number: int, size: int = CHUNK) -> list[int]:
    """Token ids that nobody else says."""
    return [256 + (number * 97 + place) % 1700 for place in range(size)]


class Chat:
    """A conversation in token ids: each prompt is all that was said, and something new."""

    def __init__(self, begin: list[int]) -> None:
        self.said = begin

    async def turn(self, client: Client, new: list[int], tokens: int = 8, **options: Any) -> Answer:
        self.said = self.said + new
        answer = await ask(client, body(self.said, max_tokens=tokens), **options)
        self.said = self.said + answer.transcript.ids
        return answer


@pytest.mark.parametrize("order", ["prefill-first", "decode-only"])
async def test_a_conversation_comes_back_to_its_worker(stack: Stack, order: str) -> None:
    """Two routers, of which either may take a turn; three idle workers, of which the broker would take any."""
    routers = [stack.add("pdq_router"), stack.add("pdq_router")]
    stack.add("pdq_prefill")
    services = decoders(stack, 3)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    chats = [Chat(told(number)) for number in range(4)]
    last: dict[Chat, str] = {}
    hits, strangers = 0, []
    for turn in range(4):
        for number, chat in enumerate(chats):
            worker = decoded_by(await chat.turn(client, told(100 + 10 * turn + number), order=order))
            hits += worker == last.get(chat)
            last[chat] = worker
            await asyncio.sleep(0.03)
    for number in range(9):
        strangers.append(decoded_by(await ask(client, body(told(500 + number)), order=order)))
        await asyncio.sleep(0.03)
    await bus.close()
    passed = preferred(services, "passed")
    print(f"{order}: {hits} of 12 turns met their worker; passed on {passed:g} times; strangers at {strangers}")
    assert len(set(strangers)) == 3, "control: who prefers nobody is served by whoever comes next"
    assert hits >= 10
    assert passed > 0, "all of it by chance?"
    assert preferred(services, "kept") >= hits
    assert all(value(router, "pdq_route_decisions_total") for router in routers), "control: both routers had turns"
    assert sum(value(service, "pdq_redeliveries_total") for service in services.values()) == 0
    assert stack.metric(services["d0"], "pdq_dead_letters_total") == 0


async def test_a_dead_worker_is_not_waited_for(stack: Stack) -> None:
    stack.add("pdq_router")
    services = decoders(stack, 3)
    await stack.start()
    bus = await stack.connect()
    client, chat = Client(bus, "local"), Chat(told(1))
    dead = decoded_by(await chat.turn(client, told(2), order="decode-only"))
    services.pop(dead).kill()
    # Its beat is still there: for some seconds it passes for alive.
    before = asyncio.get_running_loop().time()
    answer = await chat.turn(client, told(3), order="decode-only", seconds=10)
    took = asyncio.get_running_loop().time() - before
    again = await chat.turn(client, told(4), order="decode-only")
    await bus.close()
    assert decoded_by(answer) in services and took < LIMITS.ack_wait_s + 3
    assert preferred(services, "spilled") == 1
    assert decoded_by(again) == decoded_by(answer), "now it prefers the one that took over"


async def test_a_busy_worker_is_not_waited_for(stack: Stack) -> None:
    stack.add("pdq_router")
    decoders(stack, 2, PDQ_WORKER_SLOTS="1", PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100*4")
    await stack.start()
    bus = await stack.connect()
    client, chat = Client(bus, "local"), Chat(told(1))
    await chat.turn(client, told(2), order="decode-only")
    # A long answer of the same conversation takes the only slot of its worker.
    long = new_request_id()
    await client.submit(body(chat.said, max_tokens=400), model=MODEL, request=long, order="decode-only")

    async def claimed() -> bool:
        return "claim" in (await read_all(client, long)).story

    await until(claimed)
    busy = decoded_by(await read_all(client, long))
    answer = await chat.turn(client, told(3), order="decode-only", seconds=20)
    ended = (await read_all(client, long)).terminal
    await client.cancel(long)
    await follow_to_end(client, long)
    await bus.close()
    assert decoded_by(answer) != busy
    assert not ended, "control: the long answer was still being made"


async def test_a_known_prompt_is_not_prefilled_again(stack: Stack) -> None:
    """`auto` goes by what is likely cached; another tenant's equal prompt is not."""
    stack.add("pdq_router", PDQ_ROUTER_ORDER="auto")
    stack.add("pdq_prefill")
    decoders(stack, 1)
    await stack.start()
    bus = await stack.connect()
    client, stranger = Client(bus, "local"), Client(bus, "other")
    prompt = told(1, 20 * CHUNK)
    first = await ask(client, body(prompt))
    again = await ask(client, body(prompt + told(2, 5)))
    shares = await ask(client, body(prompt[: 10 * CHUNK] + told(3, 10 * CHUNK)))
    other = await ask(stranger, body(prompt))
    await bus.close()
    assert (first.state.order, first.state.reason) == ("prefill-first", "long_prompt")
    assert (again.state.order, again.state.reason) == ("decode-only", "cached")
    assert other.state.reason != "cached"
    cached = [inputs(answer)["cached_tokens"] for answer in (first, again, shares, other)]
    assert cached == [0, 20 * CHUNK, 10 * CHUNK, 0]
    assert again.state.kv.loaded_tokens == 20 * CHUNK
    own = 20 * CHUNK - 1 if other.state.order == "prefill-first" else 0
    assert other.state.kv.loaded_tokens == own, "from its own prefill, if any: all but the last token"
    assert first.state.prefix and first.state.prefix != other.state.prefix


def inputs(answer: Answer) -> dict[str, float]:
    (found,) = [event.state.inputs for event in answer.events if event.state is not None and event.state.inputs]
    return found


def whole(num_tokens: int) -> int:
    return num_tokens // CHUNK * CHUNK


SAVES = {"PDQ_KV_SAVE_DECODE": "true"}


async def test_each_turn_finds_the_one_before_across_workers_and_restarts(stack: Stack) -> None:
    """Five turns over two decode workers, of which none is left after the third."""
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    decoders(stack, 2, **SAVES)
    await stack.start()
    bus = await stack.connect()
    client, chat = Client(bus, "local"), Chat(told(1, 50))
    before, found = 1, []
    for turn in range(5):
        if turn == 3:
            for service in stack.services[1:]:
                service.stop()
            for service in stack.services[1:]:
                service.start()
            for service in stack.services[1:]:
                service.wait_ready()
        answer = await chat.turn(client, told(10 + turn, 21), tokens=45, order="decode-only")
        found.append((answer.state.kv.loaded_tokens, whole(before - 1)))
        before = len(chat.said)
    await bus.close()
    assert [loaded for loaded, _ in found] == [expected for _, expected in found]
    assert found[0] == (0, 0) and found[4][1] > found[1][1] >= 3 * CHUNK


async def test_without_it_an_answer_is_computed_again(stack: Stack) -> None:
    """Control for the test above: only the prompts that prefill stored are found."""
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    decoders(stack, 1)
    await stack.start()
    bus = await stack.connect()
    client, chat = Client(bus, "local"), Chat(told(1, 50))
    await chat.turn(client, told(2, 21), tokens=45)
    answer = await chat.turn(client, told(3, 21), tokens=45, order="decode-only")
    await bus.close()
    assert answer.state.kv.loaded_tokens == whole(71)


async def test_a_system_prompt_is_shared_by_one_tenants_requests_and_by_no_other(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_prefill")
    decoders(stack, 2, **SAVES)
    await stack.start()
    bus = await stack.connect()
    system = told(1, 4 * CHUNK)
    loaded = {}
    for tenant in ("one", "two"):
        client = Client(bus, tenant)
        for number in range(3):
            answer = await ask(client, body(system + told(10 + number, 40)), order="decode-only")
            loaded[tenant, number] = answer.state.kv.loaded_tokens
    again = await ask(Client(bus, "two"), body(system + told(11, 40)), order="decode-only")
    await bus.close()
    expected = (0, len(system), len(system))
    assert loaded == {(tenant, number): expected[number] for tenant in ("one", "two") for number in range(3)}
    assert again.state.kv.loaded_tokens == whole(len(system) + 40), "control: the very same prompt"


@pytest.mark.parametrize("saves", [True, False])
async def test_a_crashed_answer_goes_on_from_what_was_saved(stack: Stack, saves: bool) -> None:
    """The only decode worker dies after 100 tokens, and another one comes."""
    stack.add("pdq_router")
    settings = {"PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100", **(SAVES if saves else {})}
    dies = stack.add("pdq_decode", PDQ_ENGINE_SIM_FAULTS="decode.exit_after=100", **settings)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    asking = asyncio.create_task(ask(client, body(told(2, 70), max_tokens=150), order="decode-only", seconds=60))
    assert dies.process is not None
    await asyncio.to_thread(dies.process.wait, 30)
    stack.add("pdq_decode", **settings).start()
    answer = await asking
    await bus.close()
    shown = await continued_from(stack)
    assert (answer.terminal, answer.state.decode.attempt) == (["finished"], 2)
    assert 50 < shown <= 100
    # The chunk that filled last may not have been stored in time.
    most = whole(70 + shown - 1)
    assert answer.state.kv.loaded_tokens in ((most, most - CHUNK) if saves else (0,))


SLOW_SLOTS = {"PDQ_WORKER_SLOTS": "1", "PDQ_ENGINE_SIM_PROFILE": "llama3-8b-h100"}


@pytest.mark.parametrize("mode", ["pool", "host"])
async def test_what_waits_is_staged_once_where_it_may_be_decoded(stack: Stack, mode: str) -> None:
    """Two workers whose only slots are taken, and three handoffs that wait. Control: one tier for all."""
    stack.add("pdq_router")
    stack.add("pdq_prefill", PDQ_KV_MODE=mode)
    services = decoders(stack, 2, **SLOW_SLOTS, PDQ_KV_MODE=mode)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    long = [await submitted(client, body(told(number), max_tokens=1500)) for number in range(2)]

    async def both_are_busy() -> bool:
        return all([value(service, "pdq_worker_busy_slots") == 1 for service in services.values()])

    await until(both_are_busy)
    waiting = [await submitted(client, body(told(10 + number, 3 * CHUNK))) for number in range(3)]

    async def all_are_staged() -> bool:
        return sum(ran(service, "prompts_staged") for service in services.values()) == 3

    if mode == "pool":
        await until(all_are_staged)
    else:
        await until_story(client, waiting, "prefilled")
    for request in long:
        await client.cancel(request)
    answers = [await follow_to_end(client, request) for request in waiting]
    await bus.close()
    assert all(answer.terminal == ["finished"] for answer in answers)
    counted = sum(value(service, "pdq_kv_staged_tokens_total") for service in services.values())
    assert counted == (3 * 3 * CHUNK if mode == "pool" else 0)


async def submitted(client: Client, prompt: bytes) -> str:
    request = new_request_id()
    await client.submit(prompt, model=MODEL, request=request)
    return request


async def until_story(client: Client, requests: list[str], event: str) -> None:
    async def told() -> bool:
        return all([event in (await read_all(client, request)).story for request in requests])

    await until(told)
