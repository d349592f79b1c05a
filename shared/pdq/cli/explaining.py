"""What a request's log tells of its order: as JSON, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pdq.cli import output
from pdq.cli.follow import not_found
from pdq.client import Client
from pdq.messages import KvReport, LocalCause, Order, OrderReason, StageClaims, State

REASONS: dict[OrderReason, str] = {
    "requested": "the request asked for it",
    "default": "the router is set to it (PDQ_ROUTER_ORDER)",
    "no_prefill_worker": "no prefill worker was alive",
    "short_prompt": "the prompt is short: it has no whole chunk of KV to move, or too little to be worth it",
    "cached": "the KV of the prompt is likely there already, but for less than a chunk",
    "long_prompt": "the prompt is long, and what each order takes has not been measured yet",
    "prefill_sooner": "a prefill elsewhere was estimated to give the first token soonest",
    "decode_sooner": "computing the prompt at decode was estimated to give the first token no later than a handoff",
    "partly_cached": "decode likely has a part of the KV, and a slot to spare: it looks, and delegates what is missing",
}
LOCALS: dict[LocalCause, str] = {
    "late": "the prefill had not come within the time that decode waits for it",
    "prefill_failed": "the prefill failed for good (`pdq dead list`)",
    "no_prefill_worker": "no prefill worker whose KV it can use was alive",
    "queue_full": "the prefill queue had no room",
}
EXCESS = "it waited behind all others: its tenant's share was waiting already (PDQ_ROUTER_FAIR_SHARE)"
ESTIMATE = "estimate_"
EVENT_FIELDS = ("stage", "worker", "cause")


async def states(client: Client, request: str) -> list[State]:
    """All states of a request, oldest first. Raises Rejected when the log does not know it, or Unavailable."""
    found: list[State] = []
    after, more = 0, True
    while more:
        page = await client.read(request, after=after, limit=1_000)
        found += [event.state for event in page.events if event.state is not None]
        after, more = page.events[-1].seq if page.events else after, page.more
    if not found:
        raise not_found(request)
    return found


def explained(request: str, log: Sequence[State]) -> dict[str, Any]:
    """What `--json` prints. `log`: all its states, oldest first; at least one. Times are milliseconds."""
    newest = log[-1]
    began = newest.submitted or log[0].at
    numbers = next((state.inputs for state in log if state.event == "routed"), {})
    return {
        "id": request,
        "state": newest.event,
        "finish_reason": newest.finish_reason,
        "error": {"code": newest.error.code, "message": newest.error.message} if newest.error else None,
        "order": newest.order,
        "reason": newest.reason,
        "why": _words(REASONS, newest.reason),
        "inputs": {name: value for name, value in numbers.items() if not name.startswith(ESTIMATE)},
        "estimates_ms": _estimates_ms(numbers),
        "lane": newest.lane or newest.priority,
        "local": newest.local,
        "local_why": _words(LOCALS, newest.local),
        "prefer": newest.prefer,
        "decoded_by": newest.decode.owner,
        "kv": _kv(newest),
        "attempts": {"prefill": _attempts(newest.prefill), "decode": _attempts(newest.decode)},
        "timings_ms": newest.timings_ms,
        "events": [_event(state, began) for state in log],
    }


def _words(known: dict[Any, str], name: str) -> str:
    """A name of a newer version stands for itself."""
    return known.get(name, name)


def _estimates_ms(numbers: dict[str, float]) -> dict[str, float] | None:
    """To the first token, by order; None where costs were not known."""
    name = ESTIMATE + "{}_s"
    keys = {order: name.format(order.replace("-", "_")) for order in get_args(Order)}
    found = {order: round(numbers[key] * 1e3, 3) for order, key in keys.items() if key in numbers}
    return found or None


def _kv(state: State) -> dict[str, Any]:
    report, promise = state.kv or KvReport(), state.promise
    return {
        "promised_tokens": promise.tokens if promise else report.promised_tokens,
        "loaded_tokens": report.loaded_tokens,
        "local_tokens": report.local_tokens,
        "cause": report.cause or (promise.cause if promise else ""),
    }


def _attempts(claims: StageClaims) -> dict[str, int]:
    return {"attempts": claims.attempt, "failures": claims.failures}


def _event(state: State, began: float) -> dict[str, Any]:
    told = {name: getattr(state, name) for name in EVENT_FIELDS if getattr(state, name)}
    return {"event": state.event, "after_ms": round(max(0.0, state.at - began) * 1e3, 1), **told}


def text(found: dict[str, Any]) -> str:
    """For people."""
    parts = [output.table(_summary(found))]
    if found["estimates_ms"]:
        parts.append(output.table([("estimated to the first token", "ms"), *found["estimates_ms"].items()]))
    if found["inputs"]:
        parts.append(output.table([("decided from", ""), *((k, _number(v)) for k, v in found["inputs"].items())]))
    rows = [(e["after_ms"], e["event"], " ".join(str(e[n]) for n in EVENT_FIELDS if n in e)) for e in found["events"]]
    parts.append(output.table([("ms", "what happened", ""), *rows]))
    if found["timings_ms"]:
        parts.append(output.table([("took", "ms"), *found["timings_ms"].items()]))
    return "\n\n".join(parts)


def _summary(found: dict[str, Any]) -> list[tuple[str, str]]:
    error, kv = found["error"], found["kv"]
    ended = f"{found['state']}, {found['finish_reason']}" if found["finish_reason"] else found["state"]
    order = f"{found['order']} ({found['reason']}): {found['why']}" if found["order"] else "none was chosen"
    local = f"decode computed the prompt itself ({found['local']}): {found['local_why']}" if found["local"] else ""
    report = KvReport(
        promised_tokens=kv["promised_tokens"], loaded_tokens=kv["loaded_tokens"], local_tokens=kv["local_tokens"]
    )
    rows = {
        "id": found["id"],
        "state": ended,
        "error": f"{error['code']}: {error['message']}" if error else "",
        "order": order,
        "lane": EXCESS if found["lane"] == "excess" else "",
        "local": local,
        "prefers": _met(found["prefer"], found["decoded_by"]),
        "kv": output.kv(report) + (f" ({kv['cause']})" if kv["cause"] else "") if found["order"] else "",
        "attempts": ", ".join(_tries(stage, tries) for stage, tries in found["attempts"].items() if tries["attempts"]),
    }
    return [(label, told) for label, told in rows.items() if told]


def _met(prefer: str, decoded_by: str) -> str:
    """What became of a request's wish for a worker; empty where it had none."""
    if not prefer or not decoded_by:
        return prefer
    return f"{prefer}, which decoded it" if prefer == decoded_by else f"{prefer}; decoded by {decoded_by}"


def _tries(stage: str, tries: dict[str, int]) -> str:
    return f"{stage} {tries['attempts']}" + (f" ({tries['failures']} failed)" if tries["failures"] else "")


def _number(value: float) -> str:
    """As it is: a share and a count of tokens stand in one column."""
    return f"{value:,.6f}".rstrip("0").rstrip(".")
