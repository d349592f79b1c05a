"""The real engine: vLLM's AsyncLLM, its KV through LMCache by pdq's connector.

vLLM is imported when the engine starts, not before: it reads its environment then, and takes seconds.
The engine's core, with model and scheduler, is a process of its own (one more per GPU beyond the first).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, nullcontext
from itertools import count
from typing import Any, TypeVar

import msgspec

from pdq.engines import early
from pdq.engines.base import Done, EngineInfo, Phase, PrefillResult, Tokens, Work, continued, ended_before
from pdq.engines.parsing import Parsers, Reading
from pdq.engines.reports import Inbox, Report
from pdq.engines.runs import Run
from pdq.engines.selftest import prove
from pdq.engines.stats import LatestStats
from pdq.engines.vllm_config import (
    HASH_ALGORITHM,
    HASH_SEED,
    Role,
    contract,
    engine_args,
    environment,
    is_cpu_build,
    kv_bytes_per_token,
    parse_cpus,
)
from pdq.engines.vllm_text import decode_options, decode_params, guided_by, prefill_params, tokens_of
from pdq.errors import Interrupted, Misconfigured, Rejected, Unavailable
from pdq.kv.tier import Tier
from pdq.kv.where import Served
from pdq.messages import FinishReason
from pdq.settings import EngineSettings, KvSettings, ModelSpec

T = TypeVar("T")

SHUTDOWN_S = 10.0
HELD_S = 2.0
"""How long the tiers may take to say what they hold before it counts as nothing."""
CONFIRM_S = 2.0
"""How long chunks may take to become readable in the server's memory after their store has ended: milliseconds, or
there was no room. On to a pool they may take as long as the store itself."""


class VllmEngine:
    """See pdq.engines.base.Engine. `role` tells vLLM which way KV moves: `prefill` is its producer, the others both."""

    def __init__(
        self,
        spec: ModelSpec,
        role: Role,
        settings: EngineSettings,
        kv: KvSettings,
        core: early.EarlyProcess | None = None,
    ) -> None:
        """`core`: the process for the engine's core, where it exists already."""
        self._core = core
        self._spec = spec
        self._role = role
        self._settings = settings
        self._kv = kv
        self._inbox = Inbox(self._hear)
        self._tier = Tier(kv, spec.id)
        self._stats = LatestStats()
        self._runs: dict[str, Run] = {}
        self._numbers = count()
        self._llm: Any = None
        self._parsers: Parsers | None = None
        self._info: EngineInfo | None = None

    async def start(self) -> None:
        cpus = parse_cpus(self._settings.cpus)
        os.environ.update(environment(self._settings))
        reports, doing = self._inbox.open(), ""
        clock = _Clock()
        # Only vLLM's CPU build spawns its core; the others fork it, with all that is imported.
        core = self._core or (await asyncio.wrap_future(_bound(early.EarlyProcess, cpus)) if is_cpu_build() else None)
        # In a thread by itself: vLLM keeps exceptions of its imports, and with them the frames that they passed.
        importing = asyncio.create_task(asyncio.to_thread(early.load, [early.FRONT]))
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                doing = f"waiting for the LMCache server at {self._kv.host}:{self._kv.http_port}"
                await self._tier.wait_up()
                version = importlib.metadata.version("lmcache")
                await self._tier.check_fits(self._spec.chunk_tokens, HASH_ALGORITHM, version)
                clock.done("kv_tier")
                doing = "loading the model"
                await importing
                clock.done("engine_import")
                self._llm = await _built(lambda: self._build(reports, core), cpus)
                clock.done("engine_core")
                self._info = self._describe()
                clock.done("contract")
                if self._role != "prefill":
                    doing = "loading the parsers"
                    config = self._llm.vllm_config.model_config
                    self._parsers = await asyncio.to_thread(Parsers, self._spec, self._llm.get_tokenizer(), config)
                clock.done("parsers")
                doing = "proving the path of the KV"
                await prove(self, self._llm.reset_prefix_cache)
                clock.done("self_test")
                self._info = msgspec.structs.replace(self._info, start_s=clock.parts_s)
        except TimeoutError as exc:
            await self.close()
            raise Unavailable(f"the engine was not ready within {self._settings.start_timeout_s:g} s: {doing}") from exc
        except BaseException:
            await self.close()
            raise
        finally:
            importing.cancel()
            if core is not None:
                core.close()

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Misconfigured("the engine has not been started")
        return self._info

    async def prefill(self, work: Work) -> PrefillResult:
        whole = len(work.prompt) // self._spec.chunk_tokens * self._spec.chunk_tokens
        if not whole:
            return PrefillResult(stored_tokens=0, stored_bytes=0, cause="short_prompt")
        with self._running(work) as run:
            start_ns = time.time_ns()
            async for _ in self._outputs(run, prefill_params):
                pass
            computed_ns = time.time_ns()
            cause, served = await asyncio.gather(self._wait_readable(run, whole), self._served(run))
            stored = 0 if cause else whole
            phases = run.kv_phases(self.info.kv_bytes_per_token, served)
            phases.append(_compute("engine.prefill", start_ns, computed_ns, run, {"pdq.tokens": len(work.prompt)}))
            store = run.store_phase(time.time_ns(), stored, self.info.kv_bytes_per_token, self._tier.read, cause)
            if store:
                phases.append(store)
            return PrefillResult(
                stored_tokens=stored,
                stored_bytes=stored * self.info.kv_bytes_per_token,
                cause=cause,
                phases=tuple(phases),
            )

    async def held(self, work: Work) -> int:
        return self._spec.chunk_tokens * await self._tier.held(work.prompt, work.salt, HELD_S)

    async def stage(self, prompt: Sequence[int], salt: str) -> int:
        return self._spec.chunk_tokens * await self._tier.stage(prompt, salt, self._kv.lookup_timeout_s)

    async def decode(self, work: Work) -> AsyncGenerator[Tokens | Done]:
        reading = self._reading(work)
        ended = ended_before(work, self._spec.eos_token_ids)
        if reading is not None and work.shown:
            await asyncio.to_thread(reading.resume, ended)
        if ended is not None:
            yield Done(finish_reason=reading.reason(ended) if reading else ended, loaded_tokens=0)
            return
        work = continued(work)
        tokenizer = self._alive().get_tokenizer()
        with self._running(work) as run:
            start_ns, times, reason = time.time_ns(), _TokenTimes(), ""
            guide = guided_by(work.sampling)
            outputs = self._outputs(
                run, lambda: decode_params(work.sampling, reading), guide, **decode_options(reading)
            )
            async with aclosing(outputs):
                async for output in outputs:
                    completion = output.outputs[0]
                    reason = completion.finish_reason or ""
                    tokens = tokens_of(completion, work.sampling, tokenizer)
                    if tokens is not None:
                        if reading is not None:
                            tokens = msgspec.structs.replace(tokens, delta=reading.take(completion))
                        times.saw(len(tokens.ids))
                        yield tokens
            self._inbox.drain()
            end_ns, served = time.time_ns(), await self._served(run)
            phases = run.kv_phases(self.info.kv_bytes_per_token, served)
            phases.append(_compute("engine.decode", start_ns, end_ns, run, {"pdq.tokens": times.num}, times.events()))
            finish: FinishReason = "stop" if reason == "stop" else "length"
            yield Done(
                finish_reason=reading.reason(finish) if reading else finish,
                loaded_tokens=run.loaded_tokens,
                local_tokens=run.local_tokens,
                phases=tuple(phases),
            )

    async def abort(self, request: str) -> None:
        for run in list(self._runs.values()):
            if run.work.request == request and self._llm is not None:
                run.aborted = True
                await self._llm.abort(run.id)

    async def check(self) -> None:
        if self._llm is None or self._llm.errored:
            raise Unavailable("the engine's core is not running")

    async def stats(self) -> dict[str, Any]:
        return self._stats.numbers()

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:  # else it takes the end of the core for a failure
                llm.output_handler.cancel()
            await asyncio.to_thread(llm.shutdown, SHUTDOWN_S)
        await self._tier.close()
        self._inbox.close()

    def _reading(self, work: Work) -> Reading | None:
        if not work.sampling.parsed:
            return None
        if self._parsers is None:
            raise Misconfigured("an engine for prefill does not answer")
        return self._parsers.reading(work)

    def _alive(self) -> Any:
        if self._llm is None:
            raise Unavailable("the engine is not running")
        return self._llm

    def _build(self, reports: str, core: early.EarlyProcess | None) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        args = engine_args(self._spec, self._role, self._settings, self._kv, reports)
        try:
            with early.spawning(core) if core is not None else nullcontext():
                return AsyncLLM.from_engine_args(args, stat_loggers=[self._stats.factory])
        except ValueError as exc:
            raise Misconfigured(f"vLLM refuses this configuration: {exc}") from exc
        except RuntimeError as exc:
            raise Unavailable(f"the engine's core did not start, its log says why: {exc}") from exc

    def _describe(self) -> EngineInfo:
        config = self._llm.vllm_config
        kv_contract = contract(self._spec, self._kv, config)
        return EngineInfo(
            name=kv_contract.engine,
            model=self._spec.slug,
            max_model_len=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            block_tokens=config.cache_config.block_size,
            chunk_tokens=self._spec.chunk_tokens,
            kv_bytes_per_token=kv_bytes_per_token(config),
            contract=kv_contract.fingerprint(),
            slots=self._settings.max_num_seqs,
            contract_fields={name: str(value) for name, value in msgspec.structs.asdict(kv_contract).items()}
            | {"hash_seed": HASH_SEED},
        )

    @contextmanager
    def _running(self, work: Work) -> Iterator[Run]:
        # A request may come again after a crash elsewhere: its runs must not share a name in the tier.
        run = Run(f"{work.request}.{next(self._numbers)}", work)
        self._runs[run.id] = run
        try:
            yield run
        finally:
            del self._runs[run.id]

    def _hear(self, report: Report) -> None:
        if run := self._runs.get(report.run):
            run.hear(report)

    async def _outputs(
        self, run: Run, params: Callable[[], Any], guide: str = "", **options: Any
    ) -> AsyncGenerator[Any]:
        """vLLM's outputs of a run. Raises Rejected, Unavailable, or Interrupted when it was aborted.

        guide: the field that holds the run to a grammar, which may be refused. options: of vLLM's `generate`.
        """
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(run.work.prompt), cache_salt=run.work.salt)
        with _translated(guide):
            outputs = self._alive().generate(prompt, params(), run.id, **options)
            async with aclosing(outputs):
                async for output in outputs:
                    reason = output.outputs[0].finish_reason
                    if run.aborted:
                        raise Interrupted("cancelled")
                    if reason == "error" and guide:  # a grammar that it could not make, or that left it no token
                        raise Rejected(f"{guide} cannot be enforced by this engine", param=guide)
                    if reason in ("abort", "error"):  # a core that is told to end aborts what it runs
                        raise Unavailable("the engine gave this request up")
                    yield output

    async def _wait_readable(self, run: Run, tokens: int) -> str:
        """Wait until decode can read `tokens` of the prompt. Returns the cause when it cannot."""
        cause = await run.wait_stored(tokens, self._settings.store_timeout_s)
        if cause:
            return cause
        # What a pool has lost is not stored again as long as the server's memory holds it; and a pool that was too slow
        # for the lookup is not waited for a second time.
        in_time = run.lookup_s < self._kv.lookup_timeout_s
        on_its_way = self._tier.read == "l2" and run.stores and in_time
        bound_s = self._settings.store_timeout_s if on_its_way else CONFIRM_S
        return await self._tier.lacks(run.work.prompt[:tokens], run.work.salt, bound_s)

    async def _served(self, run: Run) -> Served | None:
        """Which tier the run's load came from, where there was one."""
        return await self._tier.served(run.looked.request) if run.looked and run.loaded_tokens else None


