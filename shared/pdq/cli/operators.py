"""`pdq workers`, `pdq drain` and `pdq dead`: what an operator does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdq.cli import output
from pdq.cli.options import AsJson, NatsUrl
from pdq.cli.running import reported, run

if TYPE_CHECKING:
    from pdq.operators import Letter

dead_commands = typer.Typer(no_args_is_help=True, help="Messages that could not be served: look, send again, drop.")

Seq = Annotated[int, typer.Argument(metavar="SEQ", help="Its number, as `pdq dead list` shows it.")]


def workers(as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """Show the workers that are alive: stage, model, load, KV contract, when last heard of.

    \b
    Examples:
      pdq workers
      pdq workers --json
    """
    with reported(as_json):
        from pdq import operators
        from pdq.cli import connect

        where = connect.target(nats_url)

        async def work() -> list[dict[str, Any]]:
            async with connect.bus(where) as bus:
                return [
                    {
                        "worker": beat.worker,
                        "stage": beat.stage,
                        "model": beat.model,
                        "busy": beat.busy,
                        "slots": beat.slots,
                        "contract": beat.contract,
                        "heard_s_ago": round(max(0.0, time.time() - beat.at), 1) if beat.at else None,
                    }
                    for beat in await operators.workers(bus)
                ]

        found = sorted(run(work), key=lambda row: (row["stage"], row["worker"]))
        if as_json:
            output.json({"workers": found})
        elif found:
            rows = [
                (r["worker"], r["stage"], r["model"], f"{r['busy']}/{r['slots']}", r["contract"][:12]) for r in found
            ]
            output.line(output.table([("worker", "stage", "model", "busy", "contract"), *rows]))
        else:
            output.note("no worker is alive")


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its name, as `pdq workers` shows it.")],
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """Tell a worker to stop in order: it takes no more jobs, finishes what fits in its drain time, and gives back the
    rest at once.

    Under `pdq up` it is started again, as any worker that ends.

    \b
    Example:
      pdq drain host-decode-4711
    """
    with reported(as_json):
        from pdq import operators
        from pdq.cli import connect

        where = connect.target(nats_url)

        async def work() -> int:
            async with connect.bus(where) as bus:
                return (await operators.drain(bus, worker)).busy

        busy = run(work)
        if as_json:
            output.json({"worker": worker, "busy": busy})
        else:
            output.note(f"{worker} takes no more jobs; it still works on {busy}")


@dead_commands.command("list")
def dead_list(
    after: Annotated[int, typer.Option(metavar="SEQ", help="Only those after this number.")] = 0,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1_000)] = 100,
    as_json: AsJson = False,
    nats_url: NatsUrl = "",
) -> None:
    """List dead letters, oldest first.

    \b
    Example:
      pdq dead list --json | jq .letters[].error.code
    """
    with reported(as_json):
        from pdq import operators
        from pdq.cli import connect

        where = connect.target(nats_url)

        async def work() -> list[Letter]:
            async with connect.bus(where) as bus:
                return await operators.dead_letters(bus, after=after, limit=limit)

        letters = run(work)
        if as_json:
            output.json({"letters": [_plain(letter) for letter in letters]})
        elif letters:
            rows = [
                (one.seq, one.letter.stage, one.letter.request, one.letter.error.code, _age(one)) for one in letters
            ]
            output.line(output.table([("seq", "stage", "request", "cause", "age"), *rows]))
        else:
            output.note("there are no dead letters")


@dead_commands.command("show")
def dead_show(seq: Seq, as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """Show a dead letter: cause, attempts, worker, trace. Its body, which holds a prompt, is not shown.

    \b
    Example:
      pdq dead show 17
    """
    with reported(as_json):
        letter = _one(seq, nats_url)
        plain = _plain(letter)
        if as_json:
            output.json(plain)
        else:
            error = plain.pop("error")
            rows = {**plain, "cause": f"{error['code']}: {error['message']}"}
            output.line(output.table([(name, str(value)) for name, value in rows.items()]))


@dead_commands.command("replay")
def dead_replay(seq: Seq, as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """Submit what a dead letter holds as a new request (its state names the old one as replay_of). The letter stays.

    \b
    Example:
      pdq dead replay 17 && pdq dead drop 17
    """
    with reported(as_json):
        from pdq import operators
        from pdq.cli import connect

        where = connect.target(nats_url)
        letter = _one(seq, nats_url)

        async def work() -> str:
            async with connect.bus(where) as bus:
                return (await operators.replay(bus, letter)).request

        request = run(work)
        if as_json:
            output.json({"id": request, "replay_of": letter.letter.request})
        else:
            output.line(request)
            output.note(f"follow it with `pdq attach {request}`")


@dead_commands.command("drop")
def dead_drop(seq: Seq, as_json: AsJson = False, nats_url: NatsUrl = "") -> None:
    """Remove a dead letter.

    \b
    Example:
      pdq dead drop 17
    """
    with reported(as_json):
        from pdq import operators
        from pdq.cli import connect

        where = connect.target(nats_url)
        _one(seq, nats_url)

        async def work() -> None:
            async with connect.bus(where) as bus:
                await operators.drop(bus, seq)

        run(work)
        if as_json:
            output.json({"dropped": seq})


def _one(seq: int, nats_url: str) -> Letter:
    from pdq import operators
    from pdq.cli import connect
    from pdq.errors import Rejected

    where = connect.target(nats_url)

    async def work() -> Letter | None:
        async with connect.bus(where) as bus:
            return await operators.dead_letter(bus, seq)

    letter = run(work)
    if letter is None:
        raise Rejected(f"there is no dead letter {seq}", code="not_found", param="SEQ")
    return letter


def _plain(one: Letter) -> dict[str, Any]:
    """A dead letter without its body and headers: those hold what the client sent."""
    letter = one.letter
    return {
        "seq": one.seq,
        "stage": letter.stage,
        "tenant": one.tenant,
        "model": one.model,
        "request": letter.request,
        "error": {"code": letter.error.code, "message": letter.error.message},
        "attempts": letter.attempts,
        "worker": letter.worker,
        "trace": letter.trace,
        "at": letter.at,
        "body_bytes": letter.body_omitted or len(letter.body),
    }


def _age(one: Letter) -> str:
    seconds = max(0.0, time.time() - one.letter.at)
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
