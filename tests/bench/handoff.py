"""One mode with its engines and servers, and what a prompt costs there with and without a handoff."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from pdq.engines.base import Done, Phase, PrefillResult, Tokens, Work
from pdq.engines.vllm import VllmEngine
from pdq.kv.tier import Tier
from pdq.settings import KvSettings, ModelSpec

from tests.bench.kv_report import Sample
from tests.bench.raw import Raw, memcpy_s, opened
from tests.broker import free_port
from tests.e2e.conftest import SIZES, KvServer, Pair, engine_settings, greedy
from tests.e2e.stores import Shared, shared

MODES = ("host", "file", "redis", "s3", "p2p")
BOUND_S = 300.0
"""Of one prompt."""
SETTLE_S = 60.0
"""For what a decode engine stores of a prompt that it computed itself."""
STEP_TOKENS = engine_settings(0).max_num_batched_tokens
READ_FROM = {"host": "l1", "p2p": "peer"}
"""The tier that decode loads from; a pool is `l2`."""


class Bench:
    """The two engines of a mode, and the bare store that it uses."""

    def __init__(self, mode: str, pair: Pair, store: Shared | None, raw: Raw) -> None:
        self._pair = pair
        self._store = store
        self._raw = raw
        self._far = READ_FROM.get(mode, "l2")

    @property
    def kv_bytes_per_token(self) -> int:
        return self._pair.decode.info.kv_bytes_per_token

    async def warm_up(self, num: int) -> None:
        """Peers come to know each other, and memory is written to for the first time."""
        async with asyncio.timeout(BOUND_S):
            while (await self._handed_over(self._work(num))).done.loaded_tokens == 0:
                await asyncio.sleep(1)
        self._empty()

    async def sample(self, num: int, plain_first: bool) -> Sample:
        """One prompt of `num` tokens by all ways. Raises AssertionError when KV did not move as it should."""
        async with asyncio.timeout(BOUND_S):
            if plain_first:
                plain_s = await self._plain(num)
                handed = await self._handed_over(self._work(num))
            else:
                handed = await self._handed_over(self._work(num))
                plain_s = await self._plain(num)
            self._check(num, handed)
            self._empty()
            num_bytes = handed.stored.stored_bytes
            raw = await asyncio.to_thread(self._raw, self._chunks(num_bytes))
            copied_s = await asyncio.to_thread(memcpy_s, num_bytes)
        return Sample(
            tokens=num,
            bytes=num_bytes,
            plain_s=plain_s,
            ttft_s=handed.first_s,
            memcpy_s=copied_s,
            raw_out_s=raw.out_s,
            raw_in_s=raw.in_s,
            readable_s=readable_s(handed.stored.phases) if num <= STEP_TOKENS else None,
            **parts(handed.stored.phases, handed.done.phases),
        )

    async def _plain(self, num: int) -> float:
        work = self._work(num)
        seconds, done = await first_token(self._pair.decode, work)
        assert (done.loaded_tokens, done.local_tokens) == (0, 0), f"a new prompt was found: {done}"
        # Decode stores what it computes, for the next turn: on to a pool it does so while others run.
        tier = Tier(self._pair.decode_server.kv, self._pair.spec.id)
        try:
            held = not await tier.lacks(work.prompt[: self._whole(num)], work.salt, SETTLE_S)
        finally:
            await tier.close()
        assert held, f"{num} tokens: what decode computed was not stored"
        return seconds

    async def _handed_over(self, work: Work) -> Handed:
        began = time.perf_counter()
        stored = await self._pair.prefill.prefill(work)
        prefilled_s = time.perf_counter() - began
        seconds, done = await first_token(self._pair.decode, work)
        return Handed(prefilled_s + seconds, stored, done)

    def _check(self, num: int, handed: Handed) -> None:
        whole = self._whole(num)
        # The last token is always computed: its logits are needed.
        wanted = (whole, min(whole, num - 1), 0)
        found = (handed.stored.stored_tokens, handed.done.loaded_tokens, handed.done.local_tokens)
        assert found == wanted, f"{num} tokens: stored, loaded and local were {found}, not {wanted}"
        tier = phase(handed.done.phases, "kv.load").attributes["pdq.kv.tier"]
        assert tier == self._far, f"{num} tokens: loaded from {tier}, not from {self._far}"

    def _whole(self, num: int) -> int:
        return num // self._pair.spec.chunk_tokens * self._pair.spec.chunk_tokens

    def _work(self, num: int) -> Work:
        """A prompt that nothing has seen."""
        prompt = tuple(secrets.randbelow(self._pair.spec.vocab_size) for _ in range(num))
        return Work(request="r", prompt=prompt, sampling=greedy(1, ignore_eos=True), salt=secrets.token_hex(32))

    def _chunks(self, num_bytes: int) -> list[memoryview]:
        """Other bytes of the same number, cut as the KV is."""
        size, payload = self._pair.spec.chunk_tokens * self.kv_bytes_per_token, memoryview(os.urandom(num_bytes))
        return [payload[first : first + size] for first in range(0, num_bytes, size)]

    def _empty(self) -> None:
        """Each prompt finds the room that the first one found."""
        for server in (self._pair.server, self._pair.decode_server):
            _clear(server.kv)
        if self._store is not None:
            self._store.forget(self._pair.kv)


class Handed(NamedTuple):
    """A prompt that went through both engines. first_s: seconds to its first token."""

    first_s: float
    stored: PrefillResult
    done: Done


@contextlib.asynccontextmanager
async def running(mode: str, spec: ModelSpec, root: Path) -> AsyncIterator[Bench]:
    """Everything that a mode needs runs for the length of a `with`."""
    root.mkdir()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(shared(mode, root)) if mode != "host" else None
        pair = Pair(spec, *_servers(mode, spec, store, root))
        raw = stack.enter_context(opened(mode, store.settings if store else {}, root))
        try:
            await pair.start()
            yield Bench(mode, pair, store, raw)
        finally:
            await pair.stop()


def _servers(mode: str, spec: ModelSpec, store: Shared | None, root: Path) -> list[KvServer]:
    """One for both engines, or one each."""
    if store is None:
        return [KvServer(root / "both", spec)]
    settings = [store.settings | ({"peer": f"127.0.0.1:{free_port()}"} if mode == "p2p" else {}) for _ in range(2)]
    names = ("prefill", "decode")
    return [KvServer(root / name, spec, SIZES, **mine) for name, mine in zip(names, settings, strict=True)]


async def first_token(engine: VllmEngine, work: Work) -> tuple[float, Done]:
    """Seconds to the first token, and the answer's end."""
    began, seconds = time.perf_counter(), 0.0
    async for item in engine.decode(work):
        if isinstance(item, Tokens):
            seconds = seconds or time.perf_counter() - began
            continue
        assert seconds, "an answer without a token"
        return seconds, item
    raise AssertionError("an answer without an end")


