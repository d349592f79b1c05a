"""LMCache servers: whether they answer, fit their engines, have room, and are closed to others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdq.addresses import is_loopback
from pdq.doctor.facts import Cache, Facts
from pdq.doctor.finding import Finding, fail, ok, warn

FULL_SHARE = 0.99
"""The first tier evicts from its watermark (0.8) on: more than this means that nothing can be evicted."""
SLOW_S = 30.0


def reachable(facts: Facts) -> Iterator[Finding]:
    if not facts.caches:
        if facts.broker is not None:
            yield ok("lmcache.reachable", _why_none(facts))
        return
    for cache in facts.caches:
        if cache.error:
            yield fail(
                "lmcache.reachable",
                f"the LMCache server does not answer: {cache.error}",
                subject=cache.place,
                value=cache.error,
                limit="/healthcheck",
                trap="nothing is stored or loaded: decode computes every prompt anew",
                cure="start it (infra/lmcache/README.md); under `pdq up`: `pdq status`, and its log",
            )
        elif not cache.status.get("is_healthy", True):
            yield fail(
                "lmcache.reachable",
                f"the LMCache server says that it is not healthy: {', '.join(_ill(cache)) or 'no part is named'}",
                subject=cache.place,
                value="not healthy",
                limit="healthy",
                trap="a part of it is dead: stores or loads fail, and prompts are computed anew",
                cure=f"its log, and `curl http://{cache.host}:{cache.http_port}/status`; restart it",
            )
        else:
            yield ok("lmcache.reachable", f"LMCache {cache.version} is healthy", subject=cache.place)


def _why_none(facts: Facts) -> str:
    if not facts.workers:
        return "no worker is alive to tell where its LMCache server is"
    if not any("kv.port" in worker.beat.about for worker in facts.workers):
        return "no live worker uses LMCache (the sim engine keeps its KV in files)"
    return "the workers' LMCache servers listen on loopback of other machines: run `pdq doctor` there"


def _ill(cache: Cache) -> list[str]:
    parts = _parts(cache.status.get("storage_manager") or {})
    return [name for name, part in parts if not part.get("is_healthy", True)]


def _parts(manager: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, part in manager.items():
        if isinstance(part, dict) and "is_healthy" in part:
            yield name, part
        for index, adapter in enumerate(part if isinstance(part, list) else []):
            if isinstance(adapter, dict):
                yield f"{name}[{index}]", adapter


def chunk_size(facts: Facts) -> Iterator[Finding]:
    """The server cuts the chunks; the engines and the router count on a size."""
    for cache in _answering(facts):
        size = str(cache.status.get("chunk_size", ""))
        wrong = {
            w.name: w.contract["chunk_tokens"]
            for w in facts.users(cache)
            if w.contract.get("chunk_tokens", size) != size
        }
        if wrong:
            spread = ", ".join(f"{name} {chunk}" for name, chunk in sorted(wrong.items()))
            yield fail(
                "lmcache.chunk_size",
                f"the server cuts chunks of {size} tokens; {spread}",
                subject=cache.place,
                value=size,
                limit=" | ".join(sorted(set(wrong.values()))),
                trap="another chunk size than the model's: less is stored than is promised, or nothing is found",
                cure="one models.toml for server and workers; restart the server, then the workers",
            )
        elif size:
            yield ok("lmcache.chunk_size", f"chunks of {size} tokens, as the models'", subject=cache.place, value=size)


def hash_algorithm(facts: Facts) -> Iterator[Finding]:
    for cache in _answering(facts):
        has = str(cache.status.get("hash_algorithm", ""))
        for worker in facts.users(cache):
            wanted = worker.contract.get("hash_algorithm", has)
            if has and not wanted.startswith(has):
                yield fail(
                    "lmcache.hash_algorithm",
                    f"the server hashes with {has}, {worker.name} counts on {wanted}",
                    subject=cache.place,
                    value=has,
                    limit=wanted,
                    trap="another hash, or one with a seed per process (`builtin`): what is stored is never found",
                    cure=f"--hash-algorithm {wanted} for every LMCache server",
                )


def memory(facts: Facts) -> Iterator[Finding]:
    """How full the first tier is."""
    for cache in _answering(facts):
        total, used = cache.memory_bytes, int(cache.first_tier.get("memory_used_bytes", 0))
        if total and used / total > FULL_SHARE:
            yield warn(
                "lmcache.memory",
                f"the first tier is {used / total:.0%} full",
                subject=cache.place,
                value=used,
                limit=total,
                trap="all of it is locked: what is stored now is skipped without an error, and not promised to decode",
                cure="more PDQ_KV_SERVER_MEMORY_GB, or less PDQ_KV_ROOM_BYTES so that less KV waits for decode",
            )
        elif total:
            text = f"first tier: {_mib(used)} of {_mib(total)}"
            yield ok("lmcache.memory", text, subject=cache.place, value=used, limit=total)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether servers on this machine use it, and whether it has what they may still take, one started anew, too."""
    shm = facts.machine.shm
    local = {cache.memory_bytes: cache for cache in _answering(facts) if cache.listens}
    if shm is None or not local:
        return
    segments = [segment for segment in facts.machine.segments if segment.size in local]
    for size in sorted(local.keys() - {segment.size for segment in segments}):
        yield warn(
            "lmcache.shared_memory",
            "transfers pass as messages, not through shared memory",
            subject=local[size].place,
            value="messages",
            limit="shared memory",
            trap="every chunk is copied through a socket: slower by a multiple",
            cure="PDQ_KV_SERVER_SHM_NAME, and /dev/shm larger than two first tiers (docker: --shm-size)",
        )
    if segments:
        untaken = sum(segment.size - segment.taken for segment in segments)
        yield _room(shm.free, untaken, untaken + max(segment.size for segment in segments))


