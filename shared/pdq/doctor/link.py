"""Whether KV moves as fast as prefill makes it: else prefill waits, and handing over costs more than it saves.

Both are what the workers measured of their own work and tell in their beats; nothing is sent to find out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdq.doctor.facts import Facts, Worker
from pdq.doctor.finding import Finding, fail, ok, warn

SIM = "sim/"
SPARE = 2.0
"""Less than this many times what is needed is tight: stores and loads share the link, and come in bursts."""
CURE = (
    "shared memory for the LMCache server (PDQ_KV_SERVER_SHM_NAME), workers of one host, or a faster network; "
    "until then PDQ_ROUTER_ORDER=decode-only costs less"
)


class Rate(NamedTuple):
    """Tokens or bytes per second, and whose they are."""

    per_s: float
    where: str


def bandwidth(facts: Facts) -> Iterator[Finding]:
    """Per model: KV bytes per second that prefill makes, against those that are stored and loaded."""
    for model, workers in facts.by_model().items():
        per_token = max(worker.beat.costs.kv_bytes_per_token for worker in workers)
        if not per_token or not any(worker.beat.stage == "prefill" for worker in workers):
            continue
        if any(worker.contract.get("engine", "").startswith(SIM) for worker in workers):
            yield ok("link.bandwidth", "a simulated engine: its speeds say nothing of a link", subject=model)
            continue
        makes, moves = _fastest_prefill(workers), _slowest_way(workers)
        if moves is None:
            yield _unmeasured(facts, model, per_token, makes)
        elif makes is None:
            text = (
                f"KV moves with {_mb(moves.per_s)} ({moves.where}): enough for {moves.per_s / per_token:,.0f} prompt "
            )
            text += "tokens a second; how fast prefill is has not been measured yet"
            yield ok("link.bandwidth", text, subject=model, value=round(moves.per_s))
        else:
            yield _judged(model, per_token, makes, moves)


def _judged(model: str, per_token: int, makes: Rate, moves: Rate) -> Finding:
    need = makes.per_s * per_token
    text = f"prefill makes {_mb(need)} of KV ({makes.per_s:,.0f} tokens/s × {per_token:,} bytes, {makes.where}); "
    text += f"the slowest way takes {_mb(moves.per_s)} ({moves.where})"
    if moves.per_s >= SPARE * need:
        return ok("link.bandwidth", text, subject=model, value=round(moves.per_s), limit=round(need))
    judge = fail if moves.per_s < need else warn
    return judge(
        "link.bandwidth",
        text,
        subject=model,
        value=round(moves.per_s),
        limit=round(SPARE * need),
        trap="KV is made faster than it moves: handoffs are late (`store_late`) and decode computes prompts anew",
        cure=CURE,
    )


def _unmeasured(facts: Facts, model: str, per_token: int, makes: Rate | None) -> Finding:
    """No request has moved KV yet. What memory allows is an upper bound, where KV stays on this machine."""
    copied = facts.machine.copy_bytes_s
    local = any(cache.listens and not cache.error for cache in facts.caches)
    if makes is not None and local and copied and copied < SPARE * makes.per_s * per_token:
        return _judged(model, per_token, makes, Rate(copied, "a copy in this machine's memory, the upper bound"))
    bound = f"; memory here copies {_mb(copied)}, the upper bound" if local and copied else ""
    text = f"not measured yet: no live worker tells of KV that moved{bound}. {per_token:,} bytes per token"
    return ok("link.bandwidth", text, subject=model, limit=f"{per_token} bytes per token")


def _fastest_prefill(workers: Sequence[Worker]) -> Rate | None:
    prefills = (worker for worker in workers if worker.beat.stage == "prefill")
    rates = [Rate(worker.beat.costs.prompt_tokens_s, worker.name) for worker in prefills]
    return max((rate for rate in rates if rate.per_s), default=None)


def _slowest_way(workers: Sequence[Worker]) -> Rate | None:
    stores = [Rate(worker.beat.costs.store_bytes_s, f"stores of {worker.name}") for worker in workers]
    loads = [Rate(worker.beat.costs.load_bytes_s, f"loads of {worker.name}") for worker in workers]
    return min((rate for rate in [*stores, *loads] if rate.per_s), default=None)


def _mb(per_s: float) -> str:
    return f"{per_s / 1e6:,.1f} MB/s"
