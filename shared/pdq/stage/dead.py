"""Dead letters: messages that could not be served, kept for operators with what is known of their end."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pdq import subjects
from pdq.bus import Bus
from pdq.messages import DeadLetter, ErrorInfo, encode_json
from pdq.telemetry import Metrics

MAX_BODY_BYTES = 512 * 1024
"""A letter is JSON, in which a body grows by a third; the broker takes 1 MiB a message."""


class DeadLetters:
    """Where a process puts the messages it gives up; at most one per request and stage."""

    def __init__(self, bus: Bus, metrics: Metrics, worker: str) -> None:
        self._bus = bus
        self._metrics = metrics
        self._worker = worker

    async def bury(
        self,
        stage: str,
        tenant: str,
        model: str,
        request: str,
        error: ErrorInfo,
        *,
        subject: str,
        body: bytes,
        headers: Mapping[str, str],
        attempts: int,
        trace: str = "",
    ) -> None:
        """Store one. Raises Unavailable or QueueFull."""
        letter = DeadLetter(
            stage=stage,
            subject=subject,
            request=request,
            error=error,
            attempts=attempts,
            worker=self._worker,
            trace=trace,
            at=time.time(),
            body=body if len(body) <= MAX_BODY_BYTES else b"",
            body_omitted=0 if len(body) <= MAX_BODY_BYTES else len(body),
            headers=dict(headers),
        )
        self._metrics.dead_letter(stage, error.code)
        target = subjects.dead(stage, subjects.slug(model), tenant, request)
        await self._bus.publish(target, encode_json(letter), msg_id=f"{tenant}.{request}.{stage}.dead")
