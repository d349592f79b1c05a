"""Accounts and roles on a real broker: with their own keys all do their work. What they may not do: test_denied.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from pdq import operators
from pdq.client import Client
from pdq.tenants import Store

from tests.ask import ask, follow_to_end, read_all
from tests.secured import SecuredStack
from tests.stack import MODEL, chat

REFUSED_BY_BROKER = "violation"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredStack]:
    """Shared by the tests of this module, none of which may break it."""
    stack = SecuredStack(tmp_path_factory.mktemp("secured"), ("acme",))
    for module in ("pdq_router", "pdq_prefill", "pdq_decode", "pdq_worker", "pdq_gateway"):
        stack.add(module)
    asyncio.run(stack.start())
    yield stack
    stack.stop()
    # Nobody of us tried what he may not: the rights are no less than what the code does.
    assert REFUSED_BY_BROKER not in (stack.directory / "nats.log").read_text().lower()


@pytest.fixture
async def acme(stack: SecuredStack) -> AsyncIterator[Client]:
    bus = await stack.connect("acme")
    yield Client(bus, "acme")
    await bus.close()


def pdq(stack: SecuredStack, name: str, *arguments: str, tenant: str = "acme") -> subprocess.CompletedProcess[str]:
    """Run a command as a role or tenant."""
    environment = stack.command(name, PDQ_TENANT=tenant)
    command = [sys.executable, "-m", "pdq", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def told(done: subprocess.CompletedProcess[str]) -> Any:
    """What a command that went well says as JSON."""
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


# ---- a tenant


@pytest.mark.parametrize("order", ["prefill-first", "decode-first", "decode-only"])
async def test_a_tenant_is_answered(acme: Client, order: str) -> None:
    answer = await ask(acme, chat("hello", max_tokens=20, ignore_eos=True), order=order)
    assert answer.terminal == ["finished"] and len(answer.transcript.ids) == 20
    again = await read_all(acme, answer.request)
    assert again.transcript.digest() == answer.transcript.digest()


async def test_a_tenant_cancels_and_purges(acme: Client) -> None:
    submitted = await acme.submit(chat("hello", max_tokens=2_000, ignore_eos=True), model=MODEL)
    assert (await acme.cancel(submitted.request)).state is not None
    assert (await acme.purge(submitted.request)).error is None
    assert await acme.state(submitted.request) is None


def test_the_command_line_works_for_a_tenant(stack: SecuredStack) -> None:
    answer = told(pdq(stack, "acme", "submit", "--json", "--max-tokens", "5", "hello"))
    assert pdq(stack, "acme", "attach", answer["id"]).returncode == 0
    assert pdq(stack, "acme", "status", answer["id"]).returncode == 0
    assert pdq(stack, "acme", "explain", answer["id"]).returncode == 0
    assert pdq(stack, "acme", "purge", answer["id"]).returncode == 0


def test_a_tenant_sends_a_batch(stack: SecuredStack) -> None:
    lines = [{"messages": [{"role": "user", "content": f"hello {n}"}], "max_tokens": 4} for n in range(3)]
    (stack.directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = stack.directory / "out.jsonl"
    assert pdq(stack, "acme", "batch", str(stack.directory / "in.jsonl"), "-o", str(out)).returncode == 0
    assert [json.loads(line)["response"]["status_code"] for line in out.read_text().splitlines()] == [200] * 3


# ---- the gateway's and the operators' roles


async def test_the_gateway_asks_for_any_tenant(stack: SecuredStack) -> None:
    bus = await stack.connect("gateway")
    client = Client(bus, "globex")
    answer = await ask(client, chat("hello", max_tokens=8))
    assert (await follow_to_end(client, answer.request)).transcript.digest() == answer.transcript.digest()
    await bus.close()


async def test_the_gateway_serves_tenants_by_their_api_keys(stack: SecuredStack) -> None:
    (gateway,) = [service for service in stack.services if service.module == "pdq_gateway"]
    bus = await stack.connect("operator")
    key = (await Store(bus).add("acme")).key
    await bus.close()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=gateway.api, headers={"Authorization": f"Bearer {key}"}) as http:
        answer = await http.post("/chat/completions", json=body, timeout=30)
        for _ in range(50):
            if answer.status_code != 401:
                break
            # A new key is known within a second.
            await asyncio.sleep(0.1)
            answer = await http.post("/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8


def test_an_operator_sees_workers_and_queues(stack: SecuredStack) -> None:
    workers = told(pdq(stack, "operator", "workers", "--json"))["workers"]
    assert {worker["stage"] for worker in workers} == {"prefill", "decode"} and len(workers) == 4
    assert told(pdq(stack, "operator", "status", "--json"))["queues"]
    # Of the machine it may find fault.
    doctor = pdq(stack, "operator", "doctor", "--json")
    findings = {one["check"]: one["severity"] for one in json.loads(doctor.stdout)["findings"]}
    assert {findings[name] for name in ("broker.reachable", "broker.jetstream", "broker.payload")} == {"ok"}


def test_a_monitor_sees_as_much(stack: SecuredStack) -> None:
    assert len(told(pdq(stack, "monitor", "workers", "--json"))["workers"]) == 4
    assert told(pdq(stack, "monitor", "status", "--json"))["queues"]


def test_init_may_be_run_again(stack: SecuredStack) -> None:
    assert set(told(pdq(stack, "init", "init", "--json"))["made"].values()) == {"unchanged"}


async def test_an_operator_looks_after_dead_letters(stack: SecuredStack, acme: Client) -> None:
    submitted = await acme.submit(b"{not json", model=MODEL)
    failed = await follow_to_end(acme, submitted.request)
    assert failed.terminal == ["failed"]
    bus = await stack.connect("operator")
    (letter,) = [one for one in await operators.dead_letters(bus) if one.letter.request == submitted.request]
    again = await operators.replay(bus, letter)
    assert (await follow_to_end(acme, again.request)).terminal == ["failed"]
    await operators.drop(bus, letter.seq)
    assert await operators.dead_letter(bus, letter.seq) is None
    await bus.close()


def test_an_operator_keeps_tenants(stack: SecuredStack) -> None:
    assert pdq(stack, "operator", "tenant", "add", "initech").returncode == 0
    assert "initech" in pdq(stack, "operator", "tenant", "list").stdout
    assert pdq(stack, "operator", "tenant", "revoke", "initech").returncode == 0


async def test_an_operator_drains_a_worker(stack: SecuredStack) -> None:
    worker = stack.add("pdq_decode", PDQ_WORKER_ID="one-more")
    worker.start()
    worker.wait_ready()
    assert pdq(stack, "operator", "drain", "one-more").returncode == 0
    assert worker.process is not None and worker.process.wait(20) == 0
