"""Names: streams, subjects, durable consumers, and their configurations. No I/O.

A token of a subject that comes from outside (tenant, model slug, request id) matches `TOKEN` or it never
gets here. Subjects of jobs end in the request: one message per subject is a second guard against double
work, and a purge by subject drops the job of a cancelled request.
Configurations are the JSON of JetStream's own API (docs.nats.io, "JetStream API reference").
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from typing import Any, NamedTuple

from pdq.messages import LANES, Lane, StageName

TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
RESERVED = re.compile(r"s-|e-\d+\Z")
"""How names begin, or look, that only a broker's acknowledgement gives to requests."""

SUBMIT = "PDQ_SUBMIT"
PREFILL = "PDQ_PREFILL"
DECODE = "PDQ_DECODE"
LOG = "PDQ_LOG"
REAP = "PDQ_REAP"
DEAD = "PDQ_DEAD"
WORKERS = "KV_PDQ_WORKERS"
"""The stream behind the key-value bucket PDQ_WORKERS."""
TENANTS = "KV_PDQ_TENANTS"
"""The stream behind the key-value bucket PDQ_TENANTS."""
EDGE = "PDQ_EDGE"
"""The stream of a site, where requests wait for the uplink."""

STAGE_STREAM: dict[StageName, str] = {"prefill": PREFILL, "decode": DECODE}
ROUTER_CONSUMER = "router"
REAPER_CONSUMER = "reaper"
FORWARDER_CONSUMER = "forwarder"

ALL_WORKERS = "$KV.PDQ_WORKERS.>"
ALL_TENANTS = "$KV.PDQ_TENANTS.>"
ALL_DEAD = "pdq.dead.>"
LIVE_STATES = "pdq.live.*.*.state"
CANCEL_ALL = "pdq.cancel.*.*"
READ_ALL = "pdq.read.*.*"
PURGE_ALL = "pdq.purge.*.*"

NANOSECONDS = 1_000_000_000

EDGE_ACK_WAIT_S = 5.0
"""What a forwarder held that died waits for so long; nobody minds a request that is forwarded twice."""
EDGE_ROOM_BYTES = 1 << 10
"""What a request's headers may grow by from its site to the hub's stream, the broker's own included."""


def is_token(text: str) -> bool:
    """Whether `text` may stand in a subject as one token."""
    return TOKEN.match(text) is not None


def is_reserved(name: str) -> bool:
    """Whether only a broker may give a request this name."""
    return RESERVED.match(name) is not None


def sequence_name(stream: str, seq: int | str) -> str:
    """The name of a request that has none of its own, by the acknowledgement of its publish."""
    return f"{'e' if stream == EDGE else 's'}-{seq}"


def slug(name: str) -> str:
    """A model name as one subject token: itself if it fits, else a lower-case slug with a hash, so that
    two names never meet (`org/a.b` and `org/a-b` differ)."""
    if is_token(name):
        return name
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()[:48]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def submit(tenant: str, model: str) -> str:
    return f"pdq.submit.{tenant}.{model}"


def edge_submit(model: str) -> str:
    """Where a submit waits at a site; its clients publish to `submit`, as they do at the hub."""
    return f"edge.submit.{model}"


def hub_submit(model: str) -> str:
    """At a site, the hub's submit subject of this site."""
    return f"hub.submit.{model}"


def parse_edge_submit(subject: str) -> str:
    """The model."""
    _, _, model = subject.split(".")
    return model


class SubmitSubject(NamedTuple):
    tenant: str
    model: str


def parse_submit(subject: str) -> SubmitSubject:
    _, _, tenant, model = subject.split(".")
    return SubmitSubject(tenant, model)


def job(stage: StageName, model: str, lane: Lane, tenant: str, request: str) -> str:
    return f"pdq.{stage}.{model}.{lane}.{tenant}.{request}"


class JobSubject(NamedTuple):
    stage: str
    model: str
    priority: str
    tenant: str
    request: str


def parse_job(subject: str) -> JobSubject:
    _, stage, model, priority, tenant, request = subject.split(".")
    return JobSubject(stage, model, priority, tenant, request)


def any_job(stage: StageName, tenant: str, request: str) -> str:
    """Filter for the job of one request, whatever its model and priority: for a purge."""
    return f"pdq.{stage}.*.*.{tenant}.{request}"


def state(tenant: str, request: str) -> str:
    return f"pdq.log.{tenant}.{request}.state"


def out(tenant: str, request: str) -> str:
    return f"pdq.log.{tenant}.{request}.out"


def log_of(tenant: str, request: str) -> str:
    """Filter for both subjects of one request's log."""
    return f"pdq.log.{tenant}.{request}.*"


