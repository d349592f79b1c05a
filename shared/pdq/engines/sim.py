"""The `sim` engine: no weights, no GPU; its answers, its KV and its faults are real enough to test all else.

`sim_model` says which token comes next, `sim_steps` when; `sim_kv` keeps KV in a directory that prefill and
decode processes share; `sim_faults` breaks things on demand. Prefill reuses the chunks that the directory
holds and stores the others; decode loads, and stores only where it is to save its answers. Unlike a real
engine it has no prefix cache of its own (`local_tokens` is 0), no limit on KV memory, and moves KV in the time
that the disk takes, and a link of `PDQ_ENGINE_SIM_KV_US`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, nullcontext
from typing import Any

import msgspec

from pdq.bytes_tokenizer import BytesTokenizer
from pdq.engines import sim_timing
from pdq.engines.base import Done, EngineInfo, Phase, PrefillResult, Tokens, Work, continued, ended_before
from pdq.engines.sim_faults import Faults
from pdq.engines.sim_kv import KvDirectory, Loaded
from pdq.engines.sim_model import START, STATE_BYTES, Generation
from pdq.engines.sim_parser import SimReading
from pdq.engines.sim_saver import Saver
from pdq.engines.sim_script import Script, script_of
from pdq.engines.sim_steps import Running, StepLoop
from pdq.engines.sim_tasks import Tasks
from pdq.engines.sim_tier import Tier, ended
from pdq.errors import Misconfigured, Rejected, Unavailable
from pdq.messages import Sampling
from pdq.settings import EngineSettings, ModelSpec

NAME = "sim/1"
NOTHING = Sampling(max_tokens=1)
MOST_JOINED = 16
"""Tokens of steps that took no time which come in one `Tokens`."""
EXIT_STATUS = 70
"""Of a process that the `exit_after` fault ends."""
COUNTERS = (
    "prefills_started",
    "prefills_done",
    "decodes_started",
    "decodes_done",
    "tokens",
    "tokens_computed",
    "tokens_loaded",
    "prompts_staged",
    "tokens_staged",
)


class SimEngine:
    """One simulated engine. Raises Misconfigured for a profile, faults or vocabulary it cannot read."""

    def __init__(self, spec: ModelSpec, settings: EngineSettings, *, save_decode: bool = False) -> None:
        if settings.max_num_seqs < 1 or settings.max_num_batched_tokens < 1:
            raise Misconfigured("PDQ_ENGINE_MAX_NUM_SEQS and PDQ_ENGINE_MAX_NUM_BATCHED_TOKENS must be at least 1")
        self._spec = spec
        self._settings = settings
        self._tokenizer = BytesTokenizer(spec.vocab_size, spec.eos_token_ids)
        self._faults = Faults(settings.sim_faults)
        directory = KvDirectory(settings.sim_kv_dir, spec.chunk_tokens)
        self._tier = Tier(directory, spec.chunk_tokens, self._faults, settings.store_timeout_s, settings.sim_kv_us)
        self._save_decode = save_decode
        self._steps = StepLoop(sim_timing.parse(settings.sim_profile), settings.max_num_batched_tokens)
        self._stepping: asyncio.Task[None] | None = None
        self._tasks = Tasks(settings.max_num_seqs)
        self._tasks.down = "the engine is not started"
        self._counts: Counter[str] = Counter()
        # Made once: it is looked at several times for each request.
        self._info = EngineInfo(
            name=NAME,
            model=spec.slug,
            max_model_len=spec.max_model_len,
            vocab_size=spec.vocab_size,
            block_tokens=spec.block_tokens,
            chunk_tokens=spec.chunk_tokens,
            kv_bytes_per_token=STATE_BYTES,
            contract=contract(spec),
            slots=settings.max_num_seqs,
            contract_fields=contract_fields(spec),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def start(self) -> None:
        """Make one token; where the KV directory exists, store and load one chunk. Raises Unavailable."""
        self._stepping = asyncio.create_task(self._steps.run(), name="sim steps")
        self._stepping.add_done_callback(self._stepping_ended)
        self._tasks.down = ""
        probe = Work(request="start", prompt=(0,), sampling=NOTHING, salt="")
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._steps.complete(Running(probe.prompt, 0, START, self._generation(probe)))
                await self._tier.prove()
        except OSError as exc:
            await self.close()
            raise Unavailable(f"the sim engine did not start: {exc or 'timed out'}") from exc

    async def prefill(self, work: Work) -> PrefillResult:
        """See the contract. `cause`: `short_prompt`, `store_failed` or `store_late`. Aborted: Interrupted."""
        check(work, self._spec)

        async def body(put: Callable[[PrefillResult], None]) -> None:
            put(await self._prefill(work))

        async with aclosing(self._tasks.serve(work.request, body)) as results:
            return (await anext(results))[0]

    async def held(self, work: Work) -> int:
        return await self._tier.held(work)

    async def stage(self, prompt: Sequence[int], salt: str) -> int:
        """The directory is as near as KV gets here: this counts what a real engine would load."""
        held = await self._tier.held(Work(request="stage", prompt=tuple(prompt), sampling=NOTHING, salt=salt))
        self._counts["prompts_staged"] += 1
        self._counts["tokens_staged"] += held
        return held

    async def decode(self, work: Work) -> AsyncGenerator[Tokens | Done, None]:
        """See the contract; the tokens of steps that took no time come together. Aborted: Interrupted."""
        check(work, self._spec)
        reading = SimReading(work) if work.sampling.parsed else None
        if reading is not None:
            reading.resume(self._tokenizer.decode(work.shown))
        if (reason := ended_before(work, self._tokenizer.eos_token_ids)) is not None:
            yield Done(finish_reason=reading.reason(reason) if reading else reason, loaded_tokens=0)
            return
        script = self._script(work)
        work = continued(work)

        async def body(put: Callable[[Tokens | Done], None]) -> None:
            put(await self._decode(work, put, script, reading))

        async with aclosing(self._tasks.serve(work.request, body)) as batches:
            async for items in batches:
                for item in items if reading is not None else _joined(items):
                    yield item

    async def abort(self, request: str) -> None:
        self._tasks.abort(request)

    async def check(self) -> None:
        self._tasks.check()

    async def stats(self) -> dict[str, Any]:
        """`running` and `waiting` requests and `kv_tokens` of now; all else counts since the start.

        `prefills_started` and `decodes_started` are executions: work that got a slot.
        """
        now = {"running": self._tasks.running, "waiting": self._tasks.waiting, "kv_tokens": self._steps.kv_tokens}
        return now | {name: self._counts[name] for name in COUNTERS}

    async def close(self) -> None:
        await self._tasks.close()
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.wait({self._stepping})

    async def _prefill(self, work: Work) -> PrefillResult:
        self._counts["prefills_started"] += 1
        await self._faults.before("prefill")
        result = PrefillResult(stored_tokens=0, stored_bytes=0, cause="short_prompt")
        if len(work.prompt) >= self._spec.chunk_tokens:
            result = await self._compute_and_store(work)
        self._counts["prefills_done"] += 1
        return result

    async def _compute_and_store(self, work: Work) -> PrefillResult:
        loaded, phases = await self._load(work)
        start = time.time_ns()
        running = Running(work.prompt, loaded.tokens, loaded.state)
        await self._steps.complete(running)
        engine = ended("engine.prefill", start, {"pdq.tokens": len(work.prompt)})
        stored = await self._tier.store(work, loaded, bytes(running.states))
        return PrefillResult(
            stored_tokens=stored.tokens,
            stored_bytes=stored.tokens * STATE_BYTES,
            cause=stored.cause,
            phases=(*phases, engine, *stored.phases),
        )

    async def _decode(
        self, work: Work, put: Callable[[Tokens | Done], None], script: Script, reading: SimReading | None
    ) -> Done:
        self._counts["decodes_started"] += 1
        await self._faults.before("decode")
        loaded, phases = await self._load(work)
        start = time.time_ns()
        times: list[int] = []
        generation = self._generation(work, script)

        saver = Saver(self._tier, work, loaded, self._spec.chunk_tokens) if self._save_decode else None

        def emit(running: Running, tokens: Tokens) -> None:
            times.append(time.time_ns())
            if reading is not None:
                delta = reading.take(tokens.text, final=generation.finish is not None)
                tokens = msgspec.structs.replace(tokens, delta=delta)
            put(tokens)
            if saver is not None:
                saver.made(tokens.ids[0], running.states)
            self._counts["tokens"] += 1
            if self._faults.after_tokens:
                self._after_token(running, len(times))

        async with saver or nullcontext():
            await self._steps.complete(Running(work.prompt, loaded.tokens, loaded.state, generation, emit))
        engine = ended("engine.decode", start, {"pdq.tokens": len(times)}, _events(times))
        self._counts["decodes_done"] += 1
        reason = generation.finish or "length"
        if reading is not None:
            reason = reading.reason(reason)
        return Done(finish_reason=reason, loaded_tokens=loaded.tokens, phases=(*phases, engine))

    def _generation(self, work: Work, script: Script | None = None) -> Generation:
        room = self._spec.max_model_len - len(work.prompt)
        return Generation(self._tokenizer, work.prompt, work.sampling, room, script)

    def _script(self, work: Work) -> Script:
        """What is left of its script after the tokens shown."""
        # Only what calls functions reads the prompt.
        prompt = self._tokenizer.decode(work.prompt) if work.sampling.tools is not None else ""
        script = script_of(work.sampling, prompt, reasons=bool(self._spec.reasoning_parser))
        return script._replace(text=script.text[len(work.shown) :])

    async def _load(self, work: Work) -> tuple[Loaded, tuple[Phase, ...]]:
        loaded, phases = await self._tier.load(work)
        self._counts["tokens_loaded"] += loaded.tokens
        self._counts["tokens_computed"] += len(work.prompt) - loaded.tokens
        return loaded, phases

    def _after_token(self, running: Running, own: int) -> None:
        match self._faults.after_token(own, self._counts["tokens"]):
            case "exit":
                os._exit(EXIT_STATUS)
            case "crash":
                self._fail("fault: decode.crash_after")
            case "fail":
                running.finish(Unavailable("fault: decode.fail_after"))
            case "hang":
                self._steps.drop(running)

    def _fail(self, why: str) -> None:
        self._tasks.fail(why)
        self._steps.clear()

    def _stepping_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._tasks.fail(f"the step loop failed: {task.exception()!r}")


def contract_fields(spec: ModelSpec) -> dict[str, str]:
    """All that must be equal for the sim's KV to be reusable."""
    return {
        "engine": NAME,
        "model": spec.id,
        "vocab_size": str(spec.vocab_size),
        "block_tokens": str(spec.block_tokens),
        "chunk_tokens": str(spec.chunk_tokens),
        "layout": f"{STATE_BYTES} bytes per token",
    }


