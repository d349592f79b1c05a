"""Decode: load what the tiers hold of the prompt's KV, compute the rest, and generate the answer."""

from __future__ import annotations

import logging
from contextlib import aclosing

import msgspec
from pdq.engines.base import Done, Engine, Work
from pdq.errors import Unavailable
from pdq.kv.contract import salt
from pdq.messages import DecodeJob, KvReport, Promise, unpack_ids
from pdq.stage import Answer, Attempt

log = logging.getLogger("pdq.decode")

CONTRACT = "contract"
"""Why a promise is not kept: it was made under another KV contract."""


class DecodeHandler:
    """See `pdq.stage.Handler`. `key` keys the hash of tenants in KV salts."""

    def __init__(self, engine: Engine, key: bytes) -> None:
        self._engine = engine
        self._key = key

    async def handle(self, job: DecodeJob, attempt: Attempt) -> Answer:
        info = self._engine.info
        work = Work(
            request=f"{job.tenant}.{job.request}.d{attempt.number}",
            prompt=tuple(unpack_ids(job.prompt)),
            sampling=job.sampling,
            salt=salt(info.contract, job.tenant, self._key),
            traceparent=attempt.traceparent,
            shown=attempt.shown,
        )
        promise = await self._promise(job, work, attempt)
        if promise is not None and promise.contract == info.contract:
            # KV of another contract lies under another salt: it is not found, so it is not promised either.
            work = msgspec.structs.replace(work, promise=promise)
        done = await self._generate(work, attempt)
        kv = KvReport(
            promised_tokens=promise.tokens if promise else 0,
            loaded_tokens=done.loaded_tokens,
            local_tokens=done.local_tokens,
            cause=self._refused(job.request, promise),
        )
        return Answer(finish_reason=done.finish_reason, kv=kv, phases=done.phases)

    async def _promise(self, job: DecodeJob, work: Work, attempt: Attempt) -> Promise | None:
        """What was handed over; or, where decode goes first, what was made for it."""
        if attempt.delegate is None:
            return job.promise
        return await attempt.delegate(lambda: self._missing(work))

    async def _missing(self, work: Work) -> int:
        """Tokens of the prompt's whole chunks that no tier holds. A rest at its end is computed here anyway."""
        chunk = self._engine.info.chunk_tokens
        return max(0, len(work.prompt) // chunk * chunk - await self._engine.held(work))

    def _refused(self, request: str, promise: Promise | None) -> str:
        """Why a promise is not gone by; empty when it is, or there is none."""
        own = self._engine.info.contract
        if promise is None or not promise.tokens or promise.contract == own:
            return ""
        log.warning(
            "the prompt is computed anew: its KV was stored under contract %s, this worker's is %s; "
            "`pdq doctor` tells what differs",
            promise.contract[:12] or "(none)",
            own[:12],
            extra={"request_id": request, "cause": CONTRACT},
        )
        return CONTRACT

    async def _generate(self, work: Work, attempt: Attempt) -> Done:
        async with aclosing(self._engine.decode(work)) as items:
            async for item in items:
                if isinstance(item, Done):
                    return item
                await attempt.emit(item)
        raise Unavailable("the engine ended an answer without saying how")
