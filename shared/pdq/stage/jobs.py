"""Publishing jobs: deterministic ids, and what counts as success."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import msgspec

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import UNREADABLE, QueueFull
from pdq.log import UNREAD, Entry, Known
from pdq.messages import DecodeJob, Job, PrefillJob, Promise, StageName, State, decode_json, encode_job, encode_json


def stage_of(job: Job) -> StageName:
    return "prefill" if isinstance(job, PrefillJob) else "decode"


def handoff_of(job: Job, promise: Promise) -> DecodeJob:
    """The decode job of a request whose prefill is done, or given up."""
    return DecodeJob(
        request=job.request,
        tenant=job.tenant,
        model=job.model,
        priority=job.priority,
        deadline=job.deadline,
        prompt=job.prompt,
        sampling=job.sampling,
        promise=promise,
        prefer=job.prefer,
    )


def known_of(job: Job) -> Known:
    """The newest state that the job's sender knew."""
    with contextlib.suppress(*UNREADABLE):
        return Entry(job.state_seq, decode_json(job.state, State)) if job.state_seq else UNREAD
    return UNREAD


async def publish_job(bus: Bus, job: Job, known: Entry, headers: Mapping[str, str]) -> None:
    """Queue a job, with the newest state known here. That it is queued already, or was a moment ago, is success.

    Message ids are shared by a whole stream, so the tenant is part of them; and the deadline, which is another when a
    request that was purged is submitted again. Raises QueueFull when the queue as a whole is full, or Unavailable.
    """
    stage = stage_of(job)
    subject = subjects.job(stage, job.model, job.priority, job.tenant, job.request)
    msg_id = f"{job.tenant}.{job.request}.{stage}.{job.deadline:f}"
    job = msgspec.structs.replace(job, state_seq=known.seq, state=encode_json(known.state))
    try:
        await bus.publish(subject, encode_job(job), msg_id=msg_id, headers=dict(headers))
    except QueueFull as exc:
        if not exc.per_subject:
            raise
