"""Copies of a running broker's files under load, and what a broker makes of each: `python -m tests.copies`.

For docs/backup.md, which says not to. `--pause 0.15` copies a file at a time, as slowly as larger stores are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from pdq import subjects
from pdq.bus import Bus
from pdq.client import Client
from pdq.errors import PdqError
from pdq.settings import BusSettings

from tests.ask import ask
from tests.broker import Broker
from tests.stack import Stack, completion

NUM_CLIENTS = 8
ENCRYPTED = 'cipher: "chachapoly"\nkey: "a-key"\nsync_interval: "always"\n'
BAD = ("malformed or corrupt", "past last stream sequence")


class Copied(NamedTuple):
    """`vanished`: files that were gone when their turn came."""

    directory: Path
    took_s: float
    vanished: int


def copy(store: Path, to: Path, pause_s: float) -> Copied:
    began, vanished = time.monotonic(), 0
    for root, directories, files in os.walk(store):
        directories.sort()
        target = to / "store" / Path(root).relative_to(store)
        target.mkdir(parents=True)
        for name in sorted(files):
            time.sleep(pause_s)
            try:
                shutil.copy2(Path(root) / name, target / name)
            except FileNotFoundError:
                vanished += 1
    return Copied(to, time.monotonic() - began, vanished)


async def load(client: Client, number: int) -> None:
    """One request after the other."""
    while True:
        with contextlib.suppress(PdqError):
            await ask(client, completion(f"tell me {number} {time.time()}", max_tokens=30), seconds=60)


async def examine(copied: Copied) -> str:
    """What a broker that is started on a copy has, and says."""
    broker = Broker(copied.directory)
    broker.jetstream = ENCRYPTED
    broker.start()
    try:
        bus = await Bus.connect(BusSettings(url=broker.url), "test")
        names = (subjects.LOG, subjects.SUBMIT, subjects.PREFILL, subjects.DECODE, subjects.REAP)
        missing = [name for name in names if await bus.stream_info(name) is None]
        await bus.close()
    finally:
        broker.stop()
    said = (copied.directory / "nats.log").read_text().splitlines()
    told = [line.partition("] ")[2] for line in said if any(bad in line for bad in BAD)]
    gone = f"{copied.vanished} files gone; missing streams: {missing or 'none'}"
    return f"took {copied.took_s:.2f} s; {gone}; {told or 'no complaint'}"


async def run(directory: Path, copies: int, pause_s: float) -> None:
    stack = Stack(directory, PDQ_ENGINE_SIM_PROFILE="llama3-8b-h100")
    stack.broker.jetstream = ENCRYPTED
    for module in ("pdq_router", "pdq_prefill", "pdq_decode"):
        stack.add(module)
    try:
        await stack.start()
        bus = await stack.connect()
        clients = [asyncio.create_task(load(Client(bus, "local"), number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(3)
        done = []
        for number in range(copies):
            done.append(await asyncio.to_thread(copy, directory / "store", directory / f"copy-{number}", pause_s))
            await asyncio.sleep(1)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await bus.close()
    finally:
        stack.stop()
    for copied in done:
        print(await examine(copied), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each file")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory), chosen.copies, chosen.pause))


if __name__ == "__main__":
    main()
