"""Tenants and their keys, in a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pdq import subjects
from pdq.bus import Bus
from pdq.errors import Misconfigured, Rejected, Unauthorized
from pdq.messages import encode_json
from pdq.settings import BusSettings
from pdq.tenants import Directory, Limits, Store
from pdq.tenants.directory import REFRESH_S
from pdq.tenants.records import digest_of

from tests.broker import Broker

SOON_S = REFRESH_S + 9.0
"""A round trip on a busy machine."""


@asynccontextmanager
async def directory_of(bus: Bus) -> AsyncIterator[Directory]:
    """One that follows the bucket."""
    directory = Directory(bus)
    await directory.start()
    running = asyncio.create_task(directory.run())
    yield directory
    running.cancel()


def tenant_of(directory: Directory, key: str) -> str | None:
    try:
        return directory.tenant_of(key)
    except Unauthorized:
        return None


async def soon(directory: Directory, key: str, tenant: str | None) -> None:
    """Wait until a key is of this tenant, in time."""
    async with asyncio.timeout(SOON_S):
        while tenant_of(directory, key) != tenant:
            await asyncio.sleep(0.02)


async def test_a_key_counts_as_soon_as_it_is_there_until_it_is_revoked(bus: Bus) -> None:
    store = Store(bus)
    first = await store.add("acme", label="one", limits={"requests_in_flight": 3})
    async with directory_of(bus) as directory:
        assert directory.tenant_of(first.key) == "acme"
        assert directory.limits("acme") == Limits(requests_in_flight=3)
        second, other = await store.add("acme"), await store.add("other")
        await soon(directory, second.key, "acme")
        await soon(directory, other.key, "other")
        await store.revoke_key("acme", first.key[:10])
        await soon(directory, first.key, None)
        assert directory.tenant_of(second.key) == "acme"
        await store.revoke("acme")
        await soon(directory, second.key, None)
        assert directory.tenant_of(other.key) == "other" and directory.any_seen
        # A tenant that was revoked gets a new key, and no old one comes back.
        third = await store.add("acme")
        await soon(directory, third.key, "acme")
        assert tenant_of(directory, first.key) is tenant_of(directory, second.key) is None
        assert directory.limits("acme") == Limits(requests_in_flight=3)


async def test_a_directory_pages_through_many_keys(bus: Bus) -> None:
    store = Store(bus)
    keys = [(await store.add(f"t{number % 7}", label=str(number))).key for number in range(5)]
    record = (await store.known())[0].keys[0]
    many = 1_300
    await asyncio.gather(
        *(bus.publish(subjects.key_record(digest_of(f"pdq_{n}")), encode_json(record)) for n in range(many))
    )
    last = (await store.add("last")).key
    async with directory_of(bus) as directory:
        assert [directory.tenant_of(key) for key in keys] == ["t0", "t1", "t2", "t3", "t4"]
        assert {directory.tenant_of(f"pdq_{n}") for n in range(many)} == {"t0"}
        assert directory.tenant_of(last) == "last"
        assert directory.names == {"t0", "t1", "t2", "t3", "t4", "last"}


async def test_what_other_tools_delete_or_purge_is_no_key(bus: Bus) -> None:
    """`nats kv del`, a purge of the stream, another bucket in its place: keys end, and stay needed."""
    store = Store(bus)
    one, two, three = [(await store.add("acme")).key for _ in range(3)]
    async with directory_of(bus) as directory:
        await bus.publish(subjects.key_record(digest_of(one)), b"", headers={"KV-Operation": "DEL"})
        await soon(directory, one, None)
        await bus.purge(subjects.TENANTS, subjects.key_record(digest_of(two)))
        await soon(directory, two, None)
        assert directory.tenant_of(three) == "acme"
        info = await bus.stream_info(subjects.TENANTS)
        assert info is not None
        await bus.api(f"STREAM.DELETE.{subjects.TENANTS}")
        await asyncio.sleep(REFRESH_S * 1.5)
        assert directory.tenant_of(three) == "acme", "a bucket that cannot be read changes nothing"
        await bus.api(f"STREAM.CREATE.{subjects.TENANTS}", info["config"])
        fresh = (await store.add("new")).key
        await soon(directory, three, None)
        await soon(directory, fresh, "new")
        await bus.purge(subjects.TENANTS, subjects.ALL_TENANTS)
        await soon(directory, fresh, None)
        assert directory.any_seen and not directory.names


async def test_a_directory_serves_while_the_broker_is_away(broker: Broker, bus: Bus) -> None:
    store = Store(bus)
    key = (await store.add("acme")).key
    async with directory_of(bus) as directory:
        broker.kill()
        await asyncio.sleep(REFRESH_S * 1.5)
        assert directory.tenant_of(key) == "acme"
        broker.start()
        async with asyncio.timeout(20):
            while not bus.connected:
                await asyncio.sleep(0.05)
        await store.revoke("acme")
        async with asyncio.timeout(10):  # a question that was under way has its own bound
            while tenant_of(directory, key) is not None:
                await asyncio.sleep(0.05)


async def test_without_its_bucket_a_directory_names_init(broker: Broker) -> None:
    bus = await Bus.connect(BusSettings(url=broker.url), "test")
    with pytest.raises(Misconfigured, match=f"{subjects.TENANTS}.*pdq init"):
        await Directory(bus).start()
    await bus.close()


async def test_two_operators_at_one_time_lose_nothing(bus: Bus) -> None:
    store = Store(bus)
    names = ["requests_in_flight", "tokens_in_flight", "requests_queued", "requests_per_minute", "tokens_per_minute"]
    added = await asyncio.gather(*(store.add("acme", limits={name: place + 1}) for place, name in enumerate(names)))
    known = await store.one("acme")
    assert known.tenant.limits.set() == {name: place + 1 for place, name in enumerate(names)}
    assert len({one.key for one in added}) == len(known.valid_keys) == len(names)


async def test_a_beginning_that_names_several_keys_or_none_revokes_nothing(bus: Bus) -> None:
    store = Store(bus)
    one, two = await store.add("acme"), await store.add("acme")
    stranger = await store.add("other")
    for begin, said in (("pdq_", "2 keys"), ("", "no key"), ("pdq_*", "no key"), (stranger.key, "no key")):
        with pytest.raises(Rejected, match=said) as refused:
            await store.revoke_key("acme", begin)
        assert stranger.key not in str(refused.value)
    assert len((await store.one("acme")).valid_keys) == 2
    # Whoever finds a whole key may revoke it.
    assert (await store.revoke_key("acme", one.key)).prefix == one.record.prefix
    with pytest.raises(Rejected, match="no valid key"):
        await store.revoke_key("acme", one.key)
    assert [key.prefix for key in (await store.one("acme")).valid_keys] == [two.record.prefix]


# ---- the command line


def pdq(broker: Broker, home: Path, *arguments: str) -> tuple[int, str, str]:
    """Its exit code, stdout and stderr."""
    environment = {"PATH": os.environ["PATH"], "PDQ_NATS_URL": broker.url, "PDQ_HOME": str(home)}
    command = [sys.executable, "-m", "pdq", "tenant", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


async def test_the_command_line_shows_a_key_once(broker: Broker, bus: Bus, tmp_path: Path) -> None:
    async def run(*arguments: str) -> tuple[int, str, str]:
        return await asyncio.to_thread(pdq, broker, tmp_path, *arguments)

    code, out, said = await run("add", "acme", "--label", "for tests", "--requests-per-minute", "60")
    key = out.strip()
    assert code == 0 and key.startswith("pdq_") and out == f"{key}\n" and key not in said
    _, out, _ = await run("add", "acme", "--tokens-in-flight", "4000", "--json")
    added = json.loads(out)
    assert added["limits"] == {"requests_per_minute": 60, "tokens_in_flight": 4000}
    shown = [
        await run("list"),
        await run("list", "--json"),
        await run("show", "acme"),
        await run("show", "acme", "--json"),
    ]
    assert all(code == 0 and key not in out + said and added["key"] not in out for code, out, said in shown)
    assert all("acme" in out for _, out, _ in shown) and key[:12] in shown[2][1] and "for tests" in shown[2][1]
    keys = json.loads(shown[3][1])["keys"]
    assert [(one["prefix"], one["status"]) for one in keys] == [(key[:12], "valid"), (added["prefix"], "valid")]
    code, _, said = await run("revoke", "acme", "--key", key[:9])
    assert code == 0 and key[:12] in said
    code, out, _ = await run("revoke", "acme", "--json")
    assert code == 0 and json.loads(out) == {"tenant": "acme", "revoked": [added["prefix"]]}
    for arguments in (["show", "nobody"], ["revoke", "nobody"], ["limit", "nobody", "--tokens-per-minute", "1"]):
        code, out, said = await run(*arguments)
        assert code == 2 and out == "" and said.startswith("pdq: not_found: there is no tenant nobody")
    code, _, said = await run("add", "a b")
    assert code == 2 and "must match" in said
    for stored in await bus.read(subjects.TENANTS, subjects.ALL_TENANTS):
        assert key not in f"{stored}" and added["key"] not in f"{stored}"
