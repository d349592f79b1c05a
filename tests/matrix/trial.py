"""One fault in one mode: the answer, how long it kept whom waiting, what counted it, and that KV flows again."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec
from pdq.client import new_request_id
from pdq.engines.plain import PlainAnswer
from pdq.verify.compare import Given, compare
from pdq.verify.prompts import Prompt

from tests.matrix.faults import HARMLESS, Fault
from tests.matrix.rig import NOT_LOADED, REFUSED, Rig, Timed, until

WAIT_S = 20.0
"""No request waits longer for its first token because of a fault, with what it takes to compute its prompt twice."""
GAP_S = 10.0
"""No other stream of decode's engine stands still for longer."""
AGAIN_S = 60.0
STAGED_S, LOOKUP_S, COUNT_S = 0.7, 20.0, 5.0
SHORT = Prompt(
    "again", "Name three rivers of Europe that flow into the Black Sea, and three that flow into the Baltic."
)
SHORT_TOKENS = 2


class Question(NamedTuple):
    prompt: Prompt
    expected: PlainAnswer


class Result(msgspec.Struct, kw_only=True):
    mode: str
    fault: str
    when: str
    equal: bool = False
    promised: int = 0
    loaded: int = 0
    cause: str = ""
    """Why prefill promised nothing."""
    wait_s: float = 0.0
    """To the first token: from the submit where the fault came before, else from when a slot was free."""
    gap_s: float = 0.0
    """The longest that a stream beside it stood still."""
    again_s: float = 0.0
    """From the fault's end until KV flows as promised."""
    counted: dict[str, float] = {}
    """Counters that grew."""
    wrong: list[str] = []


async def attempt(rig: Rig, fault: Fault, question: Question) -> Result:
    """Never raises for what the product does: that is in `wrong`."""
    result = Result(mode=rig.mode, fault=fault.name, when=fault.when)
    before = rig.counters()
    try:
        answered = await _under(rig, fault, question, result)
        _judge(rig, question, answered, result)
    except (TimeoutError, AssertionError, OSError) as exc:
        result.wrong.append(f"{type(exc).__name__}: {exc}"[:300])
    await _account(rig, before, result)
    await _flows_again(rig, result)
    return result


async def _under(rig: Rig, fault: Fault, question: Question, result: Result) -> Given:
    answer, begun = Timed(new_request_id()), Begun()

    async def ask() -> Given:
        return await rig.ask(question.prompt, _tenant(), "prefill-first", len(question.expected.ids), answer)

    async with rig.streaming(_tenant()) as beside:
        given = await _WHEN[fault.when](rig, fault, ask, answer, begun)
        result.gap_s = beside.gap_s(begun.at)
        result.wait_s = (answer.arrivals[0] if answer.arrivals else time.monotonic()) - begun.at
    result.cause = answer.state.promise.cause if answer.state.promise else ""
    return given


class Begun:
    """When the request could go on."""

    at = 0.0

    def now(self) -> None:
        self.at = time.monotonic()


Ask = Callable[[], Awaitable[Given]]


async def _before(rig: Rig, fault: Fault, ask: Ask, answer: Timed, begun: Begun) -> Given:
    async with fault.make(rig, []):
        begun.now()
        return await ask()


async def _waiting(rig: Rig, fault: Fault, ask: Ask, answer: Timed, begun: Begun) -> Given:
    async with _handed(rig, ask, answer) as handed, fault.make(rig, handed.chunks):
        begun.now()
        await handed.let_go()
        return await handed.task


async def _loading(rig: Rig, fault: Fault, ask: Ask, answer: Timed, begun: Begun) -> Given:
    async with _handed(rig, ask, answer) as handed:
        before = await asyncio.to_thread(rig.looked_up, rig.decode_server)
        begun.now()
        await handed.let_go()
        async with asyncio.timeout(LOOKUP_S):
            while await asyncio.to_thread(rig.looked_up, rig.decode_server) == before:
                pass
        async with fault.make(rig, handed.chunks):
            return await handed.task


_WHEN = {"before": _before, "waiting": _waiting, "loading": _loading}


class Handed(NamedTuple):
    """A request whose handoff waits until `let_go`."""

    task: asyncio.Task[Given]
    chunks: list[str]
    """In the store."""
    let_go: Callable[[], Awaitable[None]]


@contextlib.asynccontextmanager
async def _handed(rig: Rig, ask: Ask, answer: Timed) -> AsyncIterator[Handed]:
    """A second stream takes decode's other slot."""
    before = await _names(rig)
    async with contextlib.AsyncExitStack() as held:
        await held.enter_async_context(rig.streaming(_tenant()))
        task = asyncio.ensure_future(ask())
        await until(lambda: "prefilled" in answer.story or task.done())
        if rig.mode != "host":
            # What waits is staged: the fault is for what comes from afar.
            await asyncio.sleep(STAGED_S)
            await asyncio.to_thread(rig.clear_memory, rig.decode_server)
        yield Handed(task, sorted(await _names(rig) - before), held.aclose)


async def _names(rig: Rig) -> set[str]:
    return await asyncio.to_thread(rig.chunks.names) if rig.chunks else set()


def _judge(rig: Rig, question: Question, given: Given, result: Result) -> None:
    verdict = compare(given, question.expected, rig.spec.chunk_tokens, allow_recompute=True)
    result.equal, result.promised, result.loaded = verdict.ok, given.promised_tokens, given.loaded_tokens
    if not verdict.ok:
        result.wrong.append(f"{given.request}: {verdict.outcome}: {verdict.cause}")
    if rig.mode in HARMLESS.get((result.fault, result.when), ()) and not result.loaded == result.promised > 0:
        result.wrong.append(f"{given.request}: {result.loaded} of {result.promised} tokens loaded")
    for name, value, bound in (("waited", result.wait_s, WAIT_S), ("stood still", result.gap_s, GAP_S)):
        if value > bound:
            result.wrong.append(f"{given.request}: {name} {value:.1f} s")


async def _flows_again(rig: Rig, result: Result) -> None:
    began = time.monotonic()
    try:
        async with asyncio.timeout(AGAIN_S):
            while True:
                given = await rig.ask(SHORT, _tenant(), "prefill-first", SHORT_TOKENS, Timed(new_request_id()))
                if given.loaded_tokens == given.promised_tokens > 0:
                    break
        result.again_s = time.monotonic() - began
    except TimeoutError:
        result.wrong.append(f"no KV flows {AGAIN_S:g} s later")


async def _account(rig: Rig, before: dict[str, float], result: Result) -> None:
    """Every token that was not loaded is counted, and no other."""
    expected = {f"handoffs {result.cause}": 1.0} if result.cause else {}
    if lost := result.promised - result.loaded:
        expected[NOT_LOADED] = lost
    try:
        async with asyncio.timeout(COUNT_S):
            while True:
                result.counted = _grown(before, await asyncio.to_thread(rig.counters))
                if {name: by for name, by in result.counted.items() if name != REFUSED} == expected:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        result.wrong.append(f"counted {result.counted}, expected {expected}")


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What a server that was restarted counts begins at 0 again."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: after[name] if by < 0 else by for name, by in grown.items() if by}


def _tenant() -> str:
    return f"t{secrets.token_hex(4)}"
