"""What `auto` chooses, by what is alive and by what workers have measured; and what `pdq explain` tells of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdq import operators
from pdq.cli import exits
from pdq.client import Client
from pdq.settings import LimitSettings

from tests.ask import Answer, ask
from tests.integration.test_lifecycle import until
from tests.integration.test_metrics import value
from tests.integration.test_orders import body, fell_back
from tests.stack import Stack

LIMITS = LimitSettings(ack_wait_s=1.0, worker_ttl_s=2.0)
AUTO = {"PDQ_ROUTER_ORDER": "auto"}
FAST, SLUGGISH = "llama3-8b-h100*0.2", "llama3-8b-h100*20"
"""Under 5 ms and over 300 ms a prompt of 300 tokens."""


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    stack = Stack(tmp_path, limits=LIMITS)
    yield stack
    stack.stop()


async def test_without_a_prefill_worker_it_falls_back_and_says_so(stack: Stack) -> None:
    router, decode = stack.add("pdq_router", **AUTO), stack.add("pdq_decode")
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    answer = await ask(client, body("k" * 300))
    asked = await ask(client, body("k" * 300), order="decode-only")
    await bus.close()
    assert answer.story == asked.story == ["accepted", "routed", "claim", "finished"]
    assert (answer.state.order, answer.state.reason) == ("decode-only", "no_prefill_worker")
    assert inputs_of(answer)["prefill_workers"] == 0 and inputs_of(answer)["decode_workers"] == 1
    assert fell_back(router, "no_prefill_worker") == 1, "what was asked for is no fall-back"
    assert fell_back(decode, "no_prefill_worker") == 0
    assert value(router, "pdq_route_decisions_total", order="decode-only", reason="no_prefill_worker") == 1


def inputs_of(answer: Answer) -> dict[str, float]:
    (found,) = [event.state.inputs for event in answer.events if event.state is not None and event.state.inputs]
    return found


async def test_until_costs_are_measured_it_goes_by_the_length_of_the_prompt(stack: Stack) -> None:
    router, *_ = (stack.add(module, **AUTO) for module in ("pdq_router", "pdq_prefill", "pdq_decode"))
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    # All at once: none of them has been measured when the next is routed.
    short, long, wished = await asyncio.gather(
        ask(client, body("s" * 255)), ask(client, body("l" * 256)), ask(client, body("w" * 256), order="auto")
    )
    await bus.close()
    assert (short.state.order, short.state.reason) == ("decode-only", "short_prompt")
    assert [(a.state.order, a.state.reason) for a in (long, wished)] == [("prefill-first", "long_prompt")] * 2
    assert long.state.kv.loaded_tokens == 255
    assert fell_back(router, "no_prefill_worker") == 0, "a short prompt is no fall-back"


@pytest.mark.parametrize(
    ("prefill", "decode", "order", "reason"),
    [(FAST, SLUGGISH, "prefill-first", "prefill_sooner"), (SLUGGISH, FAST, "decode-only", "decode_sooner")],
)
async def test_it_goes_by_what_workers_have_measured(
    stack: Stack, prefill: str, decode: str, order: str, reason: str
) -> None:
    stack.add("pdq_router", **AUTO)
    stack.add("pdq_prefill", PDQ_ENGINE_SIM_PROFILE=prefill)
    stack.add("pdq_decode", PDQ_ENGINE_SIM_PROFILE=decode)
    await stack.start()
    bus = await stack.connect()
    client = Client(bus, "local")
    await ask(client, body("one" * 100, max_tokens=2), order="prefill-first")
    await ask(client, body("two" * 100, max_tokens=2), order="decode-only")

    async def measured() -> bool:
        beats = {beat.stage: beat.costs for beat in await operators.workers(bus)}
        here, there = beats["decode"], beats["prefill"]
        return bool(here.prompt_tokens_s and here.load_bytes_s and there.prompt_tokens_s and there.store_bytes_s)

    await until(measured)
    # The router looks once a second.
    await asyncio.sleep(1.5)
    answer = await ask(client, body("six" * 100, max_tokens=2))
    await bus.close()
    told = json.loads(await pdq(stack, "explain", answer.request, "--json"))
    shown = await pdq(stack, "explain", answer.request)
    assert (answer.state.order, answer.state.reason) == (order, reason)
    inputs = inputs_of(answer)
    prefill_is_faster = inputs["prefill_prompt_tokens_s"] > inputs["decode_prompt_tokens_s"]
    prefill_is_sooner = inputs["estimate_prefill_first_s"] < inputs["estimate_decode_only_s"]
    assert prefill_is_faster == prefill_is_sooner == (reason == "prefill_sooner")
    assert told["estimates_ms"]["decode-only"] == round(inputs["estimate_decode_only_s"] * 1e3, 3)
    assert f"{order} ({reason})" in shown and "estimated to the first token" in shown


async def pdq(stack: Stack, *arguments: str) -> str:
    """A command's stdout. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pdq", *arguments]
    environment = stack.environment("cli", PDQ_NATS_URL=stack.url)
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return str(done.stdout)


async def test_explain_tells_of_a_prompt_that_decode_computed_itself(stack: Stack) -> None:
    stack.add("pdq_router")
    stack.add("pdq_decode")
    await stack.start()
    bus = await stack.connect()
    answer = await ask(Client(bus, "local"), body(), order="decode-first")
    await bus.close()
    shown = await pdq(stack, "explain", answer.request)
    assert "decode-first (requested)" in shown and "decode computed the prompt itself (no_prefill_worker)" in shown
    with pytest.raises(subprocess.CalledProcessError) as refused:
        await pdq(stack, "explain", "r-unknown")
    assert refused.value.returncode == exits.USAGE and refused.value.stderr.startswith("pdq: not_found: ")
