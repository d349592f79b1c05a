"""`pdq up`, `pdq down` and `pdq status`."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

if TYPE_CHECKING:
    from pdq.cli.connect import Target
    from pdq.up.caches import KvMode
    from pdq.up.plan import Options
    from pdq.up.record import Record, SiteRecord

TRY = 'pdq submit "What is the capital of France?"'


def up(
    engine: Annotated[Literal["vllm", "sim"], typer.Option(help="vllm: a real model. sim: no weights, for tries.")] = (
        "vllm"
    ),
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A name of models.toml, a Hugging Face id, or a directory.")
    ] = "",
    order: Annotated[
        Literal["auto", "prefill-first", "decode-first", "decode-only"] | None,
        typer.Option(help="Of requests that ask for none; default: auto, what is estimated to be the soonest."),
    ] = None,
    kv: Annotated[
        Literal["host", "pool", "p2p"] | None,
        typer.Option(help="How KV moves: one LMCache server; a server per worker and a pool; from peer to peer."),
    ] = None,
    edge: Annotated[
        bool, typer.Option("--edge", help="A site beside it: a broker that takes requests while the hub is away.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is ready; `pdq down` ends it.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Until everything must be ready.")] = 900,
    as_json: AsJson = False,
) -> None:
    """Run the whole stack on this machine, until Ctrl-C.

    The broker (nats-server), the KV tiers (LMCache), the router, the gateway (OpenAI's API on port 8000, or a free
    one), a prefill and a decode worker: each a process with a port, a log and a place in `pdq status`. One that dies
    is restarted. Nothing is left behind.

    \b
    Examples:
      pdq up                            the model of models.toml, in the foreground
      pdq up --detach                   in the background; pdq down ends it
      pdq up --model ORG/NAME           another model of the Hugging Face hub
      pdq up --engine sim --detach      no weights, ready in seconds
      pdq up --kv pool                  KV through a directory that both workers read
      pdq up --edge                     with a site: a leaf broker, its forwarder and gateway
      pdq up -d --json                  ports and process ids, for scripts

    Files are in $PDQ_HOME/stack (~/.pdq/stack): logs/, traces/, the broker's store.
    """
    with reported(as_json):
        options = _options(engine, model, order, timeout, kv)._replace(edge=edge)
        if detach:
            _detach(options, as_json)
        else:
            _foreground(options, as_json)


def down() -> None:
    """End the stack that runs on this machine, and wait until nothing of it is left.

    \b
    Example:
      pdq down
    """
    with reported():
        from pdq import settings
        from pdq.up import background
        from pdq.up.layout import Layout

        ended = background.down(Layout.of(settings.home(os.environ)))
        output.note("no stack is running" if ended is None else f"the stack is down (pid {ended.pid})")


def status(
    request: Annotated[str, typer.Argument(metavar="[ID]", help="A request; without: the stack.")] = "",
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Show the stack (processes, memory, queues, workers), or one request.

    \b
    Examples:
      pdq status                  processes, readiness, memory, queue depths, live workers
      pdq status r-3f2a           how far a request is, its route and its times
      pdq status --json | jq .queues
    """
    with reported(as_json):
        if request:
            _request_status(request, as_json, nats_url)
        else:
            _stack_status(as_json, nats_url)


def _options(
    engine: Literal["vllm", "sim"], model: str, order: str | None, timeout: float, kv: KvMode | None
) -> Options:
    from pdq import settings
    from pdq.settings import KvSettings
    from pdq.up.layout import Layout
    from pdq.up.plan import Options

    settings.check_environment(os.environ)
    layout = Layout.of(settings.home(os.environ))
    mode = kv or settings.load(KvSettings, os.environ).mode
    return Options(layout, os.environ, engine, model, order or "", timeout, mode)


def _foreground(options: Options, as_json: bool) -> None:
    from pdq.up import progress
    from pdq.up.run import up as run_stack

    told = False

    with progress.shown() as show:

        def see(record: Record) -> None:
            nonlocal told
            show(record)
            if record.state == "ready" and not told:
                told = True
                _announce(record, as_json)

        run_stack(options, see)


def _announce(record: Record, as_json: bool) -> None:
    if as_json:
        output.json(described(record))
    else:
        output.note(f"\nready: broker {record.nats_url}, model {record.models[0].slug}. Ctrl-C ends the stack.")
        output.note(f"OpenAI's API: {record.api_url}")
        output.note(f"try:   {TRY}")
        if record.site is not None:
            output.note(f"site {record.site.name}: broker {record.site.nats_url}, OpenAI's API: {record.site_api_url}")
            output.note(f"try:   {at_site(record.site)} {TRY}")


