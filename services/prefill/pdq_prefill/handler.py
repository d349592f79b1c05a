"""Prefill: compute a prompt's KV, wait until it can be read, and say what decode can load."""

from __future__ import annotations

from pdq.engines.base import Engine, Work
from pdq.kv.contract import salt
from pdq.messages import PrefillJob, Promise, unpack_ids
from pdq.stage import Attempt, Handoff


class PrefillHandler:
    """See `pdq.stage.Handler`. `key` keys the hash of tenants in KV salts."""

    def __init__(self, engine: Engine, key: bytes) -> None:
        self._engine = engine
        self._key = key

    async def handle(self, job: PrefillJob, attempt: Attempt) -> Handoff:
        info = self._engine.info
        work = Work(
            request=f"{job.tenant}.{job.request}.p{attempt.number}",
            prompt=tuple(unpack_ids(job.prompt)),
            sampling=job.sampling,
            salt=salt(info.contract, job.tenant, self._key),
            traceparent=attempt.traceparent,
        )
        done = await self._engine.prefill(work)
        # Decode always computes at least the last token of the prompt: it needs its logits.
        tokens = max(0, min(done.stored_tokens, len(work.prompt) - 1))
        promise = Promise(
            tokens=tokens,
            bytes=done.stored_bytes,
            contract=info.contract,
            cause="" if tokens else done.cause or "short_prompt",
        )
        return Handoff(promise=promise, phases=done.phases)