def contract(spec: ModelSpec) -> str:
    """Hex SHA-256 over its fields."""
    return hashlib.sha256(msgspec.json.encode(contract_fields(spec), order="deterministic")).hexdigest()


def check(work: Work, spec: ModelSpec) -> None:
    """Raise Rejected for work that can never run: an empty or too long prompt, ids outside the vocabulary."""
    size = len(work.prompt)
    if not work.prompt:
        raise Rejected("the prompt is empty")
    if size >= spec.max_model_len:
        message = f"the prompt has {size} tokens; with one to generate, the context of {spec.max_model_len} holds "
        raise Rejected(f"{message}{spec.max_model_len - 1}", code="context_length_exceeded")
    if not 0 <= min(work.prompt) <= max(work.prompt) < spec.vocab_size:
        raise Rejected(f"the prompt has token ids outside 0..{spec.vocab_size - 1}")
    if work.sampling.max_tokens < 1:
        raise Rejected(f"max_tokens must be at least 1, not {work.sampling.max_tokens}", param="max_tokens")
    if not re.fullmatch(r"[0-9a-f]{0,128}", work.salt):
        raise Rejected("a salt must be at most 128 hex digits")


def _joined(items: list[Tokens | Done]) -> Iterator[Tokens | Done]:
    """The same with up to `MOST_JOINED` tokens in one; they have no deltas."""
    tokens = [item for item in items if isinstance(item, Tokens)]
    for start in range(0, len(tokens), MOST_JOINED):
        some = tokens[start : start + MOST_JOINED]
        logprobs = [logprob for each in some for logprob in each.logprobs or ()]
        yield Tokens(
            ids=tuple([id for each in some for id in each.ids]),
            text="".join([each.text for each in some]),
            logprobs=tuple(logprobs) or None,
            held=some[-1].held,
        )
    yield from items[len(tokens) :]


def _events(times: list[int]) -> tuple[tuple[str, int], ...]:
    named = list(zip(("first_token", "second_token"), times, strict=False))
    return (*named, ("last_token", times[-1])) if times else ()