def _detach(options: Options, as_json: bool) -> None:
    from pdq.up import background, progress

    arguments = ["--engine", options.engine, "--timeout", f"{options.timeout_s:g}"]
    arguments += ["--model", options.model] if options.model else []
    arguments += ["--order", options.order] if options.order else []
    arguments += ["--kv", options.kv]
    arguments += ["--edge"] if options.edge else []
    with progress.shown() as show:
        record = background.detach(options, arguments, show)
    if as_json:
        output.json(described(record))
    else:
        output.line(f"broker  {record.nats_url}")
        output.line(f"api     {record.api_url}")
        if record.site is not None:
            output.line(f"site    {record.site.name}: broker {record.site.nats_url}, api {record.site_api_url}")
        output.line(f"model   {', '.join(model.slug for model in record.models)} ({record.engine})")
        output.line(f"files   {record.directory}")
        output.line()
        output.line(output.table([(p.name, f"pid {p.pid}", ports(p.ports)) for p in record.processes]))
        if record.site is not None:
            output.note(f"\nat the site:   {at_site(record.site)} {TRY}")


def at_site(site: SiteRecord) -> str:
    """What to put before a command that speaks to the site."""
    return f"PDQ_NATS_URL={site.nats_url} PDQ_TENANT={site.name}"


def described(record: Record) -> dict[str, Any]:
    """What `--json` prints of a stack: ports and process ids."""
    return {
        "pid": record.pid,
        "state": record.state,
        "engine": record.engine,
        "nats_url": record.nats_url,
        "api_url": record.api_url,
        "site": _site(record),
        "models": [{"slug": model.slug, "id": model.id} for model in record.models],
        "directory": record.directory,
        "processes": [{"name": p.name, "pid": p.pid, "ports": p.ports} for p in record.processes],
    }


def _site(record: Record) -> dict[str, str] | None:
    site = record.site
    if site is None:
        return None
    return {"name": site.name, "nats_url": site.nats_url, "api_url": record.site_api_url}


def ports(named: dict[str, int]) -> str:
    return ", ".join(f"{name} {port}" for name, port in named.items())


def _request_status(request: str, as_json: bool, nats_url: str) -> None:
    from pdq import settings
    from pdq.cli import connect, follow, inspect
    from pdq.cli.prompt import check_request
    from pdq.client import Client
    from pdq.messages import State

    async def work() -> State:
        async with connect.bus(where) as bus:
            state = await Client(bus, settings.tenant(where.environ)).state(check_request(request, reserved=True))
            if state is None:
                raise follow.not_found(request)
            return state

    where = connect.target(nats_url)
    state = run(work)
    if as_json:
        output.json(inspect.request(request, state))
    else:
        output.line(output.table(inspect.request_rows(request, state)))


def _stack_status(as_json: bool, nats_url: str) -> None:
    from pdq.cli import connect

    where = connect.target(nats_url, starting=True)
    found = run(lambda: _collect(where))
    if as_json:
        output.json(found)
        return
    if found["stack"]:
        output.line(_stack_text(found["stack"]))
    if found["site"]:
        output.line(f"\nrequests that wait at the site for the hub: {found['site']['waiting']}")
        if not found["queues"]:
            return
    queues = [(_queue_name(q), q["waiting"], q["running"]) for q in found["queues"]]
    told = output.table([("queue", "waiting", "running"), *queues]) if queues else "no queues: run `pdq init`"
    output.line(f"\n{told}")
    output.line(f"\n{len(found['workers'])} workers alive")
    rows = [(w["worker"], w["stage"], w["model"], f"{w['busy']} of {w['slots']} busy") for w in found["workers"]]
    output.line(output.table(rows))


async def _collect(where: Target) -> dict[str, Any]:
    from pdq import operators
    from pdq.cli import connect, inspect
    from pdq.errors import Unavailable

    stack = where.stack
    found: dict[str, Any] = {"stack": None, "site": None, "queues": [], "workers": []}
    if stack is not None:
        found["stack"] = described(stack) | {"processes": await inspect.processes(stack)}
        if not stack.nats_url:
            return found
    async with connect.bus(where) as bus:
        found["site"] = await inspect.site(bus)
        if found["site"] is None:
            found["queues"] = [queue._asdict() for queue in await inspect.queues(bus)]
            found["workers"] = [inspect.worker(beat) for beat in await operators.workers(bus)]
    if found["site"] is None and stack is not None and stack.site is not None:
        with contextlib.suppress(Unavailable):
            async with connect.bus(where.at(stack.site.nats_url)) as bus:
                found["site"] = await inspect.site(bus)
    return found


def _stack_text(stack: dict[str, Any]) -> str:
    header = f"{stack['state']}: broker {stack['nats_url'] or '(starting)'}, engine {stack['engine']}\n"
    if site := stack["site"]:
        header += f"site {site['name']}: broker {site['nats_url']}, api {site['api_url'] or '(starting)'}\n"
    rows: list[tuple[object, ...]] = [("process", "state", "pid", "MB", "ports")]
    for process in stack["processes"]:
        state = process["state"] if process["ready"] or process["state"] != "ready" else "not ready"
        restarts = f", {process['restarts']} restarts" if process["restarts"] else ""
        rows.append(
            (
                process["name"],
                state + restarts,
                process["pid"],
                process["rss_bytes"] // 1_000_000,
                ports(process["ports"]),
            )
        )
    return f"{header}\n{output.table(rows)}"


def _queue_name(queue: dict[str, Any]) -> str:
    return f"{queue['stage']} {queue['model']} {queue['priority']}"