def live(tenant: str, request: str) -> str:
    """Filter for the live copy of one request's log."""
    return f"pdq.live.{tenant}.{request}.*"


def live_state(tenant: str, request: str) -> str:
    """The live copy of one request's register."""
    return f"pdq.live.{tenant}.{request}.state"


class LogSubject(NamedTuple):
    tenant: str
    request: str
    kind: str


def parse_log(subject: str) -> LogSubject:
    """Of a log subject or of its live copy."""
    _, _, tenant, request, kind = subject.split(".")
    return LogSubject(tenant, request, kind)


def read(tenant: str, request: str) -> str:
    return f"pdq.read.{tenant}.{request}"


def cancel(tenant: str, request: str) -> str:
    return f"pdq.cancel.{tenant}.{request}"


def purge(tenant: str, request: str) -> str:
    return f"pdq.purge.{tenant}.{request}"


def dead(stage: str, model: str, tenant: str, request: str) -> str:
    return f"pdq.dead.{stage}.{model}.{tenant}.{request}"


def any_dead(tenant: str, request: str) -> str:
    """Filter for the dead letters of one request, whatever their stage and model."""
    return f"pdq.dead.*.*.{tenant}.{request}"


def timer(tenant: str, request: str) -> str:
    """Where a request's deadline waits; a purge of it stops the timer."""
    return f"pdq.reap.timer.{tenant}.{request}"


def due(tenant: str, request: str) -> str:
    """Where a deadline arrives once it is due."""
    return f"pdq.reap.due.{tenant}.{request}"


def worker_key(stage: StageName, model: str, worker: str) -> str:
    return f"$KV.PDQ_WORKERS.{stage}.{model}.{worker}"


def router_key(router: str) -> str:
    """Where a router proves to itself that the broker stores."""
    return f"$KV.PDQ_WORKERS.router.{router}"


def tenant_record(tenant: str) -> str:
    return f"$KV.PDQ_TENANTS.tenants.{tenant}"


def key_record(digest: str) -> str:
    """Of an API key, by its SHA-256 in hex."""
    return f"$KV.PDQ_TENANTS.keys.{digest}"


def drain(worker: str) -> str:
    """Where a worker hears that it should stop: finish what fits, give back the rest."""
    return f"pdq.ctl.{worker}.drain"


def inbox(key: str) -> str:
    """Where answers to a user of the broker come, by its public key: of all services in one account none hears those of
    another."""
    return f"_INBOX_{key[:13]}"


def workers_of(stage: StageName, model: str) -> str:
    return f"$KV.PDQ_WORKERS.{stage}.{model}.*"


def consumer(model: str, lane: Lane) -> str:
    """Durable consumer of one model and lane, in the stream of a stage."""
    return f"{model}-{lane}"


class Limits(NamedTuple):
    """Sizes that `pdq init` gives to the streams."""

    log_age_s: float
    log_max_bytes: int
    submit_per_subject: int
    queue_max_msgs: int
    queue_max_bytes: int
    max_msg_bytes: int
    ack_wait_s: float
    max_deliver: int
    max_ack_pending: int
    worker_ttl_s: float
    replicas: int


def _stream(limits: Limits, name: str, subjects: list[str], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "subjects": subjects,
        "storage": "file",
        "num_replicas": limits.replicas,
        "discard": "new",
        "max_msg_size": limits.max_msg_bytes,
        "duplicate_window": _ns(120),
        **more,
    }


def _submits(limits: Limits, name: str, subjects: list[str], **more: Any) -> dict[str, Any]:
    """A queue of what clients publish."""
    return _stream(
        limits,
        name,
        subjects,
        retention="workqueue",
        max_msgs_per_subject=limits.submit_per_subject,
        discard_new_per_subject=True,
        max_bytes=limits.queue_max_bytes,
        # Ids of a stream are shared by its tenants, so submits carry none and the window is the least allowed.
        duplicate_window=_ns(0.1),
        **more,
    )


def _tenants(limits: Limits) -> dict[str, Any]:
    return _stream(
        limits,
        TENANTS,
        [ALL_TENANTS],
        retention="limits",
        # Nothing in it ends by age: a key that is revoked stays, and says so.
        max_msgs_per_subject=1,
        max_bytes=64 << 20,
        allow_direct=True,
        allow_rollup_hdrs=True,
        deny_delete=True,
    )


