"""A real Redis under LMCache's own storage manager: it dies, hangs and comes back; without an engine."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from pdq.errors import Misconfigured, Unavailable
from pdq.kv import pool, serde, serve
from pdq.kv.keeper import Keeper, Redis
from pdq.settings import KvSettings

from tests.e2e.stores import Shared, redis_say, shared

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.filterwarnings("default")]

BOUND_S = 20.0


def key(number: int = 1) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=bytes([number]) * 32, model_name="m", kv_rank=1, object_group_id=0, cache_salt="ab")


class Kept:
    """A storage manager, its Redis, and the task that keeps the two together."""

    def __init__(self, store: Shared, redis: Redis, storage: Any) -> None:
        assert store.process is not None
        self.process, self.redis, self.storage = store.process, redis, storage

    async def finds(self) -> list[bool | None]:
        """Whether each adapter finds the one key that there is; None for one that does not answer."""
        return [await self._finds(adapter) for _, adapter in self.storage.l2_adapters()]

    async def _finds(self, adapter: Any) -> bool | None:
        task = adapter.submit_lookup_and_lock_task([key()], {})
        for _ in range(100):
            if (found := adapter.query_lookup_and_lock_result(task)) is not None:
                return bool(found.test(0))
            await asyncio.sleep(0.01)
        return None

    async def stores(self) -> bool:
        """Whether chunks are taken: one at least over each connection."""
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        ((_, adapter),) = self.storage.l2_adapters()
        memory, layout = self.storage._l1_manager, MemoryLayoutDesc(shapes=[torch.Size([64])], dtypes=[torch.float32])
        keys = [key(number) for number in range(1, 4 * pool.WORKERS)]
        reserved = memory.reserve_write(keys, [True] * len(keys), layout, tag="test")
        before = adapter.num_failed
        task = adapter.submit_store_task(keys, [reserved[each][1] for each in keys])
        try:
            async with asyncio.timeout(1.0):
                # LMCache's own controller takes the results; whose store it was it does not know.
                while task in adapter._stores:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False  # it was taken away meanwhile
        finally:
            memory.finish_write_and_delete(keys, tag="test")
        return bool(adapter.num_failed == before)

    def put(self) -> None:
        redis_say(self.redis.port, f"SET m@00000001@0@{'01' * 32}@ab x")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kept]:
    from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
    from lmcache.v1.distributed.storage_manager import StorageManager

    with shared("redis", tmp_path) as store:
        parsed = pool.parse(msgspec.convert(store.settings, KvSettings), {})
        redis = serve.redis_of(parsed)
        assert redis is not None
        monkeypatch.setenv("LMCACHE_RESP_PASSWORD", parsed.credentials.password)
        serde.register()
        adapter = parsed.adapter | {"serde": serde.spec(store.settings["key_file"])}
        line = ["--l1-size-gb", "0.05", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
        parser = argparse.ArgumentParser()
        add_storage_manager_args(parser)
        storage = StorageManager(parse_args_to_config(parser.parse_args(line)))
        task = asyncio.create_task(Keeper(redis).run(storage))
        try:
            found = Kept(store, redis, storage)
            # It connects anew at the first time, too: the second adapter is there.
            await found.until(lambda: [about.index for about, _ in storage.l2_adapters()] == [1])
            yield found
        finally:
            task.cancel()
            await asyncio.to_thread(storage.close)


async def test_a_redis_that_dies_is_left_out_and_is_used_again_when_it_is_back(kept: Kept) -> None:
    kept.put()
    assert await kept.finds() == [True]
    kept.process.kill()
    await kept.until(lambda: not kept.storage.l2_adapters())
    await asyncio.to_thread(kept.process.start)
    kept.put()
    await kept.until(lambda: bool(kept.storage.l2_adapters()))
    assert await kept.finds() == [True]


async def test_a_redis_that_hangs_is_left_out_until_it_answers(kept: Kept) -> None:
    kept.put()
    kept.process.signal(signal.SIGSTOP)
    try:
        assert await kept.finds() == [None]
        await kept.until(lambda: not kept.storage.l2_adapters())
    finally:
        kept.process.signal(signal.SIGCONT)
    await kept.until(lambda: bool(kept.storage.l2_adapters()))
    assert await kept.finds() == [True]


async def test_a_redis_that_was_full_is_used_again_once_it_has_room(kept: Kept) -> None:
    """To a client that it has told so once, Redis seems full for ever."""
    assert await kept.stores()
    redis_say(kept.redis.port, "CONFIG SET maxmemory 1")
    assert not await kept.stores()
    redis_say(kept.redis.port, "CONFIG SET maxmemory 0")
    assert not await kept.stores()
    async with asyncio.timeout(BOUND_S):
        while not (kept.storage.l2_adapters() and await kept.stores()):
            await asyncio.sleep(0.2)


async def test_a_wrong_password_and_no_redis_are_told_apart(kept: Kept) -> None:
    wrong = kept.redis._replace(credentials=kept.redis.credentials._replace(password="wrong"))
    with pytest.raises(Misconfigured, match="PDQ_KV_POOL_USER"):
        await wrong.check(BOUND_S)
    kept.process.kill()
    with pytest.raises(Unavailable, match=str(kept.redis.port)):
        await kept.redis.check(0.5)
