"""What each role may do. Pure.

The roles that work on requests publish and subscribe in the account PDQ. The others ask from accounts of their own.
A site has a broker of its own, with fewer roles: what they may do ends at the site's own requests.
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
SiteAsking = Literal["client", "gateway", "operator", "init"]
SiteRole = Literal["forwarder", SiteAsking]
SITE_ASKING: tuple[SiteAsking, ...] = get_args(SiteAsking)
SITE_ROLES: tuple[SiteRole, ...] = ("forwarder", *SITE_ASKING)

STAGE_STREAMS = tuple(subjects.STAGE_STREAM.values())
ALL_STATES = "pdq.log.*.*.state"
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
            return _gateway("*")
        case "operator":
            return _operator()
        case "init":
            return _init()
        case "monitor":
            return Imports(_looks(), _ranges(subjects.WORKERS))


def tenant(name: str) -> Imports:
    """What a tenant may ask: to submit, read, cancel and purge its own requests, and to hear its own live events."""
    return Imports(
        calls=tuple(make(name, "*") for make in (subjects.submit, subjects.read, subjects.cancel, subjects.purge)),
        streams=(f"pdq.live.{name}.>",),
    )


def forwarder() -> Rights:
    """The rights of the forwarder at a site: to take what waits there, and to submit it at the hub."""
    waiting = (_api("STREAM.INFO", subjects.EDGE), *_pulls(subjects.EDGE, subjects.FORWARDER_CONSUMER))
    return Rights(publish=(*waiting, subjects.hub_submit("*")), subscribe=())


def site_asking(role: SiteAsking, site: str) -> Imports:
    """What a role at a site may ask: of the site's own requests, and of the site's own broker."""
    match role:
        case "client":
            return tenant(site)
        case "gateway":
            return _gateway(site)
        case "operator":
            return _site_operator(site)
        case "init":
            return _site_init()


def _router() -> Rights:
    return Rights(
        publish=(
            *_pulls(subjects.SUBMIT, subjects.ROUTER_CONSUMER),
            *_pulls(subjects.REAP, subjects.REAPER_CONSUMER),
            _api("STREAM.INFO", "*"),
            _api("CONSUMER.INFO", "*.*"),
            *_reads(subjects.SUBMIT, subjects.REAP, subjects.LOG),
            *_removals(subjects.SUBMIT),
            *_purges(subjects.REAP, *STAGE_STREAMS),
            *_ranges(subjects.WORKERS, subjects.TENANTS),
            *_erasure(),
            ALL_STATES,
            *(f"pdq.{stage}.>" for stage in subjects.STAGE_STREAM),
            subjects.ALL_DEAD,
            "pdq.reap.timer.>",
            subjects.router_key("*"),
            REPLIES,
        ),
        subscribe=(subjects.READ_ALL, subjects.CANCEL_ALL, subjects.PURGE_ALL, subjects.LIVE_STATES),
    )


def _stage(stage: StageName) -> Rights:
    more: tuple[str, ...]
    if stage == "prefill":
        # How much KV waits for decode is told by decode's consumers.
        more = ("pdq.decode.>", _api("CONSUMER.INFO", f"{subjects.DECODE}.*"))
    else:
        more = ("pdq.log.*.*.out", "pdq.prefill.>", *_purges(subjects.PREFILL), *_ranges(subjects.WORKERS))
    return Rights(
        publish=(
            *_pulls(subjects.STAGE_STREAM[stage], "*"),
            *_reads(subjects.LOG),
            *_purges(subjects.REAP, subjects.WORKERS),
            *_erasure(),
            ALL_STATES,
            f"pdq.dead.{stage}.>",
            f"$KV.PDQ_WORKERS.{stage}.>",
            *more,
            REPLIES,
        ),
        subscribe=(subjects.LIVE_STATES, subjects.drain("*")),
    )


def _gateway(whose: str) -> Imports:
    """At the hub it asks for any tenant: whose a request is it knows by the API keys."""
    return Imports(
        calls=(INFO, *tenant(whose).calls, _api("STREAM.INFO", subjects.TENANTS)),
        ranges=_ranges(subjects.TENANTS),
        streams=tenant(whose).streams,
    )


def _operator() -> Imports:
    """Asks for any tenant, sees and drains workers, looks after dead letters, and keeps the tenants' API keys."""
    return Imports(
        calls=(
            *_looks(),
            *tenant("*").calls,
            subjects.drain("*"),
            *_reads(subjects.DEAD, subjects.TENANTS),
            *_removals(subjects.DEAD),
            subjects.ALL_TENANTS,
        ),
        ranges=_ranges(subjects.WORKERS, subjects.DEAD, subjects.TENANTS),
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


def _site_operator(site: str) -> Imports:
    """Asks for the site, sees what waits there, and keeps the API keys of the site's own gateway."""
    return Imports(
        calls=(*_looks(), *tenant(site).calls, *_reads(subjects.TENANTS), subjects.ALL_TENANTS),
        ranges=_ranges(subjects.TENANTS),
        streams=tenant(site).streams,
    )


def _site_init() -> Imports:
    """As `_init`, for the streams of a site and no others; it looks whether the broker is a hub."""
    verbs, consumer = (
        ("STREAM.INFO", "STREAM.CREATE", "STREAM.UPDATE"),
        f"{subjects.EDGE}.{subjects.FORWARDER_CONSUMER}",
    )
    return Imports(
        calls=(
            INFO,
            *(_api(verb, stream) for verb in verbs for stream in (subjects.EDGE, subjects.TENANTS)),
            _api("STREAM.INFO", subjects.SUBMIT),
            *(_api(verb, consumer) for verb in ("CONSUMER.INFO", "CONSUMER.DURABLE.CREATE")),
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


def _ranges(*streams: str) -> tuple[str, ...]:
    return tuple(_api("DIRECT.GET", stream) for stream in streams)


def _removals(*streams: str) -> tuple[str, ...]:
    return tuple(_api("STREAM.MSG.DELETE", stream) for stream in streams)


def _purges(*streams: str) -> tuple[str, ...]:
    return tuple(_api("STREAM.PURGE", stream) for stream in streams)


def _erasure() -> tuple[str, ...]:
    """What `pdq.log.erase` does; whoever has written of a request after its purge does it, too."""
    kept = (subjects.LOG, subjects.DEAD)
    return (*_reads(*STAGE_STREAMS), *_ranges(*kept), *_removals(*kept, *STAGE_STREAMS), *_purges(*kept))


def _joined(*parts: Rights) -> Rights:
    publish = dict.fromkeys(subject for part in parts for subject in part.publish)
    subscribe = dict.fromkeys(subject for part in parts for subject in part.subscribe)
    return Rights(tuple(publish), tuple(subscribe))
