"""Fixtures of the tests with real engines: an LMCache server, a prefill engine and a decode engine.

Engines take long to start and all the machine's memory is theirs: a pair is started once for a module, and
stopped before the next one starts.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from pdq import model, settings
from pdq.engines.base import Done, PrefillResult, Tokens, Work
from pdq.engines.vllm import VllmEngine
from pdq.kv.server import command, remove_shared_memory, shared_memory, wait_ready
from pdq.messages import Sampling
from pdq.settings import EngineSettings, KvServerSettings, KvSettings, LimitSettings, ModelSpec, variables
from tokenizers import Tokenizer

from tests.stack import Stack

SERVER_START_S = 60.0
SERVER_STOP_S = 20.0
ENGINE_START_S = 240.0
KV_CACHE_BYTES = 256 << 20
STORE_TIMEOUT_S = 10.0
SIZES = KvServerSettings(memory_gb=0.75)


class KvServer:
    """An LMCache server as a child process. `kv`: how an engine uses it."""

    def __init__(self, directory: Path, spec: ModelSpec, sizes: KvServerSettings = SIZES, **kv: str) -> None:
        """directory: for its log and models.toml, made if need be. kv: settings beyond its ports, such as `mode`."""
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.kv = msgspec.convert({"port": free_port(), "http_port": free_port(), **kv}, KvSettings)
        self._sizes = msgspec.structs.replace(sizes, shm_name=f"test-{secrets.token_hex(4)}")
        self._process: subprocess.Popen[bytes] | None = None
        (directory / "models.toml").write_text(models_file(spec))

    @property
    def log(self) -> Path:
        return self._directory / "lmcache.log"

    @property
    def segment(self) -> Path:
        """Its shared memory."""
        return shared_memory(self._sizes.shm_name)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self, memory_gb: float = 0) -> None:
        """memory_gb: another size than it was made with."""
        sizes = msgspec.structs.replace(self._sizes, memory_gb=memory_gb or self._sizes.memory_gb)
        environ = os.environ | variables(self.kv) | variables(sizes)
        environ["PDQ_MODELS"] = str(self._directory / "models.toml")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command(), env=environ, stdout=log, stderr=subprocess.STDOUT)
        ready = asyncio.create_task(wait_ready(self.kv.host, self.kv.http_port, SERVER_START_S))
        try:
            while not ready.done():
                assert self._process.poll() is None, self.log.read_text()[-2_000:]
                await asyncio.wait({ready}, timeout=0.2)
            await ready
        finally:
            ready.cancel()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """As when it crashes: nothing is tidied up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(SERVER_STOP_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(SERVER_STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()
        remove_shared_memory(self._sizes.shm_name)


class Pair:
    """A prefill engine and a decode engine. They share one LMCache server and nothing else, or have one each."""

    def __init__(self, spec: ModelSpec, server: KvServer, decode_server: KvServer | None = None) -> None:
        self.spec = spec
        self.server = server
        self.kv = server.kv
        self.decode_server = decode_server or server
        cpus = sorted(os.sched_getaffinity(0))
        self.prefill = VllmEngine(spec, "prefill", engine_settings(cpus[0]), self.kv)
        self.decode = VllmEngine(spec, "decode", engine_settings(cpus[-1]), self.decode_server.kv)

    async def start(self) -> None:
        # An engine waits for its server by itself, and imports much meanwhile.
        await asyncio.gather(self.prefill.start(), *(server.start() for server in self._servers()))
        await self.decode.start()

    async def stop(self) -> None:
        await self.prefill.close()
        await self.decode.close()
        for server in self._servers():
            server.stop()

    def _servers(self) -> set[KvServer]:
        return {self.server, self.decode_server}

    async def handoff(self, work: Work) -> tuple[PrefillResult, Answer]:
        """What the two stages do for a request, without the queues between them."""
        return await self.prefill.prefill(work), await answer(self.decode, work)


class Answer(msgspec.Struct):
    """All that one decode gave."""

    deltas: list[Tokens]
    done: Done

    @property
    def ids(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[float]:
        return [entry.logprob for delta in self.deltas for entry in delta.logprobs or ()]


async def answer(engine: VllmEngine, work: Work) -> Answer:
    items = [item async for item in engine.decode(work)]
    *deltas, done = items
    assert isinstance(done, Done)
    assert all(isinstance(delta, Tokens) for delta in deltas)
    return Answer(deltas=[delta for delta in deltas if isinstance(delta, Tokens)], done=done)


def greedy(max_tokens: int = 8, **more: object) -> Sampling:
    return msgspec.convert({"max_tokens": max_tokens, "temperature": 0.0, **more}, Sampling)


def engine_settings(cpu: int) -> EngineSettings:
    return EngineSettings(
        cpus=str(cpu),
        start_timeout_s=ENGINE_START_S,
        kv_cache_bytes=KV_CACHE_BYTES,
        store_timeout_s=STORE_TIMEOUT_S,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def default_model() -> ModelSpec:
    """Its files are on this machine when this returns."""
    default = settings.load_models(Path(__file__).parents[2] / "infra/models.toml").one("")
    told = partial(print, file=sys.stderr)
    return msgspec.structs.replace(default, path=str(model.fetch(default, settings.home(), told)))


def real_stack(directory: Path, spec: ModelSpec, server: KvServer, limits: LimitSettings | None = None) -> Stack:
    """A stack whose workers have real engines, and their KV in `server`."""
    stack = Stack(
        directory,
        limits=limits,
        cluster=None,
        PDQ_ENGINE_KIND="vllm",
        PDQ_ENGINE_KV_CACHE_BYTES=str(KV_CACHE_BYTES),
        **variables(server.kv),
    )
    stack.models = [spec.slug]
    (directory / "models.toml").write_text(models_file(spec))
    return stack


def models_file(spec: ModelSpec) -> str:
    """models.toml with this one model."""
    return (
        f'[models.{spec.slug}]\nid = "{spec.id}"\npath = "{spec.path}"\n'
        f"max_model_len = {spec.max_model_len}\nvocab_size = {spec.vocab_size}\n"
        f'eos_token_ids = {list(spec.eos_token_ids)}\ndtype = "{spec.dtype}"\n'
        f"block_tokens = {spec.block_tokens}\nchunk_tokens = {spec.chunk_tokens}\n"
    )


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    """The default model, with its files on this machine."""
    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("lmcache") is None:
        missing = "vLLM and LMCache are not installed (extra `cpu`)"
        pytest.fail(missing) if "CI" in os.environ else pytest.skip(missing)
    return default_model()


@pytest.fixture(scope="session")
def tokenizer(spec: ModelSpec) -> Tokenizer:
    return Tokenizer.from_file(str(Path(spec.path) / "tokenizer.json"))


@pytest.fixture(scope="module")
def server(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvServer]:
    server = KvServer(tmp_path_factory.mktemp("lmcache"), spec)
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    """Parametrise it indirectly with a transfer mode."""
    pair = Pair(spec, KvServer(tmp_path_factory.mktemp("lmcache"), spec, transfer_mode=request.param))
    try:
        await pair.start()
        yield pair
    finally:
        await pair.stop()


@pytest.fixture
def salt() -> str:
    """A tenant of its own: what another test stored is not found."""
    return secrets.token_hex(32)
