"""What `pdq verify` does: prompts through the stack, then through a plain engine, then the comparison."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdq import settings
from pdq.cli import connect, exits, output
from pdq.cli.connect import Target
from pdq.cli.running import run
from pdq.cli.submitting import choose_model
from pdq.client import Client
from pdq.engines.plain import Job, PlainAnswer
from pdq.errors import Misconfigured
from pdq.settings import ModelSpec
from pdq.up.machine import check_engine
from pdq.up.plan import clean
from pdq.verify import plain, stack
from pdq.verify.compare import TOLERANCE, Given, Verdict, compare
from pdq.verify.prompts import Prompt, make

Stepped = Callable[[], None]


class Asked(NamedTuple):
    """The command's options."""

    prompts: int
    max_tokens: int
    order: str
    allow_recompute: bool
    model: str


def verify(where: Target, asked: Asked, as_json: bool) -> int:
    """Show a verdict for each prompt, and return the exit code. Raises Misconfigured, Unavailable, QueueFull."""
    spec = _model(where, asked.model)
    prompts = make(asked.prompts, secrets.token_hex(2))
    job = plain.job(spec, prompts, asked.max_tokens)

    async def work() -> list[Verdict]:
        given = await _through_stack(where, spec, prompts, asked)
        answers = await _through_plain(where, job)
        pairs = zip(given, answers, strict=True)
        return [compare(*pair, spec.chunk_tokens, allow_recompute=asked.allow_recompute) for pair in pairs]

    verdicts = run(work)
    if as_json:
        output.json({"model": spec.id, "equal": _all_ok(verdicts), "tolerance": TOLERANCE, "prompts": verdicts})
    else:
        output.line(output.table([HEADER, *map(_row, verdicts)]))
        output.line(f"\n{_summary(verdicts)}")
    return exits.OK if _all_ok(verdicts) else exits.FAILED


def _model(where: Target, wanted: str) -> ModelSpec:
    """The model to verify. Raises Misconfigured where there is no plain engine to compare with."""
    slug = choose_model(where, wanted)
    models = where.models()
    spec = models.get(slug) if models is not None else None
    if spec is None:
        raise Misconfigured(f"model {slug!r} is not in the models.toml here: PDQ_MODELS names the one that is served")
    if spec.tokenizer == "bytes" or (where.stack is not None and where.stack.engine == "sim"):
        raise Misconfigured(f"{slug!r} runs on the sim engine, which has no weights: there is no plain engine of it")
    check_engine()
    return spec


async def _through_stack(where: Target, spec: ModelSpec, prompts: Sequence[Prompt], asked: Asked) -> list[Given]:
    """One at a time: an engine's numbers may depend on what else it runs."""
    with _progress("through the stack", len(prompts)) as stepped:
        async with connect.bus(where) as bus:
            client = Client(bus, settings.tenant(where.environ))
            given = []
            for prompt in prompts:
                given.append(await stack.ask(client, spec.slug, prompt, asked.max_tokens, asked.order))
                stepped()
            return given


async def _through_plain(where: Target, job: Job) -> list[PlainAnswer]:
    with _progress("through a plain engine", len(job.prompts)) as stepped:
        return await plain.ask(job, clean(where.environ), stepped)


@contextlib.contextmanager
def _progress(what: str, num: int) -> Iterator[Stepped]:
    """A bar on a terminal, else one line."""
    if not sys.stderr.isatty():
        output.note(f"{num} prompts {what}")
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=num)
        yield lambda: bar.advance(task)


def _all_ok(verdicts: Sequence[Verdict]) -> bool:
    return all(verdict.ok for verdict in verdicts)


HEADER = (
    *("prompt", "order", "tokens", "KV promised", "loaded", "local"),
    *("answer", "equal", "|Δ| first", "|Δ| max", "gap", "verdict"),
)


def _row(verdict: Verdict) -> tuple[object, ...]:
    return (
        *(verdict.name, verdict.order or "-", verdict.prompt_tokens),
        *(verdict.promised_tokens, verdict.loaded_tokens, verdict.local_tokens, verdict.tokens, verdict.equal_tokens),
        *map(_number, (verdict.first_delta, verdict.max_delta, verdict.gap)),
        f"{verdict.outcome}: {verdict.cause} ({verdict.request})" if verdict.cause else verdict.outcome,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _summary(verdicts: Sequence[Verdict]) -> str:
    good = sum(verdict.ok for verdict in verdicts)
    promised = sum(verdict.promised_tokens for verdict in verdicts)
    loaded = sum(verdict.loaded_tokens for verdict in verdicts)
    local = sum(verdict.local_tokens for verdict in verdicts)
    tokens = sum(verdict.equal_tokens for verdict in verdicts)
    had = f", {local} still there" if local else ""
    return (
        f"{good} of {len(verdicts)} prompts verified, {tokens} tokens as a plain engine's; "
        f"decode loaded {loaded} of {promised} promised tokens of KV{had}"
    )
