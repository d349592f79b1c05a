"""The broker itself: whether it is there, what it can hold, how safe it is, who can reach it."""

from __future__ import annotations

from collections.abc import Iterator

from pdq.addresses import is_loopback, is_public
from pdq.doctor.facts import Broker, Disk, Facts
from pdq.doctor.finding import Finding, fail, ok, warn

NANOSECONDS = 1_000_000_000
FULL = 0.8
"""Share of a store's room from which it counts as nearly full."""
SANE_PAYLOAD = 8 << 20


def reachable(facts: Facts) -> Iterator[Finding]:
    broker = facts.broker
    if broker is not None:
        yield ok("broker.reachable", f"answers in {broker.rtt_s * 1e3:.1f} ms", subject=broker.place)
    elif facts.broker_named:
        yield fail(
            "broker.reachable",
            facts.broker_error,
            trap="nothing can be submitted, and nothing runs",
            cure="is nats-server up, and is PDQ_NATS_URL (or --nats-url) its address? May this user ask $JS.API.>?",
        )
    else:
        yield warn(
            "broker.reachable",
            facts.broker_error or "no broker is named and no stack runs here: broker, workers and KV are not examined",
            trap="only this machine is examined",
            cure="start a stack with `pdq up`, or name a broker: PDQ_NATS_URL or --nats-url",
        )


def jetstream(facts: Facts) -> Iterator[Finding]:
    if facts.broker is None:
        return
    if facts.broker.account is None:
        yield fail(
            "broker.jetstream",
            "JetStream is off, or not enabled for this account",
            subject=facts.broker.place,
            value="off",
            limit="on",
            trap="there are no queues: every request is refused",
            cure="`jetstream { store_dir: ... }` in its configuration, and `jetstream: enabled` in the account",
        )
    else:
        account = facts.broker.account
        yield ok(
            "broker.jetstream",
            f"JetStream is on: {account.get('streams', 0)} streams, {account.get('consumers', 0)} consumers",
            subject=facts.broker.place,
            value="on",
        )


def payload(facts: Facts) -> Iterator[Finding]:
    """The largest message that the broker takes against the largest that pdq sends."""
    if facts.broker is None:
        return
    has, wanted = int(facts.broker.info.get("max_payload", 0)), facts.limits.max_msg_bytes
    if has < wanted:
        yield fail(
            "broker.payload",
            f"the broker takes {has:,} bytes, PDQ_LIMIT_MAX_MSG_BYTES is {wanted:,}",
            value=has,
            limit=wanted,
            trap="a long prompt that pdq accepts is refused by the broker",
            cure=f"`max_payload: {wanted}` in its configuration, or PDQ_LIMIT_MAX_MSG_BYTES={has} and `pdq init`",
        )
    elif has > SANE_PAYLOAD:
        yield warn(
            "broker.payload",
            f"the broker takes messages of {has:,} bytes",
            value=has,
            limit=SANE_PAYLOAD,
            trap="messages of this size delay all others of their connection; 8 MiB is the documented bound",
            cure=f"`max_payload: {SANE_PAYLOAD}` in the server's configuration",
        )
    else:
        yield ok("broker.payload", f"takes {has:,} bytes; pdq sends up to {wanted:,}", value=has, limit=wanted)


def replicas(facts: Facts) -> Iterator[Finding]:
    """How many copies there are of what was acknowledged."""
    log = (facts.broker.streams if facts.broker else {}).get("PDQ_LOG")
    if facts.broker is None or log is None:
        return
    copies = int(log["config"].get("num_replicas", 1))
    clustered = bool(facts.broker.info.get("cluster"))
    if copies >= 3:
        yield ok("broker.replicas", f"{copies} copies of every message", value=copies, limit=3)
    elif clustered:
        yield warn(
            "broker.replicas",
            f"a cluster, and {copies} copy of every message" if copies == 1 else f"{copies} copies: no majority",
            value=copies,
            limit=3,
            trap="the death of one server stops its streams, and with its disk what was acknowledged is gone",
            cure="PDQ_LIMIT_REPLICAS=3 for `pdq init` and every service",
        )
    elif is_loopback(listener(facts.broker)):
        yield ok("broker.replicas", "one server with one copy: this machine's own stack", value=copies, limit=1)
    else:
        yield warn(
            "broker.replicas",
            "one server, one copy of every message",
            value=copies,
            limit=3,
            trap="while it is away nothing runs; if its disk is lost, so is what was acknowledged",
            cure="three nodes (infra/nats/cluster.conf) and PDQ_LIMIT_REPLICAS=3 for `pdq init` and every service",
        )


