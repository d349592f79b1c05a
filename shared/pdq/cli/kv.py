"""`pdq kv`: what the KV tiers hold, and where a request's KV came from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

if TYPE_CHECKING:
    from pdq.kv.where import Tiers
    from pdq.traces import TraceSpan

MEGABYTE = 1_000_000


def kv(
    request: Annotated[str, typer.Argument(metavar="[ID]", help="A request; without: the servers.")] = "",
    host: Annotated[str, typer.Option(metavar="HOST", help="Of one LMCache server, with --http-port.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65_535, help="Its HTTP port; default: those of the stack.")
    ] = 0,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Show the KV tiers of each LMCache server (what they hold, what lookups found), or of one request.

    A tenant is shown as the hash that its KV is kept under. A request's prompt is kept nowhere: shown is what its
    spans say of each lookup, load and store.

    \b
    Examples:
      pdq kv                          tiers, usage, hit rates, tenants
      pdq kv r-3f2a                   promised and loaded tokens, and the tier they came from
      pdq kv --host gpu-1 --http-port 8080 --json
    """
    with reported(as_json):
        if request:
            found = run(lambda: _of_request(request, nats_url))
            output.json(found) if as_json else output.line(_request_text(found))
        else:
            servers = run(lambda: _servers(host, http_port, nats_url))
            output.json({"servers": servers}) if as_json else output.line(_servers_text(servers))


async def _servers(host: str, http_port: int, nats_url: str) -> list[dict[str, Any]]:
    import asyncio

    addresses = {f"{host}:{http_port}": (host, http_port)} if http_port else await _known(nats_url)
    return list(await asyncio.gather(*(_ask(name, *address) for name, address in addresses.items())))


async def _known(nats_url: str) -> dict[str, tuple[str, int]]:
    """The servers of the stack that runs here, else those that live workers name."""
    from pdq import operators
    from pdq.cli import connect
    from pdq.up.machine import HOST

    where = connect.target(nats_url)
    if where.stack is not None:
        processes = [process for process in where.stack.processes if "lmcache" in process.ports]
        return {process.name: (HOST, process.ports["http"]) for process in processes}
    async with connect.bus(where) as bus:
        said = [beat.about for beat in await operators.workers(bus) if "kv.http_port" in beat.about]
    return {
        f"{about['kv.host']}:{about['kv.http_port']}": (about["kv.host"], int(about["kv.http_port"])) for about in said
    }


async def _ask(name: str, host: str, http_port: int) -> dict[str, Any]:
    import aiohttp
    import msgspec

    from pdq.kv.tier import tiers

    shown: dict[str, Any] = {"name": name, "host": host, "http_port": http_port}
    try:
        found = await tiers(host, http_port)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as exc:
        return shown | {"error": f"does not answer: {type(exc).__name__}"}
    told: dict[str, Any] = msgspec.to_builtins(found)
    return shown | told | {"hit_rates": _rates(found)}


def _rates(found: Tiers) -> dict[str, float | None]:
    """Share of the tokens looked up, by tier; None while there were none."""
    asked = found.asked_tokens
    near, far = found.near_tokens, found.far_tokens
    return {"l1": near / asked if asked else None, "far": far / asked if asked else None}


def _servers_text(servers: list[dict[str, Any]]) -> str:
    if not servers:
        return "no LMCache server is known: the sim engine has none, and no live worker names one"
    return "\n\n".join(_server_text(server) for server in servers)


def _server_text(server: dict[str, Any]) -> str:
    title = f"{server['name']} ({server['host']}:{server['http_port']})"
    if "error" in server:
        return f"{title}  {server['error']}"
    rates = server["hit_rates"]
    rows: list[tuple[object, ...]] = [("tier", "kind", "MB", "of", "looked up")]
    for level in server["levels"]:
        rate = rates["l1" if level["tier"] == "l1" else "far"]
        rows.append(
            (
                level["tier"],
                level["kind"] if level["healthy"] else f"{level['kind']} (not healthy)",
                level["used_bytes"] // MEGABYTE,
                level["capacity_bytes"] // MEGABYTE or "",
                "" if rate is None else f"{rate:.0%} found",
            )
        )
    text = f"{title}  {server['asked_tokens']} tokens looked up\n{output.table(rows)}"
    return f"{text}\n{_tenants_text(server['tenants'])}" if server["tenants"] else text


def _tenants_text(tenants: list[dict[str, Any]]) -> str:
    rows: list[tuple[object, ...]] = [("tenant", "MB", "quota")]
    for tenant in tenants:
        quota = tenant["quota_bytes"]
        rows.append((tenant["salt"][:12], tenant["used_bytes"] // MEGABYTE, "" if quota is None else quota // MEGABYTE))
    return output.table(rows)


async def _of_request(request: str, nats_url: str) -> dict[str, Any]:
    """Raises Rejected when there is no such request."""
    import msgspec

    from pdq import settings
    from pdq.cli import connect, follow
    from pdq.cli.prompt import check_request
    from pdq.client import Client

    where = connect.target(nats_url)
    async with connect.bus(where) as bus:
        state = await Client(bus, settings.tenant(os.environ)).state(check_request(request, reserved=True))
    if state is None:
        raise follow.not_found(request)
    return {
        "id": request,
        "prompt_tokens": state.prompt_tokens,
        "kv": msgspec.to_builtins(state.kv) if state.kv else None,
        "spans": [_span(span) for span in await _spans(request, nats_url)],
    }


async def _spans(request: str, nats_url: str) -> list[TraceSpan]:
    """Those of the request that tell of its KV; none when it was not traced, or its trace is gone."""
    from pdq.cli import tracing
    from pdq.errors import Rejected

    try:
        trace = await tracing.found(request, nats_url)
    except Rejected:
        return []
    return [span for _, span, _ in trace.walk() if span.name.startswith("kv.")]


def _span(span: TraceSpan) -> dict[str, Any]:
    told = {
        name.removeprefix("pdq.kv."): value for name, value in span.attributes.items() if name.startswith("pdq.kv.")
    }
    return {"name": span.name, "service": span.service, "ms": round((span.end_ns - span.start_ns) / 1e6, 1)} | told


def _request_text(found: dict[str, Any]) -> str:
    import msgspec

    from pdq.messages import KvReport

    title = f"{found['id']}  {found['prompt_tokens']} prompt tokens"
    if found["kv"]:
        title += f", {output.kv(msgspec.convert(found['kv'], KvReport))}"
    if not found["spans"]:
        return f"{title}\nno spans: it was not traced, or its trace is not here"
    rows: list[tuple[object, ...]] = [("", "by", "tier", "tokens", "MB", "ms")]
    rows += [_span_row(span) for span in found["spans"]]
    return f"{title}\n{output.table(rows)}"


def _span_row(span: dict[str, Any]) -> tuple[object, ...]:
    size = f"{span['bytes'] / MEGABYTE:.1f}" if "bytes" in span else ""
    tier = span.get("tier", span.get("cause", ""))
    near = span.get("near_tokens", 0)
    if tier in ("l2", "peer") and near:
        tier = f"{tier}, {near} tokens l1"
    return (span["name"], span["service"], tier, span.get("tokens", ""), size, span["ms"])
