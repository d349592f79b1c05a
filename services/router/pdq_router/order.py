"""Which way a request takes: one pure function of what is known when it is routed.

The first rule that holds decides; its name is the reason. Both go into the request log with the inputs.

| reason              | order         | rule                                                                       |
|---------------------|---------------|----------------------------------------------------------------------------|
| `requested`         | as asked      | the request asks for an order                                              |
| `no_prefill_worker` | decode-only   | no prefill worker is alive, and none is to come in time                    |
| `short_prompt`      | decode-only   | the prompt has no whole chunk, so no KV can move; or (auto) costs are not  |
|                     |               | known and it lacks less than `short_prompt_tokens` of KV                   |
| `default`           | the setting   | the router's setting is an order (decode-only comes before the two above)  |
| `cached`            | decode-only   | less than a chunk of the prompt is likely to be missing                    |
| `decode_sooner`     | decode-only   | decode-only is estimated to take no longer than the best order with prefill|
| `partly_cached`     | decode-first  | prefill pays, decode likely holds half, and a slot of it is to spare       |
| `long_prompt`       | prefill-first | costs are not known, and it lacks `short_prompt_tokens` or more            |
| `prefill_sooner`    | prefill-first | prefill-first is estimated to be the soonest                               |

`partly_cached`: what decode holds, only decode knows for sure. Where half is likely there, it had better look before
anything is delegated: perhaps nothing is missing, and if the rest comes late it computes just that. Its price is a hop,
and a decode slot that is held idle while prefill works. So it is chosen only where nothing waits for prefill, and where
decode has more free slots than prefills are under way: then the idle slot is taken from nobody, as each handoff that
is coming finds one. In all other cases prefill-first takes one hop less, and holds no slot.

A worker is to come where prefill scales from zero (`prefill_start_s`): what waits for prefill is what wakes it, so if
nothing were given to prefill while no worker is alive, none would ever be. It is to come in time until the oldest job
has waited for as long as a start may take. That bounds what is lost where none can come: from then on decode computes
all prompts. A delegated prefill would hold a decode slot all that time, so decode-first wakes nobody.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
from pdq.messages import AskedOrder, Order, OrderReason

LEAST_WAIT_S = 2.0
WAIT_FACTOR = 5.0
"""A delegated prefill may take so many times what it is estimated to take, before decode computes the prompt."""
STALL_WEIGHT = 0.25
"""Of a second that a running answer stands still, against a second that a request waits for its first token."""
FULL = 0.9
"""A decode worker whose KV memory is in use to this share has no slot to spare."""


class StageInputs(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one model as it is now."""

    workers: int = 0
    """Alive."""
    free_slots: int = 0
    waiting: int = 0
    """Jobs that wait for a worker."""
    running: int = 0
    """Jobs claimed and not settled."""
    lag_s: float = 0.0
    """How long the oldest waiting job has waited."""
    prompt_tokens_s: float = 0.0
    """Prompt tokens that one worker computes in a second; 0: not measured."""
    kv_usage: float = 0.0
    """Share of KV memory in use, of the worker that has most room."""


class OrderInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What an order is decided from. Rates and sizes that are 0 are not known."""

    requested: AskedOrder | None = None
    """The request's own wish (`Pdq-Order`)."""
    default: AskedOrder = "auto"
    prompt_tokens: int
    cached_tokens: int = 0
    """Tokens from the prompt's start whose KV decode can likely load or has."""
    chunk_tokens: int
    """KV moves in whole chunks of so many tokens."""
    prefill: StageInputs = StageInputs()
    decode: StageInputs = StageInputs()
    kv_bytes_per_token: int = 0
    store_bytes_s: float = 0.0
    load_bytes_s: float = 0.0
    handoff_s: float = 0.0
    short_prompt_tokens: int = 0
    prefill_wait_s: float = 30.0
    """The longest that decode may wait for a delegated prefill."""
    prefill_start_s: float = 0.0
    """Prefill scales from zero, and its first worker may take so long to come; 0: none comes by itself."""

    @property
    def missing_tokens(self) -> int:
        return max(0, self.prompt_tokens - self.cached_tokens)

    @property
    def prefill_is_to_come(self) -> bool:
        """No prefill worker is alive, but one is to come in time."""
        return not self.prefill.workers and self.prefill.lag_s < self.prefill_start_s


class Estimates(NamedTuple):
    """Seconds until the first token, by order; and until a prefill that is delegated now is done."""

    prefill_first_s: float
    decode_first_s: float
    decode_only_s: float
    prefilled_s: float


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    order: Order
    reason: OrderReason
    inputs: dict[str, float]
    """The numbers that it was decided from, and the estimates where there are any: for the request log."""
    prefill_wait_s: float
    """How long decode is to wait for a prefill that it delegates."""


def decide(inputs: OrderInputs) -> Decision:
    """The order of a request. Equal inputs give equal decisions."""
    estimates = estimate(_with_coming_worker(inputs) if inputs.prefill_is_to_come else inputs)
    order, reason = _first_rule(inputs, estimates)
    wait_s = _wait_s(inputs, estimates)
    numbers = _numbers(inputs, estimates) | {"prefill_wait_s": wait_s}
    return Decision(order=order, reason=reason, inputs=numbers, prefill_wait_s=wait_s)


