"""Snapshots of streams over JetStream's own API, as `nats stream backup` and `restore` take and give them back."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg

CHUNK_BYTES = 128 << 10
SECONDS = 30.0


class Snapshot(NamedTuple):
    """A stream, its messages and its consumers, as the server packs them. `head`: its configuration and state."""

    head: dict[str, Any]
    chunks: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(map(len, self.chunks))


async def take(client: Client, stream: str) -> Snapshot:
    """A snapshot of a stream that goes on meanwhile."""
    chunks: list[bytes] = []
    whole = asyncio.get_running_loop().create_future()

    async def chunk(message: Msg) -> None:
        if message.data:
            chunks.append(message.data)
            if message.reply:
                # The server waits when too much of it is on the way.
                await client.publish(message.reply)
        else:
            whole.set_result(dict(message.headers or {}))

    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=chunk)
    head = await _call(client, f"STREAM.SNAPSHOT.{stream}", {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES})
    async with asyncio.timeout(SECONDS):
        status = await whole
    await subscription.unsubscribe()
    assert status.get("Status", "204") == "204", status
    return Snapshot({"config": head["config"], "state": head["state"]}, tuple(chunks))


async def put_back(client: Client, snapshot: Snapshot) -> dict[str, Any]:
    """Make the stream of a snapshot, which must not exist; returns its information."""
    stream = snapshot.head["config"]["name"]
    target = (await _call(client, f"STREAM.RESTORE.{stream}", snapshot.head))["deliver_subject"]
    for chunk in snapshot.chunks:
        await client.request(target, chunk, timeout=SECONDS)
    made: dict[str, Any] = json.loads((await client.request(target, b"", timeout=SECONDS)).data)
    assert "error" not in made, made
    return made


async def _call(client: Client, verb: str, body: dict[str, Any]) -> dict[str, Any]:
    message = await client.request(f"$JS.API.{verb}", json.dumps(body).encode(), timeout=SECONDS)
    answer: dict[str, Any] = json.loads(message.data)
    assert "error" not in answer, answer
    return answer
