"""One KV mode's stack with real engines: broker, router, a prefill and a decode worker, their LMCache servers and
what these share."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pdq.bus import Bus
from pdq.client import Client, new_request_id
from pdq.messages import Event
from pdq.settings import KvServerSettings, KvSettings, ModelSpec, variables
from pdq.verify.compare import Given
from pdq.verify.prompts import Prompt
from pdq.verify.stack import body, given

from tests.ask import Answer
from tests.broker import free_port
from tests.chaos.proxy import Proxy
from tests.e2e import stores
from tests.e2e.conftest import ENGINE_START_S, KvServer, real_stack
from tests.e2e.stores import Shared
from tests.matrix.chunks import Chunks, Filer, Files, Redis
from tests.stack import Stack, chat

MODES = ("host", *stores.MODES)
TIERS = {"host": "l1", "file": "l2", "redis": "l2", "s3": "l2", "p2p": "peer"}
"""The tier that decode loads from."""
SIZES = KvServerSettings(memory_gb=0.5)
SLOTS = 2
"""Of the decode worker: a stream that shows stalls, and one request."""
BOUND_S = 120.0
"""For a whole request: what takes longer is taken for a wait without a bound."""
STREAM_TOKENS = 1_500
HTTP_S = 5.0
NOT_LOADED, REFUSED = "tokens not loaded", "chunks refused"


class Timed(Answer):
    """An answer whose tokens' arrivals are known (`time.monotonic`)."""

    def __init__(self, request: str) -> None:
        super().__init__(request)
        self.arrivals: list[float] = []

    def take(self, event: Event) -> None:
        super().take(event)
        if event.out is not None:
            self.arrivals.append(time.monotonic())

    def gap_s(self, since: float) -> float:
        """The longest that it stood still, from `since` on until now."""
        times = [since, *(at for at in self.arrivals if at > since), time.monotonic()]
        return max(later - earlier for earlier, later in pairwise(times))


