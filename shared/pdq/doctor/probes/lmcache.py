"""Asks LMCache servers over their HTTP ports."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import aiohttp
from msgspec.structs import replace

from pdq.addresses import is_loopback
from pdq.doctor.facts import Cache, Worker
from pdq.doctor.probes.sockets import listeners
from pdq.up.record import Record

TIMEOUT_S = 2.0


class Address(NamedTuple):
    host: str
    port: int
    http_port: int


def of_stack(record: Record | None, host: str) -> set[Address]:
    """The servers that a local stack runs."""
    processes = record.processes if record is not None else []
    return {
        Address(host, process.ports["lmcache"], process.ports["http"])
        for process in processes
        if "lmcache" in process.ports and "http" in process.ports
    }


def of_workers(workers: tuple[Worker, ...], hostname: str) -> set[Address]:
    """The servers that live workers name, as far as they can be reached from here: a worker's loopback is its own."""
    found = set()
    for worker in workers:
        about = worker.beat.about
        if worker.server and (not is_loopback(about["kv.host"]) or about.get("host") == hostname):
            found.add(Address(about["kv.host"], int(about["kv.port"]), int(about["kv.http_port"])))
    return found


async def ask(addresses: set[Address]) -> tuple[Cache, ...]:
    """All of them at once; one that does not answer within TIMEOUT_S has its `error` set. Raises nothing."""
    return tuple(await asyncio.gather(*(_ask(address) for address in sorted(addresses))))


async def _ask(address: Address) -> Cache:
    local = is_loopback(address.host)
    ports = (address.port, address.http_port) if local else ()
    silent = Cache(host=address.host, port=address.port, http_port=address.http_port, listens=listeners(*ports))
    url = f"http://{address.host}:{address.http_port}"
    try:
        async with asyncio.timeout(TIMEOUT_S), aiohttp.ClientSession(url) as session:
            status, version = await asyncio.gather(_get(session, "/status"), _get(session, "/version"))
            config = await _shown(session, "/config")
    except TimeoutError:
        return replace(silent, error=f"no answer at port {address.http_port} within {TIMEOUT_S:g} s")
    except aiohttp.ClientResponseError as exc:
        return replace(silent, error=f"port {address.http_port}: {exc.request_info.url.path} is {exc.status}")
    except (aiohttp.ClientError, ValueError, OSError) as exc:
        return replace(silent, error=f"port {address.http_port}: {type(exc).__name__}")
    return replace(silent, status=status, config=config, version=str(version))


async def _shown(session: aiohttp.ClientSession, path: str) -> Any:
    """None where there is no such route."""
    try:
        return await _get(session, path)
    except aiohttp.ClientResponseError:
        return None


async def _get(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as answer:
        answer.raise_for_status()
        return await answer.json(content_type=None)
