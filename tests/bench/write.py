"""The writing side of tests/bench/tokens.py: `python -m tests.bench.write URL`. Rounds come as lines of JSON on stdin.

pdq: the log's own writer, as a decode worker has it, fed a token of each request a step. Floor: nats-py alone, the same
messages with counted acknowledgements, zeros of the same size.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

import msgspec
import nats
import uvloop
from nats.aio.msg import Msg
from pdq.bus import Bus, Outbox
from pdq.log import OutputWriter, RequestLog, Transcript, first, follow
from pdq.log.output import BATCH_TOKENS
from pdq.messages import StageClaims, encode_json
from pdq.messages.log import Output
from pdq.settings import BusSettings

TENANT = "local"
TEXT = "word"
"""Of each token."""
MOST_PENDING = 1_000
WAIT_S = 30.0


class Round(msgspec.Struct):
    path: Literal["floor", "pdq"]
    requests: list[str]
    tokens: int
    """Of each request."""


async def pdq_round(bus: Bus, outbox: Outbox, job: Round) -> None:
    log = RequestLog(bus)
    claims = []
    for request in job.requests:
        accepted = await log.append(TENANT, request, None, first("accepted", submit_seq=1, digest="-"))
        claim = follow(accepted.state, "claim", stage="decode", decode=StageClaims(attempt=1, owner="w"))
        claims.append(await log.append(TENANT, request, accepted, claim))
    writers = [OutputWriter(outbox, TENANT, request, 1, Transcript()) for request in job.requests]
    for step in range(job.tokens):
        for writer in writers:
            await writer.write((step,), TEXT, None)
        # An engine's next step comes by way of the event loop.
        await asyncio.sleep(0)
    for request, entry, writer in zip(job.requests, claims, writers, strict=True):
        await writer.flush()
        ended = follow(entry.state, "finished", num_tokens=writer.num_tokens, output_digest=writer.digest())
        await log.append(TENANT, request, entry, ended)
        writer.close()


async def floor_round(nc: nats.NATS, job: Round) -> None:
    record = Output.of(1, job.tokens // 2, range(BATCH_TOKENS), TEXT * BATCH_TOKENS)
    data, inbox = bytes(len(encode_json(record))), nc.new_inbox()
    total, acked, changed = job.tokens // BATCH_TOKENS * len(job.requests), 0, asyncio.Event()

    async def on_ack(message: Msg) -> None:
        nonlocal acked
        acked += 1
        changed.set()

    async def acknowledged(least: int) -> None:
        while acked < least:
            changed.clear()
            await asyncio.wait_for(changed.wait(), WAIT_S)

    subscription = await nc.subscribe(inbox, cb=on_ack)
    sent = 0
    for _ in range(job.tokens // BATCH_TOKENS):
        for request in job.requests:
            await nc.publish(f"floor.log.{TENANT}.{request}.out", data, reply=inbox)
            sent += 1
        await asyncio.sleep(0)
        await acknowledged(sent - MOST_PENDING)
    await acknowledged(total)
    await subscription.unsubscribe()


async def serve(url: str) -> None:
    """Until stdin ends."""
    bus, nc = await Bus.connect(BusSettings(url=url), "writer"), await nats.connect(url)
    outbox = Outbox(bus)
    await outbox.start()
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        job = msgspec.json.decode(line, type=Round)
        await (pdq_round(bus, outbox, job) if job.path == "pdq" else floor_round(nc, job))
        print("done", flush=True)
    await outbox.close()
    await bus.close()
    await nc.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
