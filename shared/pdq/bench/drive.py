"""The open loop: each request is sent when it is due, whatever has become of those before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from pdq.bench.prompts import Prompts
from pdq.bench.records import INTERRUPTED, Record
from pdq.bench.target import Ask, Hearing, Target
from pdq.bench.workload import Load, TimedRequest
from pdq.errors import PdqError

OnRecord = Callable[[Record], None]


class Options(NamedTuple):
    """`warm_up_s`: what is due earlier does not count. `max_in_flight`: more are not sent until one has ended: then
    they are `held`, and the loop is not open any more."""

    timeout_s: float
    max_in_flight: int
    warm_up_s: float = 0.0


class Drive:
    """One load on one target. `on_record` is told of each request that has ended."""

    def __init__(self, target: Target, prompts: Prompts, options: Options, on_record: OnRecord) -> None:
        self._target = target
        self._prompts = prompts
        self._options = options
        self._on_record = on_record
        self._slots = asyncio.Semaphore(options.max_in_flight)
        self._begun = 0.0
        self._held_until_s = 0.0

    async def run(self, load: Load) -> None:
        """Until every request has ended. Cancelled, what runs is ended where it runs, and recorded as interrupted."""
        self._begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(load):
                # Made before it is due: a long prompt takes its time.
                body = self._prompts.body(number, request)
                await asyncio.sleep(request.at_s - self._now())
                held = await self._slot(request.at_s)
                group.create_task(self._one(request, Ask(body, self._options.timeout_s), held))

    async def _slot(self, due_s: float) -> bool:
        """Take a slot. Whether the request is late for it, or for that of one before it."""
        waits = self._slots.locked()
        await self._slots.acquire()
        if waits:
            self._held_until_s = self._now()
        return waits or due_s < self._held_until_s

    def _now(self) -> float:
        return time.monotonic() - self._begun

    async def _one(self, request: TimedRequest, ask: Ask, held: bool) -> None:
        hearing, sent_s = Hearing(), self._now()
        error, message = "internal_error", ""
        try:
            async with asyncio.timeout(ask.timeout_s):
                await self._target.ask(ask, hearing)
            error = ""
        except TimeoutError:
            error, message = "timeout", f"there is no answer within {ask.timeout_s:g} s"
        except PdqError as exc:
            error, message = exc.code, str(exc)
        except asyncio.CancelledError:
            error = INTERRUPTED
            raise
        finally:
            self._slots.release()
            # Ending what nobody waits for any more takes its own time.
            end_s = min(self._now(), sent_s + ask.timeout_s) if error else sent_s + hearing.end_s
            self._on_record(self._record(request, hearing, (sent_s, end_s), (error, message), held))

    def _record(
        self, request: TimedRequest, heard: Hearing, times: tuple[float, float], error: tuple[str, str], held: bool
    ) -> Record:
        return Record(
            planned_s=request.at_s,
            sent_s=times[0],
            end_s=times[1],
            input_tokens=heard.prompt_tokens or request.input_tokens,
            output_tokens=heard.completion_tokens or sum(num or 1 for _, num in heard.chunks),
            chunks=tuple(heard.chunks),
            error=error[0],
            message=error[1],
            request=heard.request,
            warm_up=request.at_s < self._options.warm_up_s,
            planned_input_tokens=request.input_tokens,
            planned_output_tokens=request.output_tokens,
            held=held,
        )
