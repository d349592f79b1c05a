"""The brokers of a local stack: nats-server on loopback, and what is made in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pdq.bus import Bus
from pdq.settings import BusSettings
from pdq.up.machine import HOST, listening, nats_server
from pdq.up.process import Spec

CONNECT_TIMEOUT_S = 10.0


def url(port: int) -> str:
    return f"nats://{HOST}:{port}"


def spec(name: str, port: int, file: Path, environ: Mapping[str, str]) -> Spec:
    """A server with this file as its configuration. Raises Misconfigured when none is installed."""
    command = (nats_server(), "-c", str(file))
    return Spec(name, command, environ, lambda: listening(port), {"nats": port})


def config(port: int, store: Path, streams: Iterable[Mapping[str, Any]], domain: str = "") -> str:
    """Loopback only, with room for what these streams may hold by their own limits. domain: JetStream's."""
    room = sum(int(stream["max_bytes"]) for stream in streams if stream["storage"] == "file" and "max_bytes" in stream)
    quoted = str(store).replace("\\", "\\\\").replace('"', '\\"')
    named = f'domain: "{domain}", ' if domain else ""
    return (
        f'listen: "{HOST}:{port}"\n'
        f'jetstream {{ {named}store_dir: "{quoted}", max_mem: 256MB, max_file: {room + (1 << 30)} }}\n'
    )


def write(file: Path, text: str) -> None:
    """For its owner alone: it may hold a key."""
    file.touch(mode=0o600)
    file.write_text(text, "utf-8")


async def made(nats_url: str, make: Callable[[Bus], Awaitable[object]]) -> None:
    """Streams and consumers, by one of `pdq.init`. Raises Misconfigured or Unavailable."""
    bus = await Bus.connect(BusSettings(url=nats_url, connect_timeout_s=CONNECT_TIMEOUT_S), "pdq-up")
    try:
        await make(bus)
    finally:
        await bus.close()
