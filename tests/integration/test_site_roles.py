"""A site on real brokers, over TLS, with keys for everybody: with the rights of their roles all do their work. What
they may not do: test_site_isolation.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from pdq.client import Client
from pdq.tenants import Store

from tests.ask import ask
from tests.certificates import Authority
from tests.site import KeyedHub, Site
from tests.stack import MODEL, chat

REFUSED_BY_BROKER = "violation"
NAME = "plant"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Shared by the tests of this module, none of which may break it."""
    directory = tmp_path_factory.mktemp("hub")
    hub = KeyedHub(directory, (NAME,), authority=Authority(directory, "ours"))
    site = Site(hub, NAME)
    for module in ("pdq_router", "pdq_worker"):
        hub.add(module)
    for module in ("pdq_forwarder", "pdq_gateway"):
        site.add(module)
    try:
        asyncio.run(start(hub, site))
        yield site
    finally:
        site.stop()
        hub.stop()
    # Nobody of us tried what he may not: the rights are no less than what the code does.
    for stack in (site, hub):
        assert REFUSED_BY_BROKER not in (stack.directory / "nats.log").read_text().lower()


async def start(hub: KeyedHub, site: Site) -> None:
    await hub.start()
    await site.start()


@pytest.fixture
async def client(site: Site) -> AsyncIterator[Client]:
    bus = await site.connect()
    yield Client(bus, NAME)
    await bus.close()


def pdq(site: Site, role: str, *arguments: str) -> Any:
    """What a command at the site, as a role, says as JSON."""
    environment = {"PDQ_NATS_URL": site.url, "PDQ_NATS_NKEY_SEED": site.seeds[role], "PDQ_TENANT": NAME}  # type: ignore[index]
    environment |= {"PDQ_HOME": str(site.directory / "home"), "PDQ_MODELS": str(site.directory / "models.toml")}
    command = [sys.executable, "-m", "pdq", *arguments, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


async def test_a_client_is_answered(client: Client) -> None:
    answer = await ask(client, chat("hello", max_tokens=20, ignore_eos=True))
    assert answer.terminal == ["finished"] and len(answer.transcript.ids) == 20


async def test_a_client_cancels_and_purges(client: Client) -> None:
    submitted = await client.submit(
        chat("hello", max_tokens=2_000, ignore_eos=True), model=MODEL, request="r-cancelled"
    )
    await client.abandon(submitted.request, within_s=10)
    state = await client.state(submitted.request)
    assert state is not None and state.ended
    assert (await client.purge(submitted.request)).error is None
    assert await client.state(submitted.request) is None


def test_the_command_line_works(site: Site) -> None:
    answer = pdq(site, "client", "submit", "--max-tokens", "5", "hello")
    assert pdq(site, "client", "status", answer["id"])["id"] == answer["id"]
    assert pdq(site, "init", "init", "--edge")["made"]


async def test_the_sites_gateway_serves_by_the_sites_own_api_keys(site: Site) -> None:
    (gateway,) = [service for service in site.services if service.module == "pdq_gateway"]
    bus = await site.connect("operator")
    key = (await Store(bus).add(NAME)).key
    await bus.close()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=gateway.api, headers={"Authorization": f"Bearer {key}"}, timeout=30) as http:
        answer = await http.post("/chat/completions", json=body)
        for _ in range(50):
            if answer.status_code != 401:
                break
            # A new key is known within a second.
            await asyncio.sleep(0.1)
            answer = await http.post("/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8


def test_an_operator_sees_what_waits_and_keeps_the_keys(site: Site) -> None:
    assert pdq(site, "operator", "status")["site"] == {"waiting": 0}
    assert pdq(site, "operator", "tenant", "add", NAME)["key"]
    assert [one["tenant"] for one in pdq(site, "operator", "tenant", "list")["tenants"]] == [NAME]
