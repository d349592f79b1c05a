"""Sealed chunks in the LMCache server: what is stored is sealed, what does not open is a miss and is removed.

LMCache's own wrapper of a tier loads all chunks of a request or none, and a tier keeps a chunk that it has: one
flipped bit would make its prompt, and every prompt that begins alike, a miss for ever.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import prometheus_client
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, SerdeProcessor, Serializer
from lmcache.v1.memory_management import MemoryObj

from pdq.kv import keys
from pdq.kv.seal import OVERHEAD_BYTES, Name, Seal, Unauthentic

LOG_EVERY_S = 10.0
MOST_NOT_TAKEN = 100_000
"""Chunks; beyond, those before are forgotten: they are waited for in vain."""

log = logging.getLogger(__name__)


def factory() -> Callable[[dict[str, object]], SealedSerde]:
    """Makes a serde of the options of `pdq.kv.serde.spec`; all count on one metric."""
    metric = prometheus_client.Counter(
        "pdq_kv_refused_chunks", "Stored chunks of KV that were not what was sealed under their name.", ["cause"]
    )
    return lambda options: SealedSerde(Seal(keys.read(str(options["key_file"]))), Refusals(metric))


def wrapped(inner: L2AdapterInterface, serde: SerdeProcessor, l1_manager: Any) -> L2AdapterInterface:
    """A tier with a serde in front of it."""
    made = SealedTier if isinstance(serde, SealedSerde) else SerdeL2AdapterWrapper
    return made(inner=inner, serde=serde, l1_manager=l1_manager)


class SealedTier(SerdeL2AdapterWrapper):  # type: ignore[misc]
    """LMCache's wrapper, in which a chunk that does not open is a miss by itself, and is removed from the tier.

    It also knows which chunks the tier did not take: nobody need wait for these.
    """

    def __init__(self, inner: L2AdapterInterface, serde: SealedSerde, l1_manager: Any) -> None:
        self._refused = serde.refuse_singly()
        self._loads: dict[int, tuple[Sequence[ObjectKey], Sequence[MemoryObj]]] = {}
        self._removing = ThreadPoolExecutor(1, "pdq-kv-remove")
        self._stores: dict[int, Sequence[ObjectKey]] = {}
        self._not_taken: set[ObjectKey] = set()
        self.num_failed = 0
        """Stores that have failed so far."""
        super().__init__(inner=inner, serde=serde, l1_manager=l1_manager)

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        self._not_taken.difference_update(keys)
        task: int = super().submit_store_task(keys, objects)
        self._stores[task] = keys
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        completed: dict[int, L2StoreResult] = super().pop_completed_store_tasks()
        for task, result in completed.items():
            keys = self._stores.pop(task, ())
            if not result.is_successful():
                self._keep_in_mind(keys)
        return completed

    def not_taken(self, keys: Sequence[ObjectKey]) -> bool:
        """Whether the last store of one of these has failed."""
        return not self._not_taken.isdisjoint(keys)

    def _keep_in_mind(self, keys: Sequence[ObjectKey]) -> None:
        self.num_failed += 1
        if len(self._not_taken) > MOST_NOT_TAKEN:
            self._not_taken.clear()
        self._not_taken.update(keys)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task: int = super().submit_load_task(keys, objects)
        self._loads[task] = keys, objects
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        loaded = super().query_load_result(task_id)
        if loaded is None:
            return None
        keys, objects = self._loads.pop(task_id)
        refused = [place for place, memory in enumerate(objects) if id(memory) in self._refused]
        self._refused.difference_update(id(objects[place]) for place in refused)
        if not refused:
            return loaded
        self._removing.submit(self.delete, [keys[place] for place in refused])
        return _without(loaded, refused)

    def close(self) -> None:
        self._removing.shutdown(wait=False, cancel_futures=True)
        super().close()


class SealedSerde(AsyncSerdeProcessor):  # type: ignore[misc]
    """Seals and opens chunks in a thread of its own.

    By itself, as LMCache's wrapper has it, one chunk that does not open fails all that are loaded with it.
    """

    def __init__(self, seal: Seal, refusals: Refusals) -> None:
        self._opener = Opener(seal, refusals)
        super().__init__(Sealer(seal), self._opener)

    def refuse_singly(self) -> set[int]:
        """From now on chunks that do not open fail none of the others: the `id` of their memory is in this set.

        Who calls this must treat them as not loaded, and take them out.
        """
        self._opener.refused = set()
        return self._opener.refused


class Sealer(Serializer):  # type: ignore[misc]
    """A chunk's KV into its frame."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        return self._seal.seal(_bytes(src), _bytes(dst), name(key))

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Exact: file tiers refuse a file that is shorter."""
        pairs = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return sum(int(shape.numel() * dtype.itemsize) for shape, dtype in pairs) + OVERHEAD_BYTES


class Opener(Deserializer):  # type: ignore[misc]
    """A frame into the chunk's KV."""

    def __init__(self, seal: Seal, refusals: Refusals) -> None:
        self.refused: set[int] | None = None
        self._seal = seal
        self._refusals = refusals

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """When it does not open, `dst` stays as it was and is refused: in the set, else by raising Unauthentic."""
        named = name(key)
        try:
            self._seal.open(_bytes(src), _bytes(dst), named)
        except Unauthentic as exc:
            self._refusals.count(exc.cause, named)
            if self.refused is None:
                raise
            self.refused.add(id(dst))


class Refusals:
    """Counts chunks that were refused, and tells the log, at most every ten seconds."""

    def __init__(self, metric: prometheus_client.Counter) -> None:
        self._metric = metric
        self._since: Counter[str] = Counter()
        self._quiet_until = 0.0

    def count(self, cause: str, named: Name) -> None:
        self._metric.labels(cause).inc()
        self._since[cause] += 1
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + LOG_EVERY_S
        counts = ", ".join(f"{cause}: {num}" for cause, num in self._since.items())
        log.warning("KV at rest refused (%s); the last one was chunk %s", counts, named.digest())
        self._since.clear()


def name(key: ObjectKey) -> Name:
    return Name(key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt)


def _without(bitmap: Bitmap, places: Sequence[int]) -> Bitmap:
    left = Bitmap(bitmap.size())
    for place in bitmap.get_indices_set() - set(places):
        left.set(place)
    return left


def _bytes(memory: MemoryObj) -> memoryview:
    """Its bytes, in the one format that slices can be assigned to."""
    return memoryview(memory.byte_array).cast("B")