class _Clock:
    """What the parts of a start take."""

    def __init__(self) -> None:
        self.parts_s: dict[str, float] = {}
        self._last = time.monotonic()

    def done(self, part: str) -> None:
        now = time.monotonic()
        self.parts_s[part], self._last = now - self._last, now


class _TokenTimes:
    """When tokens came, in Unix nanoseconds, of which a phase shows three."""

    def __init__(self) -> None:
        self.num = 0
        self._first = self._second = self._last = 0

    def saw(self, num: int) -> None:
        self.num, self._last = self.num + num, time.time_ns()
        if self.num >= 1:
            self._first = self._first or self._last
        if self.num >= 2:
            self._second = self._second or self._last

    def events(self) -> tuple[tuple[str, int], ...]:
        times = {"first_token": self._first, "second_token": self._second, "last_token": self._last}
        return tuple((name, at) for name, at in times.items() if at)


def _compute(
    name: str,
    start_ns: int,
    end_ns: int,
    run: Run,
    attributes: dict[str, str | int | float | bool],
    events: tuple[tuple[str, int], ...] = (),
) -> Phase:
    """The engine's own part, which begins where lookup and load end."""
    begins = [start_ns, *(report.end_ns for report in (run.looked, run.loaded) if report)]
    return Phase(name=name, start_ns=min(max(begins), end_ns), end_ns=end_ns, attributes=attributes, events=events)