def _first_rule(inputs: OrderInputs, estimates: Estimates | None) -> tuple[Order, OrderReason]:
    asked = inputs.requested or inputs.default
    if inputs.requested is not None and asked != "auto":
        return asked, "requested"
    if asked == "decode-only":
        return asked, "default"
    if not inputs.prefill.workers and (asked == "decode-first" or not inputs.prefill_is_to_come):
        return "decode-only", "no_prefill_worker"
    if inputs.prompt_tokens < inputs.chunk_tokens:
        return "decode-only", "short_prompt"
    return _auto(inputs, estimates) if asked == "auto" else (asked, "default")


def _auto(inputs: OrderInputs, estimates: Estimates | None) -> tuple[Order, OrderReason]:
    if inputs.missing_tokens < inputs.chunk_tokens:
        return "decode-only", "cached"
    if estimates is None and inputs.missing_tokens < inputs.short_prompt_tokens:
        return "decode-only", "short_prompt"
    if estimates is not None and estimates.decode_only_s <= estimates.prefill_first_s:
        # Of two that are even, the one that moves nothing.
        return "decode-only", "decode_sooner"
    if _decode_may_look_first(inputs):
        return "decode-first", "partly_cached"
    return "prefill-first", "long_prompt" if estimates is None else "prefill_sooner"


def _decode_may_look_first(inputs: OrderInputs) -> bool:
    prefill, decode = inputs.prefill, inputs.decode
    likely = inputs.cached_tokens >= max(inputs.chunk_tokens, inputs.missing_tokens)
    to_spare = decode.free_slots > prefill.running and decode.kv_usage < FULL
    return likely and to_spare and prefill.workers > 0 and not prefill.waiting and not decode.waiting


def _with_coming_worker(inputs: OrderInputs) -> OrderInputs:
    """As if the worker that is to come were there, with what is left of its start as its lag."""
    left_s = inputs.prefill_start_s - inputs.prefill.lag_s
    return msgspec.structs.replace(inputs, prefill=msgspec.structs.replace(inputs.prefill, lag_s=left_s))


def estimate(inputs: OrderInputs) -> Estimates | None:
    """What each order would take to the first token, seconds; None while no stage has measured its rate.

        prefilled     = prefill's lag + missing / prefill's rate + storing the missing chunks + handoff
        prefill-first = prefilled + decode's lag + loading all chunks
        decode-first  = handoff + prefill-first
        decode-only   = decode's lag + loading what is cached + (1 + streams / 4) × missing / decode's rate

    `streams` is the number of answers that each decode worker is at: each of them stands still while a chunk of this
    prompt is computed. A second of theirs counts a quarter of one of this request: it is spread over a whole answer, of
    which something is there to read, while who waits for a first token has nothing.

    A stage that has not measured its rate is taken to have the other's, and KV whose moves were not measured to move in
    no time: so what was never tried looks no worse than it is, is tried once it may pay, and is measured.
    """
    prefill, decode, size = inputs.prefill, inputs.decode, inputs.kv_bytes_per_token
    prefill_rate = prefill.prompt_tokens_s or decode.prompt_tokens_s
    decode_rate = decode.prompt_tokens_s or prefill.prompt_tokens_s
    if not prefill_rate:
        return None
    store_rate, load_rate = inputs.store_bytes_s or math.inf, inputs.load_bytes_s or math.inf
    chunks = inputs.prompt_tokens // inputs.chunk_tokens * inputs.chunk_tokens
    cached = min(inputs.cached_tokens, chunks)
    missing = inputs.missing_tokens
    store_s = (chunks - cached) * size / store_rate
    prefilled_s = prefill.lag_s + missing / prefill_rate + store_s + inputs.handoff_s
    first_s = prefilled_s + decode.lag_s + chunks * size / load_rate
    streams = decode.running / max(1, decode.workers)
    compute_s = missing / decode_rate
    return Estimates(
        prefill_first_s=first_s,
        decode_first_s=inputs.handoff_s + first_s,
        decode_only_s=decode.lag_s + cached * size / load_rate + (1 + STALL_WEIGHT * streams) * compute_s,
        prefilled_s=prefilled_s,
    )


def _wait_s(inputs: OrderInputs, estimates: Estimates | None) -> float:
    if estimates is None:
        return inputs.prefill_wait_s
    return min(inputs.prefill_wait_s, max(LEAST_WAIT_S, WAIT_FACTOR * estimates.prefilled_s))


def _numbers(inputs: OrderInputs, estimates: Estimates | None) -> dict[str, float]:
    """Flat: `prefill_workers`, `decode_lag_s`, `estimate_decode_only_s`, ... What is not known is left out."""
    found: dict[str, float] = {}
    for name, value in msgspec.structs.asdict(inputs).items():
        if isinstance(value, StageInputs):
            found |= {f"{name}_{part}": number for part, number in msgspec.structs.asdict(value).items()}
        elif isinstance(value, int | float):
            found[name] = value
    if estimates is not None:
        found |= {f"estimate_{name}": number for name, number in estimates._asdict().items()}
    unknown = ("_tokens_s", "_bytes_s", "kv_bytes_per_token", "prefill_start_s")
    return {name: round(value, 6) for name, value in found.items() if value or not name.endswith(unknown)}
