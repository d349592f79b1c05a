"""Publishing jobs: deterministic ids, and what counts as success."""

from __future__ import annotations

from collections.abc import Mapping

from pdq import subjects
from pdq.bus import Bus
from pdq.errors import QueueFull
from pdq.messages import DecodeJob, Job, PrefillJob, Promise, StageName, encode_job


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


async def publish_job(bus: Bus, job: Job, headers: Mapping[str, str]) -> None:
    """Queue a job. That it is queued already, or was a moment ago, is success.

    Message ids are shared by a whole stream, so the tenant is part of them; and the deadline, which is another when a
    request that was purged is submitted again. Raises QueueFull when the queue as a whole is full, or Unavailable.
    """
    stage = stage_of(job)
    subject = subjects.job(stage, job.model, job.priority, job.tenant, job.request)
    msg_id = f"{job.tenant}.{job.request}.{stage}.{job.deadline:f}"
    try:
        await bus.publish(subject, encode_job(job), msg_id=msg_id, headers=dict(headers))
    except QueueFull as exc:
        if not exc.per_subject:
            raise
