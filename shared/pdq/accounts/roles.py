"""What each role may do. Pure.

The roles that work on requests publish and subscribe in the account PDQ. The others ask from accounts of their own.
A call of JetStream's API that names its target in its body (a purge, a read of a range) cannot be narrowed to less than
a stream.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from pdq import subjects
from pdq.messages import StageName

Working = Literal["router", "prefill", "decode", "worker"]
Asking = Literal["gateway", "operator", "init", "monitor"]
Role = Literal[Working, Asking]
WORKING: tuple[Working, ...] = get_args(Working)
ASKING: tuple[Asking, ...] = get_args(Asking)
ROLES: tuple[Role, ...] = (*WORKING, *ASKING)

REPLIES = "_R_.>"
"""Where the broker takes answers to those who ask from another account."""
INFO = "$JS.API.INFO"
"""Who imports any of JetStream's API imports this, too: it tells the broker not to answer for the account itself, which
has no JetStream."""


class Rights(NamedTuple):
    """Subjects a user may publish to and subscribe to, besides its own inbox."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


class Imports(NamedTuple):
    """What an account takes from PDQ: `calls` have one answer, `ranges` many; `streams` are listened to."""

    calls: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()


def working(role: Working) -> Rights:
    """The rights of a service in the account PDQ."""
    match role:
        case "router":
            return _router()
        case "worker":
            return _joined(_stage("prefill"), _stage("decode"))
        case _:
            return _stage(role)


def asking(role: Asking) -> Imports:
    """What a role outside PDQ may ask of it."""
    match role:
        case "gateway":
            return _gateway()
        case "operator":
            return _operator()
        case "init":
            return _init()
        case "monitor":
            return Imports(_looks(), (_api("DIRECT.GET", subjects.WORKERS),))


def tenant(name: str) -> Imports:
    """What a tenant may ask: to submit, read, cancel and purge its own requests, and to hear its own live events."""
    return Imports(
        calls=tuple(make(name, "*") for make in (subjects.submit, subjects.read, subjects.cancel, subjects.purge)),
        streams=(f"pdq.live.{name}.>",),
    )


def _router() -> Rights:
    stages = tuple(subjects.STAGE_STREAM.values())
    return Rights(
        publish=(
            *_pulls(subjects.SUBMIT, subjects.ROUTER_CONSUMER),
            *_pulls(subjects.REAP, subjects.REAPER_CONSUMER),
            _api("STREAM.INFO", "*"),
            _api("CONSUMER.INFO", "*.*"),
            *_reads(subjects.SUBMIT, subjects.REAP, subjects.DEAD, *stages),
            *_log_reads(),
            _api("DIRECT.GET", subjects.WORKERS),
            *_removals(subjects.SUBMIT, *stages),
            *_purges(subjects.REAP, subjects.LOG, subjects.DEAD, *stages),
            "pdq.log.*.*.state",
            *(f"pdq.{stage}.>" for stage in subjects.STAGE_STREAM),
            subjects.ALL_DEAD,
            "pdq.reap.timer.>",
            subjects.router_key("*"),
            REPLIES,
        ),
        subscribe=(subjects.READ_ALL, subjects.CANCEL_ALL, subjects.PURGE_ALL, subjects.LIVE_STATES),
    )


def _stage(stage: StageName) -> Rights:
    stream = subjects.STAGE_STREAM[stage]
    if stage == "prefill":
        # The room that KV has depends on what waits for decode.
        more = ("pdq.decode.>", _api("CONSUMER.INFO", f"{subjects.DECODE}.*"))
    else:
        more = (
            "pdq.log.*.*.out",
            "pdq.prefill.>",
            *_reads(subjects.DECODE),
            *_purges(subjects.PREFILL),
            _api("DIRECT.GET", subjects.WORKERS),
        )
    return Rights(
        publish=(
            *_pulls(stream, "*"),
            *_log_reads(),
            *_purges(subjects.REAP, subjects.WORKERS),
            "pdq.log.*.*.state",
            f"pdq.dead.{stage}.>",
            f"$KV.PDQ_WORKERS.{stage}.>",
            *more,
            REPLIES,
        ),
        subscribe=(subjects.LIVE_STATES, subjects.drain("*")),
    )


def _gateway() -> Imports:
    """A tenant of every name: it asks for whom it has authenticated."""
    return tenant("*")


def _operator() -> Imports:
    """Sees the workers, drains them, takes care of dead letters and asks for any tenant."""
    return Imports(
        calls=(
            *tenant("*").calls,
            *_looks(),
            subjects.drain("*"),
            *_reads(subjects.DEAD),
            *_removals(subjects.DEAD),
        ),
        ranges=tuple(_api("DIRECT.GET", stream) for stream in (subjects.WORKERS, subjects.DEAD)),
        streams=tenant("*").streams,
    )


def _init() -> Imports:
    """Makes streams and consumers, or changes them; deletes none."""
    verbs = ("STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE")
    return Imports(
        calls=(
            INFO,
            *(_api(verb, "*") for verb in verbs),
            *(_api(verb, "*.*") for verb in ("CONSUMER.INFO", "CONSUMER.DURABLE.CREATE")),
        )
    )


def _looks() -> tuple[str, ...]:
    """How streams and consumers are, not what is in them."""
    pairs = (("STREAM.INFO", "*"), ("CONSUMER.NAMES", "*"), ("CONSUMER.INFO", "*.*"))
    return (INFO, *(_api(verb, names) for verb, names in pairs))


def _api(verb: str, names: str) -> str:
    return f"$JS.API.{verb}.{names}"


def _pulls(stream: str, consumer: str) -> tuple[str, ...]:
    """To see a consumer, take its messages and settle them."""
    named = f"{stream}.{consumer}"
    return (_api("CONSUMER.INFO", named), _api("CONSUMER.MSG.NEXT", named), f"$JS.ACK.{named}.>")


def _reads(*streams: str) -> tuple[str, ...]:
    return tuple(_api("STREAM.MSG.GET", stream) for stream in streams)


def _log_reads() -> tuple[str, ...]:
    return (*_reads(subjects.LOG), _api("DIRECT.GET", subjects.LOG))


def _removals(*streams: str) -> tuple[str, ...]:
    return tuple(_api("STREAM.MSG.DELETE", stream) for stream in streams)


def _purges(*streams: str) -> tuple[str, ...]:
    return tuple(_api("STREAM.PURGE", stream) for stream in streams)


def _joined(*parts: Rights) -> Rights:
    publish = dict.fromkeys(subject for part in parts for subject in part.publish)
    subscribe = dict.fromkeys(subject for part in parts for subject in part.subscribe)
    return Rights(tuple(publish), tuple(subscribe))
