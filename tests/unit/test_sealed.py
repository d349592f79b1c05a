"""Sealed chunks in LMCache's own parts: its first tier, its file tier and its wrapper, without server or engine."""

from __future__ import annotations

import dataclasses
import logging
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from pdq.kv import keys
from pdq.kv.seal import OVERHEAD_BYTES, Name, Seal

pytest.importorskip("lmcache")
pytestmark = pytest.mark.filterwarnings("default")

TOKENS = 64
CHUNK_BYTES = TOKENS * 4
WAIT_MS = 10_000
SECRET = bytes(range(32))


@pytest.fixture
def refused() -> prometheus_client.Counter:
    """The metric, in a registry of its own."""
    return prometheus_client.Counter("refused", "Chunks", ["cause"], registry=prometheus_client.CollectorRegistry())


class Memory:
    """A first tier of 4 MiB, and chunks in it."""

    def __init__(self) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        config = L1MemoryManagerConfig(size_in_bytes=4 << 20, use_lazy=False, shm_name="")
        self.manager = L1Manager(L1ManagerConfig(memory_config=config))
        self.layout = MemoryLayoutDesc(shapes=[torch.Size([TOKENS])], dtypes=[torch.float32])

    def chunk(self, key: Any, tag: str, fill: bytes) -> Any:
        error, memory = self.manager.reserve_write([key], [True], self.layout, tag=tag)[key]
        assert memory is not None, error
        view(memory)[:] = fill * CHUNK_BYTES
        return memory


class Files:
    """A file tier that is sealed, over one directory."""

    def __init__(
        self, memory: Memory, directory: Path, refused: prometheus_client.Counter, adapter: str, stock: bool
    ) -> None:
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
        from pdq.kv.sealed import Refusals, SealedSerde, wrapped

        self.memory = memory
        self.directory = directory
        self.stock = stock
        serde = SealedSerde(Seal(SECRET), Refusals(refused))
        config = get_l2_adapter_config_class(adapter).from_dict({"base_path": str(directory)})
        inner = create_l2_adapter(config)
        self.tier = (SerdeL2AdapterWrapper if stock else wrapped)(inner, serde, memory.manager)

    def store(self, chunks: dict[Any, bytes], taken: bool = True) -> None:
        objects = [self.memory.chunk(key, "store", fill) for key, fill in chunks.items()]
        task = self.tier.submit_store_task(list(chunks), objects)
        wait(self.tier.get_store_event_fd())
        assert self.tier.pop_completed_store_tasks()[task].is_successful() == taken
        self.memory.manager.finish_write_and_delete(list(chunks), tag="store")

    def load(self, names: list[Any]) -> list[bytes | None]:
        """Each chunk's bytes; None for a miss, whose memory is as it was (not with LMCache's own wrapper)."""
        objects = [self.memory.chunk(key, "load", b"\xee") for key in names]
        task = self.tier.submit_load_task(names, objects)
        wait(self.tier.get_load_event_fd())
        hits = self.tier.query_load_result(task).get_indices_set()
        found = [bytes(view(memory)) for memory in objects]
        self.memory.manager.finish_write_and_delete(names, tag="load")
        assert self.stock or all(place in hits or found[place] == b"\xee" * CHUNK_BYTES for place in range(len(names)))
        return [found[place] if place in hits else None for place in range(len(names))]

    def path(self, key: Any) -> Path:
        [path] = self.directory.glob(f"*{key.chunk_hash.hex()}@{key.cache_salt}.data")
        return path

    def removed(self) -> None:
        """Wait until what was refused is removed."""
        self.tier._removing.submit(lambda: None).result(WAIT_MS / 1000)


def view(memory: Any) -> memoryview:
    return memoryview(memory.byte_array).cast("B")


def wait(fd: int) -> None:
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(WAIT_MS), "not done in time"
    consume_fd(fd)


def key(number: int, salt: str = "aa") -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=bytes([number]) * 32, model_name="org/name", kv_rank=1, cache_salt=salt)


