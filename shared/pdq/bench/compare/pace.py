"""How fast an engine on one half of the machine is, and how dense the loads are that the half can bear.

Rates that suit one machine drown another and leave a third idle, and who wins depends on how busy each half is. So
where no rates are given, an engine on one half is asked what the loads are made of, before the first round.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdq.bench import metrics, over_http
from pdq.bench.compare import loads, setups, topologies
from pdq.bench.compare.loads import CHAT_INPUT, CHAT_OUTPUT, LONG_INPUT, SHORT_INPUT, SHORT_OUTPUT
from pdq.bench.compare.shown import Shown
from pdq.bench.compare.topologies import Common
from pdq.bench.drive import Drive, Options
from pdq.bench.over_http import OverHttp
from pdq.bench.prompts import Prompts
from pdq.bench.records import Record
from pdq.bench.target import Target
from pdq.bench.workload import Load, TimedRequest
from pdq.errors import PdqError
from pdq.up.layout import Layout

LIVE_CHATS = 3.5
"""On average, on a half that decodes all of them. A Poisson process then hardly ever has more than the eight that a
worker takes."""
FEW, MANY = 4, 8
PREFILL_BUSY = 0.6
"""Of the time of a half that prefills chats and long prompts, by the whole steps of a plain engine. What is left goes
to smaller steps, to KV, and to all that runs beside the engine."""
PASSES, ANSWER = 5, 60
"""A machine's memory may be half as fast for some seconds: all is asked several times, in turns."""
LABEL = "pace of one half"
HEADERS = {"Content-Type": "application/json"}


class NotMeasured(PdqError):
    """The engine on one half does not answer."""

    code = "not_measured"


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What a plain engine on one half takes, medians in seconds."""

    long_s: float
    """To the first token of a long prompt of mean length, asked alone."""
    chat_s: float
    """To the first token of a chat, asked alone."""
    few_s: float
    """Between two tokens, where `FEW` chats run at one time."""
    many_s: float
    """Between two tokens, where `MANY` chats run at one time."""

    def __str__(self) -> str:
        return (
            f"a long prompt {self.long_s:.2f} s, a chat {self.chat_s:.2f} s, a token {1000 * self.few_s:.1f} ms beside "
            f"{FEW - 1} others, {1000 * self.many_s:.1f} ms beside {MANY - 1}"
        )


class Rates(NamedTuple):
    """As of `loads.Sizes`."""

    chat_rate: float
    long_every_s: float
    short_rate: float


def rates(pace: Pace, chat_rate: float | None) -> Rates:
    """What one half can bear, to three digits. `chat_rate`: where it is given.

    By Little's law as many chats run at one time as come while one is answered. The third load is what one half can
    just decode with `MANY` at one time.
    """
    chat_rate = chat_rate or _rounded(LIVE_CHATS / (CHAT_OUTPUT * pace.few_s))
    # Chats that are given may leave prefill no time: long prompts get a tenth of it.
    free = max(PREFILL_BUSY - chat_rate * pace.chat_s, 0.1)
    return Rates(chat_rate, _rounded(pace.long_s / free), _rounded(MANY / (SHORT_OUTPUT * pace.many_s)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _alike(number: int, tokens: tuple[int, int], answer: int) -> Load:
    """So many at once, of mean length."""
    one = TimedRequest(at_s=0.0, input_tokens=sum(tokens) // 2, output_tokens=answer)
    return [one] * number


STEPS: tuple[tuple[str, Load], ...] = PASSES * (
    ("a long prompt", _alike(1, LONG_INPUT, 1)),
    ("a chat", _alike(1, CHAT_INPUT, 1)),
    ("a few chats", _alike(FEW, CHAT_INPUT, ANSWER)),
    ("many chats", _alike(MANY, SHORT_INPUT, ANSWER)),
)
NUM_REQUESTS = sum(len(load) for _, load in STEPS)


async def measure(common: Common, directory: Path, timeout_s: float, shown: Shown) -> Pace:
    """Start a plain vLLM on the second half, ask it, and end it. `timeout_s`: of a request.

    Raises NotMeasured, and what `topologies.running` raises.
    """
    began = time.monotonic()
    shown.doing(f"{LABEL}: starting")
    layout = Layout(directory / "pace")
    async with contextlib.AsyncExitStack() as stack:
        up = await stack.enter_async_context(topologies.running(setups.HALF, common, layout, lambda names: None))
        shown.say(f"{LABEL}: ready after {time.monotonic() - began:.0f} s")
        http = await stack.enter_async_context(over_http.session(HEADERS))
        return await ask(OverHttp(http, up.urls[0], common.model.id, "completions"), timeout_s, shown)


async def ask(target: Target, timeout_s: float, shown: Shown) -> Pace:
    """Ask an engine `STEPS`, after a warm-up. Raises NotMeasured."""
    shown.doing(f"{LABEL}: warming up")
    await _answers(target, loads.warm_up(), timeout_s)
    found: dict[str, list[Record]] = {}
    for name, load in STEPS:
        shown.doing(f"{LABEL}: {name}")
        records = await _answers(target, load, timeout_s)
        found.setdefault(name, []).extend(records)
        for record in records:
            shown.ended(record)
    return of(found)


def of(found: dict[str, list[Record]]) -> Pace:
    """By the answers to `STEPS`."""
    return Pace(
        long_s=_first_s(found["a long prompt"]),
        chat_s=_first_s(found["a chat"]),
        few_s=_between_s(found["a few chats"]),
        many_s=_between_s(found["many chats"]),
    )


async def _answers(target: Target, load: Load, timeout_s: float) -> list[Record]:
    records: list[Record] = []
    await Drive(
        target, Prompts(target.api, target.model, loads.FIELDS), Options(timeout_s, len(load)), records.append
    ).run(load)
    if failed := [record for record in records if not record.succeeded or not record.chunks]:
        raise NotMeasured(f"an engine on one half does not answer: {failed[0].message or 'no text came'}")
    return records


def _first_s(records: Sequence[Record]) -> float:
    return statistics.median(map(metrics.ttft_s, records))


def _between_s(records: Sequence[Record]) -> float:
    gaps = [gap for record in records for gap in metrics.gaps_s(record)]
    if not gaps:
        raise NotMeasured(
            f"an engine on one half answers {ANSWER} tokens in one piece: give --chat-rate and --short-rate"
        )
    return statistics.median(gaps)