def parts(prefill: tuple[Phase, ...], decode: tuple[Phase, ...]) -> dict[str, float]:
    """A handoff's times in seconds, by the name they have in a Sample, from the phases of both engines."""
    computed, store, first = (
        phase(prefill, "engine.prefill"),
        phase(prefill, "kv.store"),
        phase(decode, "engine.decode"),
    )
    transfer_s = float(store.attributes["pdq.kv.transfer_ms"]) / 1e3
    confirm_s = max(0.0, (store.end_ns - computed.end_ns) / 1e9)
    return {
        "compute_s": computed.duration_ms / 1e3 - transfer_s,
        "store_s": transfer_s,
        "confirm_s": confirm_s,
        "fetch_s": phase(decode, "kv.lookup").duration_ms / 1e3,
        "load_s": phase(decode, "kv.load").duration_ms / 1e3,
        "first_s": (dict(first.events)["first_token"] - first.start_ns) / 1e9,
    }


def readable_s(prefill: tuple[Phase, ...]) -> float:
    """Seconds from the begin of prefill's first store until decode could read all of it."""
    return phase(prefill, "kv.store").duration_ms / 1e3


def phase(phases: tuple[Phase, ...], name: str) -> Phase:
    found = [each for each in phases if each.name == name]
    assert len(found) == 1, f"{len(found)} phases {name}"
    return found[0]


def _clear(kv: KvSettings) -> None:
    """Empty a server's memory."""
    request = urllib.request.Request(f"http://{kv.host}:{kv.http_port}/cache/clear", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert msgspec.json.decode(answer.read())["status"] == "ok"