def _room(free: int, untaken: int, anew: int) -> Finding:
    """untaken: bytes that servers have no memory for yet. anew: the same, with a server that is started again."""
    text = f"/dev/shm has {_mib(free)} free; first tiers may take {_mib(untaken)} more, after a restart {_mib(anew)}"
    cure = (
        "a larger /dev/shm (docker: --shm-size; Kubernetes: an emptyDir of medium Memory), or less "
        "PDQ_KV_SERVER_MEMORY_GB; remove /dev/shm/lmcache_l1_pool_* of servers that are gone"
    )
    if free < untaken:
        trap = "shared memory is given page by page: when it runs out, server and engines die of SIGBUS"
        return fail("lmcache.shared_memory", text, value=free, limit=untaken, trap=trap, cure=cure)
    if free < anew:
        trap = "engines hold a server's former segment until it answers anew: without room for both it does not start"
        return warn("lmcache.shared_memory", text, value=free, limit=anew, trap=trap, cure=cure)
    return ok("lmcache.shared_memory", text, value=free, limit=anew)


def exposure(facts: Facts) -> Iterator[Finding]:
    """Both ports speak to anyone, without authentication."""
    for cache in facts.caches:
        addresses = cache.listens or (cache.host,)
        open_on = sorted(address for address in addresses if not is_loopback(address))
        if open_on:
            yield warn(
                "lmcache.exposure",
                f"its ports {cache.port} and {cache.http_port} are open on {', '.join(open_on)}",
                subject=cache.place,
                value=", ".join(open_on),
                limit="loopback, or a network of its own",
                trap="no authentication: whoever reaches them reads and replaces KV, and clears the cache",
                cure="PDQ_KV_SERVER_HOST=127.0.0.1, or a network that only the workers are in",
            )
        elif not cache.error:
            yield ok("lmcache.exposure", "its ports are open on loopback only", subject=cache.place)


def routes(facts: Facts) -> Iterator[Finding]:
    """Routes of LMCache's own server that pdq's leaves out: they tell secrets, or run what they are sent."""
    for cache in _answering(facts):
        if cache.config is None:
            yield ok("lmcache.routes", "shows no configuration, and runs no scripts", subject=cache.place)
        elif (cache.config.get("mp") or {}).get("run_script_api_enabled"):
            yield fail(
                "lmcache.routes",
                "its /run_script is on",
                subject=cache.place,
                value="on",
                limit="off",
                trap="it runs code that a caller sends",
                cure="run it as `python -m pdq.kv.serve`, or without --run-script-api-enabled",
            )
        else:
            yield warn(
                "lmcache.routes",
                "its /config is shown to anyone",
                subject=cache.place,
                value="/config",
                limit="not shown",
                trap="it tells the passwords of lower tiers and where the KV key lies; it is not pdq's own server",
                cure="run it as `python -m pdq.kv.serve`",
            )


def waits(facts: Facts) -> Iterator[Finding]:
    """How long a server that hangs holds up an engine: twice the timeout of a message."""
    limit_s = min(facts.limits.ack_wait_s, SLOW_S)
    waits_s = {worker.name: 2 * _number(worker.beat.about.get("kv.mq_timeout_s")) for worker in facts.workers}
    for name, wait_s in sorted(waits_s.items()):
        if wait_s > limit_s:
            judge = fail if wait_s > facts.work.stall_s else warn
            yield judge(
                "lmcache.waits",
                f"a load may wait {wait_s:g} s for a server that hangs",
                subject=name,
                value=f"{wait_s:g} s",
                limit=f"{limit_s:g} s",
                trap="every stream of that engine stalls meanwhile (LMCache's own default is 2 × 300 s)",
                cure="PDQ_KV_MQ_TIMEOUT_S=3 for the workers",
            )
    longest_s = max(waits_s.values(), default=0.0)
    if 0 < longest_s <= limit_s:
        text = f"a server that hangs holds up a load for {longest_s:g} s at most"
        yield ok("lmcache.waits", text, value=f"{longest_s:g} s", limit=f"{limit_s:g} s")


def leases(facts: Facts) -> Iterator[Finding]:
    """What was looked up stays until it is loaded: the lock must outlast the wait for a place in the engine."""
    for cache in _answering(facts):
        lock_s = _number(cache.first_tier.get("read_ttl_seconds"))
        if lock_s and lock_s < facts.work.stall_s:
            yield warn(
                "lmcache.leases",
                f"a looked-up chunk is kept for {lock_s:g} s; a request may wait {facts.work.stall_s:g} s in an engine",
                subject=cache.place,
                value=f"{lock_s:g} s",
                limit=f"{facts.work.stall_s:g} s",
                trap="a lease shorter than the wait: the chunk is gone when it is loaded, and is computed again",
                cure="PDQ_KV_SERVER_READ_LOCK_S=300, or fewer slots per worker (PDQ_WORKER_SLOTS)",
            )


def _answering(facts: Facts) -> list[Cache]:
    return [cache for cache in facts.caches if not cache.error]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