class Rig:
    """See the module. Made by `running`."""

    def __init__(self, mode: str, root: Path, spec: ModelSpec, store: Shared, proxy: Proxy | None) -> None:
        self.mode, self.spec, self.store, self.proxy = mode, spec, store, proxy
        self.prefill_server = self._server(root / "prefill-kv")
        self.decode_server = self.prefill_server if mode == "host" else self._server(root / "decode-kv")
        (root / "stack").mkdir()
        self.stack: Stack = real_stack(root / "stack", spec, self.decode_server)
        self.router = self.stack.add("pdq_router")
        self.prefill = self.stack.add("pdq_prefill", PDQ_ENGINE_CPUS="0", **variables(self.prefill_server.kv))
        self.decode = self.stack.add("pdq_decode", PDQ_ENGINE_CPUS="1", PDQ_WORKER_SLOTS=str(SLOTS))
        self.prefill.ready_s = self.decode.ready_s = ENGINE_START_S
        self._bus: Bus | None = None
        self.chunks: Chunks | None = _chunks(mode, root, store)

    def _server(self, directory: Path) -> KvServer:
        peer = {"peer": f"127.0.0.1:{free_port()}"} if self.mode == "p2p" else {}
        return KvServer(directory, self.spec, SIZES, **self.store.settings, **peer)

    @property
    def servers(self) -> list[KvServer]:
        return list({id(server): server for server in (self.prefill_server, self.decode_server)}.values())

    async def start(self) -> None:
        # An engine waits for its server by itself, and imports much meanwhile. The stack's start blocks its loop.
        started = asyncio.to_thread(asyncio.run, self.stack.start())
        await asyncio.gather(started, *(server.start() for server in self.servers))
        self._bus = await self.stack.connect()

    async def stop(self) -> None:
        try:
            if self._bus is not None:
                await self._bus.close()
            self.stack.stop()
        finally:
            for server in self.servers:
                server.stop()

    def client(self, tenant: str) -> Client:
        assert self._bus is not None
        return Client(self._bus, tenant)

    async def ask(self, prompt: Prompt, tenant: str, order: str, max_tokens: int, answer: Timed) -> Given:
        """Submit it, and fill `answer` until its end."""
        sent = body(self.spec.slug, prompt, max_tokens)
        await self.follow(sent, tenant, answer, order)
        return given(prompt.name, answer.request, answer.transcript)

    async def follow(self, sent: bytes, tenant: str, answer: Timed, order: str) -> None:
        client = self.client(tenant)
        async with client.follow(answer.request, catch_up=False) as follower:
            await client.submit(sent, model=self.spec.slug, request=answer.request, order=order)
            async for event in follower.events(BOUND_S):
                answer.take(event)

    @contextlib.asynccontextmanager
    async def streaming(self, tenant: str) -> AsyncIterator[Timed]:
        """A stream of decode's engine that goes on until it is cancelled; its first tokens are there."""
        answer = Timed(new_request_id())
        sent = chat("Count to a thousand.", max_tokens=STREAM_TOKENS, temperature=0, ignore_eos=True)
        task = asyncio.create_task(self.follow(sent, tenant, answer, "decode-only"))
        try:
            await until(lambda: len(answer.arrivals) >= 2 or task.done())
            yield answer
        finally:
            await self.client(tenant).cancel(answer.request)
            await task

    def looked_up(self, server: KvServer) -> int:
        """Tokens that lookups have asked the server for."""
        url = f"http://127.0.0.1:{server.kv.http_port}/pdq/tiers"
        with urllib.request.urlopen(url, timeout=HTTP_S) as answer:
            found = re.search(rb'"asked_tokens":(\d+)', answer.read())
        assert found is not None
        return int(found[1])

    def counters(self) -> dict[str, float]:
        """What tells of KV that was not used, by name."""
        handoffs = _samples(self.prefill.get("/metrics")[1], r'pdq_handoffs_total\{kv="(\w+)"\}')
        found = {f"handoffs {cause}": value for cause, value in handoffs.items() if cause != "ready"}
        found[NOT_LOADED] = self._lost_tokens()
        refused = (
            _samples(_metrics(server.kv), r'pdq_kv_refused_chunks_total\{cause="(\w+)"\}') for server in self.servers
        )
        found[REFUSED] = sum(sum(each.values()) for each in refused)
        return found

    def _lost_tokens(self) -> float:
        """Of one scrape: between two, a request may be counted."""
        samples = re.findall(
            r"(?m)^pdq_kv_(promised|loaded|local)_tokens_total\S* (\S+)$", self.decode.get("/metrics")[1]
        )
        return sum(float(value) if name == "promised" else -float(value) for name, value in samples)

    def clear_memory(self, server: KvServer) -> None:
        """Empty a server's own memory, but for what is being loaded."""
        url = f"http://127.0.0.1:{server.kv.http_port}/cache/clear"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=HTTP_S) as answer:
            assert answer.status == 200

    def evict(self) -> None:
        """Take from decode what it was promised, wherever it lies."""
        if self.mode == "host":
            self.clear_memory(self.decode_server)
        else:
            self.store.forget(self.prefill_server.kv)


@contextlib.asynccontextmanager
async def running(mode: str, root: Path, spec: ModelSpec) -> AsyncIterator[Rig]:
    """A rig for the length of a `with`. root: an empty directory."""
    with _host(root) if mode == "host" else stores.shared(mode, root) as store:
        async with _through_proxy(store) as proxy:
            rig = Rig(mode, root, spec, store, proxy)
            try:
                await rig.start()
                yield rig
            finally:
                await rig.stop()


@contextlib.contextmanager
def _host(root: Path) -> Iterator[Shared]:
    yield Shared("host", {"mode": "host"}, lambda kv: None)


@contextlib.asynccontextmanager
async def _through_proxy(store: Shared) -> AsyncIterator[Proxy | None]:
    """Servers reach Redis and S3 through a proxy, which can make them slow."""
    url = store.settings.get("pool", "")
    if not (found := re.search(r"127\.0\.0\.1:(\d+)", url)):
        yield None
        return
    proxy = Proxy(int(found[1]))
    await proxy.start()
    store.settings["pool"] = url.replace(found[0], f"127.0.0.1:{proxy.port}")
    try:
        yield proxy
    finally:
        await proxy.close()


def _chunks(mode: str, root: Path, store: Shared) -> Chunks | None:
    if mode == "file":
        return Files(root / "pool")
    if mode == "redis":
        return Redis(store.port)
    return Filer(store.filer) if mode == "s3" else None


def _metrics(kv: KvSettings) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{kv.http_port}/metrics", timeout=HTTP_S) as page:
        text: str = page.read().decode()
        return text


def _samples(text: str, pattern: str) -> dict[str, float]:
    return {label: float(value) for label, value in re.findall(rf"^{pattern} (\S+)$", text, re.M)}


async def until(condition: Callable[[], Any], seconds: float = BOUND_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