def flip(path: Path, place: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    assert memory.manager.get_memory_usage()[0] == 0, "memory is left behind"
    memory.manager.close()


@pytest.fixture(params=[("fs", False), ("fs_native", False)])
def files(
    memory: Memory, tmp_path: Path, refused: prometheus_client.Counter, request: pytest.FixtureRequest
) -> Iterator[Files]:
    adapter, stock = request.param
    files = Files(memory, tmp_path, refused, adapter, stock)
    yield files
    files.tier.close()


CHUNKS = {number: bytes([number]) for number in range(1, 6)}


def stored(files: Files) -> list[Any]:
    chunks = {key(number): fill for number, fill in CHUNKS.items()}
    files.store(chunks)
    return list(chunks)


def whole(numbers: Any = CHUNKS) -> list[bytes]:
    return [CHUNKS[number] * CHUNK_BYTES for number in numbers]


@pytest.mark.parametrize("files", [("fs_native", False), ("fs_native", True)], indirect=True)
def test_what_is_stored_is_sealed_and_comes_back(files: Files) -> None:
    names = stored(files)
    assert files.load(names) == whole()
    for name in names:
        data = files.path(name).read_bytes()
        assert len(data) == CHUNK_BYTES + OVERHEAD_BYTES
        assert name.chunk_hash[:1] * 4 not in data


def test_a_flipped_bit_is_a_miss_of_that_chunk_alone_and_is_stored_again(
    files: Files, refused: prometheus_client.Counter
) -> None:
    names = stored(files)
    flip(files.path(names[2]))
    assert files.load(names) == [*whole([1, 2]), None, *whole([4, 5])]
    assert refused.labels("tag")._value.get() == 1
    files.removed()
    assert len(list(files.directory.glob("*.data"))) == len(names) - 1
    files.store({names[2]: CHUNKS[3]})
    assert files.load(names) == whole()


@pytest.mark.parametrize("files", [("fs", True), ("fs_native", True)], indirect=True)
def test_with_lmcaches_own_wrapper_a_flipped_bit_is_a_miss_of_all(files: Files) -> None:
    names = stored(files)
    flip(files.path(names[2]))
    assert files.load(names) == [None] * 5
    assert files.load(names[:2]) == whole([1, 2])


def test_chunks_swapped_or_put_under_another_name_are_misses(files: Files) -> None:
    names = stored(files)
    one, other = files.path(names[0]), files.path(names[1])
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    assert files.load(names) == [None, None, *whole([3, 4, 5])]
    foreign = key(3, salt="bb")
    files.store({foreign: b"\xbb"})
    files.path(names[2]).write_bytes(files.path(foreign).read_bytes())
    assert files.load([names[2], foreign]) == [None, b"\xbb" * CHUNK_BYTES]


def test_a_truncated_file_is_a_miss_of_that_chunk(files: Files) -> None:
    names = stored(files)
    path = files.path(names[1])
    path.write_bytes(path.read_bytes()[:-1])
    files.path(names[3]).write_bytes(b"")
    assert files.load(names) == [*whole([1]), None, *whole([3]), None, *whole([5])]


def test_what_follows_a_frame_does_not_matter(files: Files) -> None:
    names = stored(files)
    with files.path(names[0]).open("ab") as file:
        file.write(b"more")
    assert files.load(names) == whole()


def test_what_the_tier_does_not_take_is_known_until_it_does(files: Files, tmp_path: Path) -> None:
    away = files.directory.rename(tmp_path.with_name("away"))
    files.directory.write_bytes(b"no directory")
    files.store({key(1): b"1", key(2): b"2"}, taken=False)
    assert files.tier.not_taken([key(3), key(2)])
    assert not files.tier.not_taken([key(3)])
    files.directory.unlink()
    away.rename(files.directory)
    files.store({key(2): b"2"})
    assert not files.tier.not_taken([key(2), key(3)])
    assert files.tier.not_taken([key(1)])


def test_refusals_are_counted_and_told_at_intervals_without_names(
    files: Files, refused: prometheus_client.Counter, caplog: pytest.LogCaptureFixture
) -> None:
    names = stored(files)
    for name in names:
        flip(files.path(name), 3 if name is names[4] else 100)
    with caplog.at_level(logging.WARNING, "pdq.kv.sealed"):
        assert files.load(names) == [None] * 5
    assert [refused.labels(cause)._value.get() for cause in ("tag", "version")] == [4, 1]
    [line] = [record.getMessage() for record in caplog.records if record.name == "pdq.kv.sealed"]
    assert "tag: 1" in line
    assert names[0].chunk_hash.hex() not in line


def test_a_name_has_every_field_of_lmcaches_own() -> None:
    """A field that a later LMCache adds must be bound too."""
    from lmcache.v1.distributed.api import ObjectKey

    assert {field.name for field in dataclasses.fields(ObjectKey)} == set(Name._fields)


def test_the_server_makes_it_by_name(tmp_path: Path, memory: Memory) -> None:
    from lmcache.v1.distributed import storage_manager
    from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
    from pdq.kv import serde
    from pdq.kv.sealed import SealedSerde, wrapped

    serde.register()
    serde.register()
    options = serde.spec(str(keys.ensure(tmp_path / "key")))
    made = create_serde_processor(SerdeConfig(type=str(options.pop("type")), kwargs=options))
    assert isinstance(made, SealedSerde)
    assert made.estimate_serialized_size(memory.layout) == CHUNK_BYTES + OVERHEAD_BYTES
    assert storage_manager.SerdeL2AdapterWrapper is wrapped
    made.close()