def streams(limits: Limits) -> list[dict[str, Any]]:
    """Configuration of every stream, in the order they are made."""
    age = _ns(limits.log_age_s)
    stream = partial(_stream, limits)
    queue = partial(stream, retention="workqueue")

    def jobs(stage: StageName, room: int) -> dict[str, Any]:
        return queue(
            STAGE_STREAM[stage],
            [f"pdq.{stage}.*.*.*.*"],
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_msgs=limits.queue_max_msgs * room,
            max_bytes=limits.queue_max_bytes * room,
        )

    advisories = [f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{name}.>" for name in (PREFILL, DECODE)]
    return [
        stream(
            LOG,
            ["pdq.log.*.*.*"],
            retention="limits",
            max_age=age,
            max_bytes=limits.log_max_bytes,
            allow_direct=True,
            # The tenant and the request are taken over from the log's subject.
            republish={
                "src": "pdq.log.*.*.*",
                "dest": "pdq.live.{{wildcard(1)}}.{{wildcard(2)}}.{{wildcard(3)}}",
            },
        ),
        stream(
            DEAD,
            ["pdq.dead.*.*.*.*"],
            retention="limits",
            allow_direct=True,
            max_age=_ns(7 * 86400),
            max_bytes=limits.queue_max_bytes,
        ),
        queue(
            REAP,
            ["pdq.reap.timer.*.*", "pdq.reap.due.*.*", *advisories],
            # A stream with schedules cannot refuse new messages. It holds one timer per live request, and
            # those are bounded by the other streams, so it has no limit at which it would drop a timer.
            discard="old",
            allow_msg_schedules=True,
            allow_msg_ttl=True,
        ),
        # Decode has more room than prefill, so that a finished prefill is never refused.
        jobs("decode", 2),
        jobs("prefill", 1),
        _submits(limits, SUBMIT, ["pdq.submit.*.*"]),
        stream(
            WORKERS,
            [ALL_WORKERS],
            retention="limits",
            # In files, for the sake of its configuration: a server that is alone forgets memory streams at a restart.
            max_msgs_per_subject=1,
            discard="new",
            max_age=_ns(limits.worker_ttl_s),
            duplicate_window=_ns(0.1),
            max_bytes=64 << 20,
            allow_direct=True,
            allow_rollup_hdrs=True,
            allow_msg_ttl=True,
            deny_delete=True,
        ),
        _tenants(limits),
    ]


def edge_streams(limits: Limits, first_seq: int) -> list[dict[str, Any]]:
    """Configuration of every stream of a site's own broker.

    first_seq: of the first request, by which it is named unless it has a name.
    """
    most = limits.max_msg_bytes - EDGE_ROOM_BYTES
    return [_submits(limits, EDGE, [edge_submit("*")], max_msg_size=most, first_seq=first_seq), _tenants(limits)]


class ConsumerSpec(NamedTuple):
    stream: str
    config: dict[str, Any]


ENDLESS = {"max_deliver": -1}
"""What the broker gives up is told by an advisory, and that is lost when it cannot be stored. A job has a timer all the
same; a submit and a due timer have nothing, so they are delivered without end, and the router counts."""


def _pull(limits: Limits, name: str, filter_subject: str) -> dict[str, Any]:
    return {
        "durable_name": name,
        "filter_subject": filter_subject,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_wait": _ns(limits.ack_wait_s),
        "max_deliver": limits.max_deliver,
        "max_ack_pending": limits.max_ack_pending,
    }


def consumers(limits: Limits, models: list[str]) -> list[ConsumerSpec]:
    """Configuration of every durable consumer: all exist before any worker, or nobody can scale from zero."""
    pull = partial(_pull, limits)
    specs = [
        ConsumerSpec(SUBMIT, pull(ROUTER_CONSUMER, "pdq.submit.*.*") | ENDLESS),
        # Advisories and due timers, but never the timers themselves: the server takes those when due.
        ConsumerSpec(REAP, _reaper(pull(REAPER_CONSUMER, "") | ENDLESS)),
    ]
    for stage, stream_name in STAGE_STREAM.items():
        for model in models:
            for lane in LANES:
                filter_subject = f"pdq.{stage}.{model}.{lane}.*.*"
                specs.append(ConsumerSpec(stream_name, pull(consumer(model, lane), filter_subject)))
    return specs


def edge_consumers(limits: Limits) -> list[ConsumerSpec]:
    """Configuration of every durable consumer of a site's own broker."""
    config = _pull(limits, FORWARDER_CONSUMER, edge_submit("*")) | ENDLESS | {"ack_wait": _ns(EDGE_ACK_WAIT_S)}
    return [ConsumerSpec(EDGE, config)]


def _reaper(config: dict[str, Any]) -> dict[str, Any]:
    del config["filter_subject"]
    config["filter_subjects"] = ["pdq.reap.due.*.*", "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>"]
    return config


def _ns(seconds: float) -> int:
    return int(seconds * NANOSECONDS)
