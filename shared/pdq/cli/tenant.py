"""`pdq tenant`: who may ask over HTTP, by API key, and how much."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

if TYPE_CHECKING:
    from pdq.tenants import KeyRecord, Known, Limits, Store

tenant_commands = typer.Typer(
    no_args_is_help=True, help="Who may ask over HTTP, by API key, and how much: add, list, show, limit, revoke."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the tenant: letters, digits, - and _; at most 64.")]


def _limit(what: str) -> Any:
    return typer.Option(metavar="N", min=0, max=10**12, help=f"{what}; 0: no limit.", show_default=False)


RequestsInFlight = Annotated[int | None, _limit("Requests at one time, from their admission to their end")]
TokensInFlight = Annotated[int | None, _limit("Tokens of those: prompt, and the most that may be generated")]
RequestsQueued = Annotated[int | None, _limit("Requests that wait for a worker at one time")]
RequestsPerMinute = Annotated[int | None, _limit("Requests in any 60 seconds")]
TokensPerMinute = Annotated[int | None, _limit("Tokens of those; what was not generated is given back")]


@tenant_commands.command("add")
def tenant_add(
    name: Name,
    label: Annotated[str, typer.Option(metavar="TEXT", help="What the key is for; `pdq tenant show` tells it.")] = "",
    requests_in_flight: RequestsInFlight = None,
    tokens_in_flight: TokensInFlight = None,
    requests_queued: RequestsQueued = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Make an API key, and the tenant if there is none of this name. The key is printed once, and kept nowhere.

    For a new key beside an old one, add the same name again, then revoke the old one by its first characters.
    From the first tenant on, a gateway of the local stack asks everybody for a key.

    \b
    Examples:
      pdq tenant add acme --requests-in-flight 32 --tokens-per-minute 200000
      pdq tenant add acme --label "nightly jobs"
      KEY=$(pdq tenant add acme)
    """
    with reported(as_json):
        limits = _given(
            requests_in_flight=requests_in_flight,
            tokens_in_flight=tokens_in_flight,
            requests_queued=requests_queued,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
        added = _with_store(nats_url, lambda store: store.add(name, label=label, limits=limits))
        if as_json:
            plain = {"tenant": name, "key": added.key, "prefix": added.record.prefix}
            output.json({**plain, "limits": added.tenant.limits.set()})
        else:
            output.line(added.key)
            output.note(f"this is the key of {name}: keep it, it is not shown again")


@tenant_commands.command("list")
def tenant_list(as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """List the tenants: how many valid keys each has, and its limits.

    \b
    Example:
      pdq tenant list
    """
    with reported(as_json):
        found = _with_store(nats_url, lambda store: store.known())
        if as_json:
            output.json({"tenants": [_plain(known) for known in found]})
        elif found:
            rows = [(known.tenant.tenant, len(known.valid_keys), _limits(known.tenant.limits)) for known in found]
            output.line(output.table([("tenant", "keys", "limits"), *rows]))
        else:
            output.note("there are no tenants: `pdq tenant add NAME` makes one")


@tenant_commands.command("show")
def tenant_show(name: Name, as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """Show a tenant: its limits, and the first characters of every key that it ever had.

    \b
    Example:
      pdq tenant show acme
    """
    with reported(as_json):
        known = _with_store(nats_url, lambda store: store.one(name))
        if as_json:
            output.json(_plain(known))
            return
        output.line(f"{name}: {_limits(known.tenant.limits)}")
        rows = [(key.prefix, _status(known, key), _day(key.created), key.label) for key in known.keys]
        if rows:
            output.line(output.table([("key", "", "made", "label"), *rows]))


@tenant_commands.command("limit")
def tenant_limit(
    name: Name,
    requests_in_flight: RequestsInFlight = None,
    tokens_in_flight: TokensInFlight = None,
    requests_queued: RequestsQueued = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Set some of a tenant's limits; the others stay. What is over one is refused with 429 and when to try again.

    \b
    Examples:
      pdq tenant limit acme --requests-queued 100
      pdq tenant limit acme --tokens-per-minute 0
    """
    with reported(as_json):
        from pdq.errors import Rejected

        limits = _given(
            requests_in_flight=requests_in_flight,
            tokens_in_flight=tokens_in_flight,
            requests_queued=requests_queued,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
        if not limits:
            raise Rejected("no limit is given: `pdq tenant limit --help` has their names", code="usage")
        record = _with_store(nats_url, lambda store: store.limit(name, limits))
        if as_json:
            output.json({"tenant": name, "limits": record.limits.set()})
        else:
            output.note(f"{name}: {_limits(record.limits)}")


@tenant_commands.command("revoke")
def tenant_revoke(
    name: Name,
    key: Annotated[
        str,
        typer.Option("--key", metavar="BEGIN", help="Only the key that begins so. Default: all.", show_default=False),
    ] = "",
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Make a tenant's keys invalid, at once and for ever. The tenant stays, with its limits: `add` gives it a new key.

    Running requests go on.

    \b
    Examples:
      pdq tenant revoke acme --key pdq_Xk2f
      pdq tenant revoke acme
    """
    with reported(as_json):
        revoked = [record.prefix for record in _with_store(nats_url, _revoke(name, key))]
        if as_json:
            output.json({"tenant": name, "revoked": revoked})
        else:
            output.note(f"revoked of {name}: {', '.join(revoked) or 'nothing, it had no valid key'}")


def _revoke(name: str, key: str) -> Callable[[Store], Awaitable[list[KeyRecord]]]:
    async def work(store: Store) -> list[KeyRecord]:
        return [await store.revoke_key(name, key)] if key else list((await store.revoke(name)).valid_keys)

    return work


T = TypeVar("T")


def _with_store(nats_url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    from pdq.cli import connect
    from pdq.tenants import Store

    where = connect.target(nats_url)

    async def main() -> T:
        async with connect.bus(where) as bus:
            return await work(Store(bus))

    return run(main)


def _given(**limits: int | None) -> dict[str, int]:
    return {name: value for name, value in limits.items() if value is not None}


def _limits(limits: Limits) -> str:
    named = [f"{name.replace('_', ' ')} {value:,}" for name, value in limits.set().items()]
    return ", ".join(named) or "no limits"


def _status(known: Known, key: KeyRecord) -> str:
    return "valid" if key.valid(known.tenant) else "revoked"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _plain(known: Known) -> dict[str, Any]:
    """For `--json`; times are Unix seconds."""
    return {
        "tenant": known.tenant.tenant,
        "created": known.tenant.created,
        "limits": known.tenant.limits.set(),
        "keys": [
            {"prefix": key.prefix, "status": _status(known, key), "created": key.created, "label": key.label}
            for key in known.keys
        ],
    }
