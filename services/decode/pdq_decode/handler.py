"""Decode: load what the tiers hold of the prompt's KV, compute the rest, and generate the answer."""

from __future__ import annotations

import logging
from contextlib import aclosing

from pdq.engines.base import Done, Engine, Work
from pdq.errors import Unavailable
from pdq.kv.contract import salt
from pdq.messages import DecodeJob, KvReport, unpack_ids
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
        promise = job.promise
        work = Work(
            request=f"{job.tenant}.{job.request}.d{attempt.number}",
            prompt=tuple(unpack_ids(job.prompt)),
            sampling=job.sampling,
            salt=salt(info.contract, job.tenant, self._key),
            # KV of another contract lies under another salt: it is not found, so it is not promised either.
            promise=promise if promise is not None and promise.contract == info.contract else None,
            traceparent=attempt.traceparent,
            shown=attempt.shown,
        )
        done = await self._generate(work, attempt)
        kv = KvReport(
            promised_tokens=promise.tokens if promise else 0,
            loaded_tokens=done.loaded_tokens,
            local_tokens=done.local_tokens,
            cause=self._refused(job),
        )
        return Answer(finish_reason=done.finish_reason, kv=kv, phases=done.phases)

    def _refused(self, job: DecodeJob) -> str:
        """Why the job's promise is not gone by; empty when it is, or there is none."""
        promise, own = job.promise, self._engine.info.contract
        if promise is None or not promise.tokens or promise.contract == own:
            return ""
        log.warning(
            "the prompt is computed anew: its KV was stored under contract %s, this worker's is %s; "
            "`pdq doctor` tells what differs",
            promise.contract[:12] or "(none)",
            own[:12],
            extra={"request_id": job.request, "cause": CONTRACT},
        )
        return CONTRACT

    async def _generate(self, work: Work, attempt: Attempt) -> Done:
        async with aclosing(self._engine.decode(work)) as items:
            async for item in items:
                if isinstance(item, Done):
                    return item
                await attempt.emit(item)
        raise Unavailable("the engine ended an answer without saying how")
