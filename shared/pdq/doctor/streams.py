"""Streams and consumers as `pdq init` makes them: what is missing, what differs, what is nearly full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdq import subjects
from pdq.bus.core import differences
from pdq.doctor.facts import Facts
from pdq.doctor.finding import Finding, fail, ok, warn
from pdq.errors import Misconfigured

INIT = "`pdq init` (with the PDQ_LIMIT_* settings and models.toml of the services)"
SIZES = frozenset(
    {
        "max_age",
        "max_bytes",
        "max_msgs",
        "max_msg_size",
        "num_replicas",
        "ack_wait",
        "max_deliver",
        "max_ack_pending",
        "duplicate_window",
    }
)
"""Fields that a setting decides: another value is another setting's, and works."""
FULL = 0.8
STREAM_DEFAULTS: dict[str, Any] = {
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "deny_purge": False,
    "sealed": False,
    "no_ack": False,
    "mirror": None,
    "sources": None,
}
CONSUMER_DEFAULTS: dict[str, Any] = {
    "backoff": None,
    "headers_only": False,
    "inactive_threshold": 0,
    "pause_until": None,
    "rate_limit_bps": 0,
}
"""What `pdq init` leaves alone, and nobody should set: a limit drops messages, a paused consumer delivers none."""


def streams(facts: Facts) -> Iterator[Finding]:
    """Each stream, and each field of it that differs."""
    if facts.broker is None or facts.broker.account is None:
        return
    wanted = subjects.streams(facts.limits.of_streams())
    clean = 0
    for config in wanted:
        found = list(
            _drift("stream", config["name"], facts.broker.streams.get(config["name"]), STREAM_DEFAULTS | config)
        )
        clean += not found
        yield from found
    if clean == len(wanted):
        yield ok("streams.stream", f"{clean} streams are as `pdq init` makes them", value=clean, limit=len(wanted))


def consumers(facts: Facts) -> Iterator[Finding]:
    """Each durable consumer: of every model and priority, or nobody can scale from zero."""
    if facts.broker is None or facts.broker.account is None:
        return
    models = sorted(facts.models.by_slug) if facts.models else []
    wanted = subjects.consumers(facts.limits.of_streams(), models)
    clean = 0
    for stream, config in wanted:
        name = f"{stream}/{config['durable_name']}"
        found = list(_drift("consumer", name, facts.broker.consumers.get(name), CONSUMER_DEFAULTS | config))
        clean += not found
        yield from found
    if clean == len(wanted):
        whose = f" of {', '.join(models)}" if models else "; models.toml is not here: those of models are not examined"
        text = f"{clean} consumers{whose} are as `pdq init` makes them"
        yield ok("streams.consumer", text, value=clean, limit=len(wanted))


def _drift(kind: str, name: str, info: dict[str, Any] | None, wanted: dict[str, Any]) -> Iterator[Finding]:
    if info is None:
        yield fail(
            f"streams.{kind}",
            f"{kind} {name} does not exist",
            subject=name,
            value="missing",
            limit="present",
            trap="services end at their start and name `pdq init`; without a consumer, jobs wait unseen",
            cure=INIT,
        )
        return
    for field, (has, wants) in differences(info["config"], wanted).items():
        judge = warn if field in SIZES else fail
        yield judge(
            f"streams.{kind}",
            f"{name}: {field} is {_shown(field, has)}, by the settings here it is {_shown(field, wants)}",
            subject=name,
            value=f"{field} {_shown(field, has)}",
            limit=f"{field} {_shown(field, wants)}",
            trap="another PDQ_LIMIT_* than the services have, or `pdq init` was not run since"
            if field in SIZES
            else "made by hand or by another version: queues drop, refuse or repeat in ways that pdq does not expect",
            cure=INIT,
        )


def _shown(field: str, value: Any) -> str:
    if value is None:
        return "not set"
    if field in ("max_age", "ack_wait", "duplicate_window") and isinstance(value, int):
        return f"{value / subjects.NANOSECONDS:g} s"
    return str(value)


def log_age(facts: Facts) -> Iterator[Finding]:
    """The log outlives every request."""
    try:
        facts.limits.check()
    except Misconfigured as exc:
        yield fail(
            "streams.log_age",
            str(exc),
            value=f"{facts.limits.log_age_s:g} s",
            trap="a request's log is gone before its end: it counts as ended, and its answer is lost",
            cure="raise PDQ_LIMIT_LOG_AGE_S, or lower PDQ_LIMIT_MAX_DEADLINE_S, then `pdq init`",
        )


def fill(facts: Facts) -> Iterator[Finding]:
    """Streams that are near the limit at which they refuse what is new."""
    for name, info in (facts.broker.streams if facts.broker else {}).items():
        limit = int(info["config"].get("max_bytes", 0)) if info else 0
        if info is None or limit <= 0:
            continue
        share = int(info["state"]["bytes"]) / limit
        if share > FULL:
            yield warn(
                "streams.fill",
                f"{name} is {share:.0%} full",
                subject=name,
                value=f"{share:.0%}",
                limit=f"{FULL:.0%}",
                trap="a full stream refuses what is new: PDQ_LOG refuses requests from 80 % on",
                cure="add workers; for PDQ_LOG a lower PDQ_LIMIT_LOG_AGE_S (or more _LOG_MAX_BYTES), then `pdq init`",
            )