@contextmanager
def _translated(guide: str) -> Iterator[None]:
    """vLLM's exceptions as pdq's. `guide`: the field that holds the answer to a grammar, which may be refused."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except (EngineDeadError, EngineGenerateError) as exc:
        raise Unavailable(f"the engine failed: {exc or type(exc).__name__}") from exc
    except (VLLMClientError, ValueError) as exc:
        if not guide:
            raise Rejected(str(exc)) from exc
        verdict = " ".join(str(exc).split())[:120]
        raise Rejected(f"{guide} cannot be enforced by this engine: {verdict}", param=guide) from exc


def _bound(work: Callable[[], T], cpus: frozenset[int]) -> Future[T]:
    """`work()` in a thread of its own, bound to `cpus`, which the processes that it starts inherit."""
    with_affinity = (lambda: os.sched_setaffinity(0, cpus)) if cpus else None
    executor = ThreadPoolExecutor(1, "vllm-start", initializer=with_affinity)
    job = executor.submit(work)
    executor.shutdown(wait=False)
    return job


async def _built(build: Callable[[], Any], cpus: frozenset[int]) -> Any:
    """`build()`, bound to `cpus`. An engine that is ready after the caller has gone is shut down."""
    job = _bound(build, cpus)
    try:
        return await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        job.add_done_callback(lambda done: done.exception() or done.result().shutdown(SHUTDOWN_S))
        raise