def sync(facts: Facts) -> Iterator[Finding]:
    """How long an acknowledged message may be in the page cache only."""
    if facts.broker is None or facts.broker.account is None:
        return
    if facts.broker.monitoring is None:
        yield ok(
            "broker.sync", "how often the server syncs its disk is told by its monitoring port only: --monitor URL"
        )
        return
    config = facts.broker.monitoring.get("config") or {}
    every_s = int(config.get("sync_interval", 0)) / NANOSECONDS
    if config.get("sync_always") or every_s < 1:
        yield ok("broker.sync", "syncs every write", value="always")
    elif facts.broker.info.get("cluster"):
        yield ok(
            "broker.sync", f"syncs every {every_s:g} s; other replicas hold what one loses", value=f"{every_s:g} s"
        )
    else:
        yield warn(
            "broker.sync",
            f"syncs every {every_s:g} s, and is alone",
            value=f"{every_s:g} s",
            limit="always",
            trap="a loss of power loses what was acknowledged since (a crash of the server alone does not)",
            cure="`sync_interval: always` in the jetstream block (slower writes), or three replicas",
        )


def store(facts: Facts) -> Iterator[Finding]:
    """Room for what the streams may still take."""
    broker = facts.broker
    if broker is None or broker.account is None:
        return
    disk = next((disk for disk in facts.machine.disks if disk.what == "store"), None)
    if disk is not None:
        yield _disk(broker, disk)
    used, limit = _usage(broker)
    if limit > 0:
        share = used / limit
        text = f"the store holds {_gib(used)} of {_gib(limit)} ({share:.0%})"
        yield (
            _full(text, share) if share > FULL else ok("broker.store", text, value=f"{share:.0%}", limit=f"{FULL:.0%}")
        )
    elif disk is None:
        yield ok("broker.store", f"holds {_gib(used)}; its room is told by the monitoring port only: --monitor URL")


def _usage(broker: Broker) -> tuple[int, int]:
    """Bytes that the store holds and may hold, as far as they are told; 0: without a limit that is."""
    account = broker.account or {}
    if broker.monitoring is not None:
        config = broker.monitoring.get("config") or {}
        return int(broker.monitoring.get("storage", 0)), int(config.get("max_storage", 0))
    return int(account.get("storage", 0)), int((account.get("limits") or {}).get("max_storage", 0))


def _disk(broker: Broker, disk: Disk) -> Finding:
    account = broker.account or {}
    growth = max(0, int(account.get("reserved_storage", 0)) - int(account.get("storage", 0)))
    text = f"{_gib(disk.free)} free at {disk.path}; the streams may take {_gib(growth)} more"
    if disk.free < growth:
        return warn(
            "broker.disk",
            text,
            subject=disk.path,
            value=disk.free,
            limit=growth,
            trap="the disk is full before the streams refuse: writes fail, and the broker stops storing",
            cure="free the disk, move PDQ_HOME, or lower PDQ_LIMIT_LOG_MAX_BYTES and run `pdq init`",
        )
    return ok("broker.disk", text, subject=disk.path, value=disk.free, limit=growth)


def _full(text: str, share: float) -> Finding:
    judge = fail if share > 0.95 else warn
    return judge(
        "broker.store",
        text,
        value=f"{share:.0%}",
        limit=f"{FULL:.0%}",
        trap="a store that is full refuses tokens of running answers, whatever the streams' own limits say",
        cure="raise `max_file` of the jetstream block, or lower PDQ_LIMIT_LOG_AGE_S and run `pdq init`",
    )


def exposure(facts: Facts) -> Iterator[Finding]:
    """A listener that others reach, without a password."""
    broker = facts.broker
    if broker is None:
        return
    address, guarded = listener(broker), bool(broker.info.get("auth_required"))
    if is_loopback(address):
        yield ok("broker.exposure", f"listens on {address} only", value=address)
        return
    encrypted = bool(broker.info.get("tls_required"))
    text = f"listens on {address}, {'with' if guarded else 'without'} authentication, "
    text += "encrypted" if encrypted else "not encrypted"
    if guarded:
        yield ok("broker.exposure", text, value=address)
        return
    judge = fail if is_public(broker.place) else warn
    yield judge(
        "broker.exposure",
        text,
        subject=broker.place,
        value="no authentication",
        limit="authentication, or loopback",
        trap="whoever reaches the port reads every prompt and answer, and can submit, cancel and delete",
        cure="`authorization` or accounts with nkeys and `tls` in the server's configuration, or a network of its own",
    )


def listener(broker: Broker) -> str:
    """The address that the server listens on, as it says."""
    return str(broker.info.get("host", "")) or broker.place


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
