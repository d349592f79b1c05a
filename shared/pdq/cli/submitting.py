"""What `pdq submit` and `pdq attach` do."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec

from pdq import settings
from pdq.cli import connect, exits, follow, output
from pdq.cli.answer import Answer, Ended, percentile
from pdq.cli.connect import Target
from pdq.cli.prompt import Ask
from pdq.cli.running import Stopped, run
from pdq.client import Client, new_request_id
from pdq.errors import PdqError, Rejected
from pdq.settings import TelemetrySettings
from pdq.telemetry import Telemetry
from pdq.up.model import find

TELEMETRY_CLOSE_S = 1.0

Work = Callable[[], Coroutine[Any, Any, PdqError | None]]


class Shown(NamedTuple):
    """How the answer is shown."""

    as_json: bool = False
    stream: bool = True
    timings: bool = False

    def write(self, text: str) -> None:
        if self.stream and not self.as_json:
            output.write(text)


def submit(where: Target, ask: Ask, shown: Shown) -> int:
    """Submit, show the answer and return the exit code. Raises Misconfigured, Rejected, OutputClosed."""
    model = choose_model(where, ask.model)
    ask = msgspec.structs.replace(ask, model=model)
    body = ask.body()
    answer = Answer(ask.request or new_request_id(), body)
    telemetry = _telemetry(where)

    async def work() -> PdqError | None:
        async with connect.bus(where) as bus:
            client = Client(bus, settings.tenant(where.environ))
            with telemetry.submit(answer.request, client.tenant, model) as span:
                answer.trace_id = span.trace_id
                await follow.submit(client, ask, answer, body, span.headers(), shown.write)
                error = answer.error()
                if error is not None:
                    span.fail(error.code)
                return error

    try:
        return _finish(answer, _outcome(work, answer), shown)
    finally:
        telemetry.close(TELEMETRY_CLOSE_S)


def attach(where: Target, request: str, after: int, shown: Shown) -> int:
    """Follow a request from its log, show the rest of its answer and return the exit code."""
    answer = Answer(request)

    async def work() -> PdqError | None:
        async with connect.bus(where) as bus:
            client = Client(bus, settings.tenant(where.environ))
            await follow.attach(client, answer, shown.write, after)
            return answer.error()

    return _finish(answer, _outcome(work, answer), shown)


def choose_model(where: Target, wanted: str) -> str:
    """The slug to submit to: of the model named, or of the only one there is."""
    models = where.models()
    if wanted:
        known = find(models, wanted) if models is not None else None
        return known.slug if known is not None else wanted
    slugs = sorted(models.by_slug) if models is not None else []
    if len(slugs) != 1:
        served = f"there are several: {', '.join(slugs)}" if slugs else "there is no models.toml here"
        raise Rejected(f"name a model with --model ({served})", code="usage", param="model")
    return slugs[0]


def _telemetry(where: Target) -> Telemetry:
    """To the local stack's traces, unless the environment names another file; and to a collector, if one is set."""
    configured = settings.load(TelemetrySettings, where.environ)
    if where.stack is not None and not configured.file:
        configured = msgspec.structs.replace(configured, file=str(where.layout.trace("cli")))
    return Telemetry.start("cli", configured, f"cli-{os.getpid()}", where.environ)


def _outcome(work: Work, answer: Answer) -> PdqError | None:
    """What it ended with; an interruption too, as there is an answer to finish."""
    try:
        return run(work)
    except PdqError as exc:
        return exc
    except Stopped as exc:
        return Interrupted(exc.number, answer)


class Interrupted(Ended):
    """A signal ended the command; the request may have been cancelled with it."""

    def __init__(self, number: int, answer: Answer) -> None:
        super().__init__(f"stopped by a signal; `pdq status {answer.request}` tells what became of it", "interrupted")
        self.exit_code = 128 + number


def _finish(answer: Answer, error: PdqError | None, shown: Shown) -> int:
    if isinstance(error, output.OutputFailed):
        raise error
    if shown.as_json:
        output.json(answer.result() | ({} if error is None else {"error": _described(error)}))
    elif not shown.stream and answer.text:
        output.write(answer.text)
    if not shown.as_json and answer.text and not answer.text.endswith("\n"):
        output.line()
    if shown.timings:
        output.note(timings(answer))
    if error is not None:
        output.error(error.code, str(error), getattr(error, "param", None))
        return error.exit_code if isinstance(error, Interrupted) else exits.of(error)
    return exits.OK


def _described(error: PdqError) -> dict[str, str | None]:
    return {"code": error.code, "message": str(error), "param": getattr(error, "param", None)}


def timings(answer: Answer) -> str:
    """A small table: what was seen here, then the stages as the log has them. Milliseconds."""
    made = answer.timings_ms()
    rows: list[tuple[object, ...]] = [("ms", "")]
    rows += [(name, made.pop(name)) for name in ("ttft", "total") if name in made]
    if gaps := answer.gaps_ms():
        rows += [("between tokens, p50", percentile(gaps, 0.5)), ("between tokens, p99", percentile(gaps, 0.99))]
    rows += list(made.items())
    lines = [output.table(rows)]
    state = answer.state
    if state is not None and state.order:
        lines.append(f"route  {state.order} ({state.reason})")
        lines.append(f"kv     {output.kv(answer.kv())}")
    if state is not None and state.usage is not None:
        lines.append(f"tokens {state.usage.prompt_tokens} + {state.usage.completion_tokens}")
    return "\n".join(lines)
