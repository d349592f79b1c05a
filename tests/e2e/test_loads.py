"""KV that is loaded in parts, through LMCache's own adapters and a real server; no engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import zmq
from pdq.engines import loads
from pdq.engines.loads import PacedLoads, parts
from pdq.settings import ModelSpec

from tests.e2e.conftest import KvServer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("default"),
]

BLOCK_TOKENS = 16
PROMPT_TOKENS = 1024
NUM_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
ONE = {"mla_only": False, "vllm_world_size": 1, "vllm_worker_id": 0, "tp_size": 1, "pp_size": 1, "n_servers": 1}
BOUND_S = 30.0


class Loader:
    """What an engine has of LMCache: adapters beside its scheduler and its worker, and blocks of KV."""

    def __init__(self, server: KvServer) -> None:
        from lmcache.integration.vllm import vllm_multi_process_adapter as lmcache

        one = lmcache.ParallelStrategy(**ONE)
        self._context = zmq.Context()
        # What was said to a server that is dead is not waited for.
        self._context.linger = 0
        url = f"tcp://{server.kv.host}:{server.kv.port}"
        options: dict[str, Any] = {"lmcache.mp.mq_timeout": 3.0, "lmcache.mp.heartbeat_interval": 1.0}
        self.scheduler = lmcache.LMCacheMPSchedulerAdapter(
            [url], self._context, "m", BLOCK_TOKENS, one, extra_config=options
        )
        options["lmcache.mp.mp_transfer_mode"] = "engine_driven"
        self.worker = lmcache.LMCacheMPWorkerAdapter(url, self._context, "m", BLOCK_TOKENS, one, extra_config=options)
        self.kv = {f"layer.{number}": torch.zeros(2, 2 * NUM_BLOCKS, BLOCK_TOKENS, 1, 8) for number in range(2)}
        self.worker.register_kv_caches(self.kv, layout_hints={"kv_layout": "NHD"})

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        self._context.destroy(linger=0)

    def store(self, prompt: list[int]) -> None:
        """Random KV in the first blocks, and in the server."""
        for layer in self.kv.values():
            layer[:, :NUM_BLOCKS] = torch.rand(2, NUM_BLOCKS, BLOCK_TOKENS, 1, 8)
        self.worker.submit_store_request("stored", op(prompt, 0), None)
        wait(lambda: "stored" not in self.worker.store_futures, lambda: self.worker.get_finished({"stored"}))

    def look_up(self, request: str, prompt: list[int]) -> int:
        self.scheduler.maybe_submit_lookup_request(request, prompt)
        found: list[int] = []
        wait(lambda: bool(found), lambda: found.extend(filter(None, [self.scheduler.check_lookup_result(request)])))
        return found[0]

    def loaded(self) -> bool:
        """Whether the second half of the blocks has what the first half has."""
        return all(torch.equal(layer[:, NUM_BLOCKS:], layer[:, :NUM_BLOCKS]) for layer in self.kv.values())


def wait(done: Any, again: Any) -> None:
    end = time.monotonic() + BOUND_S
    while not done():
        assert time.monotonic() < end
        again()
        time.sleep(0.01)


def op(prompt: list[int], first_block: int, **more: Any) -> Any:
    from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

    blocks = list(range(first_block, first_block + NUM_BLOCKS))
    return LoadStoreOp(token_ids=prompt, block_ids=[blocks], start=0, end=PROMPT_TOKENS, **more)


def retrieve(request: str, prompt: list[int]) -> Any:
    from lmcache.integration.vllm.lmcache_mp_metadata import LMCacheMPRequestMetadata

    return LMCacheMPRequestMetadata(request, "RETRIEVE", op(prompt, NUM_BLOCKS))


@pytest_asyncio.fixture
async def server(spec: ModelSpec, tmp_path: Path) -> AsyncIterator[KvServer]:
    server = KvServer(tmp_path / "lmcache", spec, transfer_mode="engine_driven")
    try:
        await server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def loader(server: KvServer) -> Iterator[Loader]:
    loader = Loader(server)
    try:
        yield loader
    finally:
        loader.close()


@pytest.fixture(autouse=True)
def a_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step has time for a second part."""
    monkeypatch.setattr(loads, "SHARE", 0.0)
    monkeypatch.setattr(loads, "LEAST_S", 0.0)


def test_parts_cover_all_blocks_and_skip_once() -> None:
    whole = op(list(range(PROMPT_TOKENS)), 100, skip_first_n_tokens=16)
    found = list(parts(whole, 320))
    assert [(part.start, part.end, part.skip_first_n_tokens) for part in found] == [
        (0, 320, 16),
        (320, 640, 0),
        (640, 960, 0),
        (960, 1024, 0),
    ]
    assert [part.block_ids for part in found] == [
        [list(range(100, 120))],
        [list(range(120, 140))],
        [list(range(140, 160))],
        [list(range(160, 164))],
    ]


async def test_a_prompt_is_loaded_with_its_last_part(loader: Loader) -> None:
    prompt = [secrets.randbelow(40_000) for _ in range(PROMPT_TOKENS)]
    loader.store(prompt)
    assert loader.look_up("r", prompt) == PROMPT_TOKENS
    paced = PacedLoads(loader.worker)
    num_parts = PROMPT_TOKENS // loads.PART_TOKENS
    for step in range(num_parts):
        assert not loader.loaded()
        paced.go_on([] if step else [retrieve("r", prompt)])
        _, received = loader.worker.get_finished(set())
        assert received == ({"r"} if step == num_parts - 1 else set())
    assert loader.loaded()
    assert loader.worker.get_block_ids_with_load_errors() == set()


async def test_when_the_server_dies_between_parts_all_is_computed_and_nobody_waits(
    server: KvServer, loader: Loader
) -> None:
    prompt = [secrets.randbelow(40_000) for _ in range(PROMPT_TOKENS)]
    loader.store(prompt)
    assert loader.look_up("r", prompt) == PROMPT_TOKENS
    paced = PacedLoads(loader.worker)
    paced.go_on([retrieve("r", prompt)])
    assert loader.worker.get_finished(set()) == (set(), set())
    server.kill()
    received: set[str] = set()

    def step() -> None:
        paced.go_on([])
        received.update(loader.worker.get_finished(set())[1] or ())

    wait(lambda: bool(received), step)
    assert received == {"r"}
    assert loader.worker.get_block_ids_with_load_errors() == set(range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    step()
    assert received == {"r"}
