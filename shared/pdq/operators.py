"""What operators do over the bus: see the workers, drain one, look at dead letters, send one again or drop it."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from pdq import subjects
from pdq.bus import Bus
from pdq.client import ORDER_HEADER, REPLAY_HEADER, Client, Submitted, new_request_id
from pdq.errors import UNREADABLE, Rejected, Unavailable
from pdq.messages import (
    DeadLetter,
    DecodeJob,
    DrainReply,
    Job,
    Order,
    PrefillJob,
    WorkerBeat,
    decode_job,
    decode_json,
    encode_json,
    unpack_ids,
)

DRAIN_TIMEOUT_S = 5.0


class Letter(NamedTuple):
    """A dead letter and its place in PDQ_DEAD."""

    seq: int
    tenant: str
    model: str
    letter: DeadLetter


async def workers(bus: Bus) -> list[WorkerBeat]:
    """The newest beat of every worker that is alive. Raises Unavailable."""
    beats = []
    for stored in await bus.read(subjects.WORKERS, subjects.ALL_WORKERS, limit=10_000):
        # A worker of a newer version may beat in a way that this one cannot read.
        with contextlib.suppress(*UNREADABLE):
            beats.append(decode_json(stored.data, WorkerBeat))
    return beats


async def drain(bus: Bus, worker: str) -> DrainReply:
    """Tell a worker to stop in order. Raises Rejected for a bad name, Unavailable when it does not answer."""
    if not subjects.is_token(worker):
        raise Rejected(f"worker {worker[:40]!r} must match [A-Za-z0-9_-]{{1,64}}", param="worker")
    try:
        answer = await bus.request(subjects.drain(worker), b"", timeout_s=DRAIN_TIMEOUT_S)
    except Unavailable as exc:
        raise Unavailable(f"no worker named {worker} answers; `pdq workers` shows who is alive") from exc
    return decode_json(answer, DrainReply)


async def dead_letters(bus: Bus, *, after: int = 0, limit: int = 100) -> list[Letter]:
    """Dead letters after a sequence, oldest first. Raises Unavailable."""
    stored = await bus.read(subjects.DEAD, subjects.ALL_DEAD, after=after, limit=limit)
    return [_letter(one.seq, one.subject, one.data) for one in stored]


async def dead_letter(bus: Bus, seq: int) -> Letter | None:
    """The dead letter at a sequence. Raises Unavailable."""
    stored = await bus.get(subjects.DEAD, seq)
    return None if stored is None else _letter(stored.seq, stored.subject, stored.data)


async def drop(bus: Bus, seq: int) -> None:
    """Remove a dead letter; one that is gone already is fine."""
    await bus.delete(subjects.DEAD, seq)


async def replay(bus: Bus, letter: Letter) -> Submitted:
    """Submit what a dead letter holds as a new request, which names the old one as its `replay_of`.

    The letter stays until it is dropped. Raises Rejected, QueueFull or Unavailable.
    """
    if letter.letter.body_omitted:
        raise Rejected(f"dead letter {letter.seq} has no body: it was too large ({letter.letter.body_omitted} bytes)")
    client = Client(bus, letter.tenant)
    headers = {REPLAY_HEADER: letter.letter.request}
    if letter.letter.stage == "route":
        return await client.submit(letter.letter.body, model=letter.model, request=new_request_id(), headers=headers)
    job = _job(letter)
    headers[ORDER_HEADER] = order_of(job)
    return await client.submit(
        encode_json(completion_of(job)),
        model=job.model,
        request=new_request_id(),
        # Whether it is over its tenant's share is decided anew.
        priority="" if job.priority == "excess" else job.priority,
        headers=headers,
    )


def order_of(job: Job) -> Order:
    """The order that a job is part of."""
    if isinstance(job, PrefillJob):
        return "prefill-first" if job.handoff else "decode-first"
    if job.prefill_wait_s:
        return "decode-first"
    return "decode-only" if job.promise is None else "prefill-first"


def completion_of(job: Job) -> dict[str, Any]:
    """A job as the completions body that asks for the same: prompt by token ids, all sampling values set."""
    sampling = job.sampling
    body: dict[str, Any] = {
        "prompt": unpack_ids(job.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
        # Completions allow five alternatives, chat twenty.
        "logprobs": None if sampling.logprobs is None else min(5, sampling.logprobs),
    }
    return {name: value for name, value in body.items() if value is not None}


def _job(letter: Letter) -> Job:
    if letter.letter.stage == "prefill":
        return decode_job(letter.letter.body, PrefillJob)
    return decode_job(letter.letter.body, DecodeJob)


def _letter(seq: int, subject: str, data: bytes) -> Letter:
    _, _, _, model, tenant, _ = subject.split(".")
    return Letter(seq, tenant, model, decode_json(data, DeadLetter))
