"""A mode's answers in each order: those of a plain engine, with KV loaded as promised, and the spans that tell it."""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections.abc import Sequence
from typing import get_args

import msgspec
from pdq.client import new_request_id
from pdq.engines.plain import PlainAnswer
from pdq.messages import Order
from pdq.traces import Trace, TraceSpan, find
from pdq.verify.compare import Given, compare
from pdq.verify.prompts import Prompt

from tests.matrix.rig import TIERS, Rig, Timed

ORDERS: tuple[Order, ...] = get_args(Order)
SPANS_S = 20.0
"""For the spans of a request to be written: services send them in batches."""
MOVED = frozenset({"kv.lookup", "kv.store", "kv.load"})
SPANS: dict[Order, frozenset[str]] = {
    "prefill-first": MOVED,
    "decode-first": MOVED | {"kv.wait"},
    "decode-only": frozenset({"kv.lookup"}),
}
"""Of the parts that move KV: these are there, and no others."""


class Cell(msgspec.Struct, kw_only=True):
    """One mode in one order."""

    mode: str
    order: str
    prompts: int
    equal: int = 0
    promised: int = 0
    loaded: int = 0
    load_ms: float | None = None
    """Median of the spans `kv.load`."""
    wrong: list[str] = []
    """What is not as it must be, a line each."""


async def in_order(rig: Rig, order: Order, prompts: Sequence[Prompt], plain: Sequence[PlainAnswer]) -> Cell:
    """All prompts through the stack in this order, one at a time, under a tenant that has no KV yet."""
    tenant = f"t{secrets.token_hex(4)}"
    cell = Cell(mode=rig.mode, order=order, prompts=len(prompts))
    loads: list[float] = []
    for prompt, expected in zip(prompts, plain, strict=True):
        answered = await rig.ask(prompt, tenant, order, len(expected.ids), Timed(new_request_id()))
        verdict = compare(answered, expected, rig.spec.chunk_tokens)
        cell.equal += verdict.ok
        cell.promised += answered.promised_tokens
        cell.loaded += answered.loaded_tokens
        trace, lacking = await _trace(rig, order, answered.request)
        wrong = [lacking, "" if verdict.ok else f"{verdict.outcome}: {verdict.cause}", _unkept(order, answered)]
        cell.wrong += [f"{prompt.name} ({answered.request}): {each}" for each in wrong if each]
        loads += [(span.end_ns - span.start_ns) / 1e6 for span in _named(trace, "kv.load")]
    cell.load_ms = statistics.median(loads) if loads else None
    return cell


def _unkept(order: Order, answered: Given) -> str:
    """What of a promise was not kept; each tenant's prompts are new, so that nothing is there without one."""
    promised, loaded = answered.promised_tokens, answered.loaded_tokens
    if loaded != promised:
        return f"{loaded} of {promised} promised tokens loaded"
    if (promised > 0) == (order == "decode-only"):
        return f"{promised} tokens promised"
    return ""


async def _trace(rig: Rig, order: Order, request: str) -> tuple[Trace | None, str]:
    """The request's trace, once it is whole; and what it lacks, if it does not become that."""
    trace, lacking = None, "no trace"
    try:
        async with asyncio.timeout(SPANS_S):
            while lacking:
                await asyncio.sleep(0.05)
                traces = find(rig.stack.directory, request)
                trace = traces[0] if len(traces) == 1 else None
                lacking = _lacking(rig, order, trace) if trace else f"{len(traces)} traces"
    except TimeoutError:
        pass
    return trace, lacking


def _lacking(rig: Rig, order: Order, trace: Trace) -> str:
    names = {span.name for span in trace.spans if span.name.startswith("kv.")}
    if names != SPANS[order]:
        return f"its spans are {sorted(names)}"
    if len(trace.roots) != 1:
        return f"its trace has {len(trace.roots)} roots"
    tiers = {span.attributes.get("pdq.kv.tier") for span in _named(trace, "kv.load")}
    return "" if tiers <= {TIERS[rig.mode]} else f"loaded from {tiers}"


def _named(trace: Trace | None, name: str) -> list[TraceSpan]:
    return [span for span in trace.spans if span.name == name] if trace else []
