"""pdq's encryption of KV at rest, as a serde of the LMCache server: `{"type": "pdq", "key_file": "…"}`.

The server looks serdes up by name, so `register` runs in its process before its own main (`pdq.kv.serve`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from pdq.kv import keys
from pdq.kv.seal import OVERHEAD_BYTES, Name, Seal, Unauthentic

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.serde import SerdeProcessor
    from lmcache.v1.memory_management import MemoryObj

TYPE = "pdq"
LOG_EVERY_S = 10.0

log = logging.getLogger(__name__)


def spec(key_file: str) -> dict[str, object]:
    """The `serde` part of an L2 adapter's configuration."""
    return {"type": TYPE, "key_file": key_file}


def register() -> None:
    """Make the type `pdq` known to the LMCache of this process. A second call does nothing."""
    from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory

    if TYPE not in get_registered_serde_types():
        register_serde_factory(TYPE, create)


def create(options: dict[str, object]) -> SerdeProcessor:
    """A serde of `spec`'s options. Raises Misconfigured when its key file is missing or too short."""
    from lmcache.v1.distributed.serde import AsyncSerdeProcessor

    seal = Seal(keys.read(str(options["key_file"])))
    return AsyncSerdeProcessor(Serializer(seal), Deserializer(seal))


class Serializer:
    """LMCache's Serializer: a chunk's KV into its frame."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        return self._seal.seal(_bytes(src), _bytes(dst), name(key))

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Exact: file tiers refuse a file that is not as long as this."""
        pairs = zip(layout_desc.shapes, layout_desc.dtypes, strict=True)
        return sum(int(shape.numel() * dtype.itemsize) for shape, dtype in pairs) + OVERHEAD_BYTES


class Deserializer:
    """LMCache's Deserializer: a frame into the chunk's KV."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._refusals = Refusals()

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Raises Unauthentic, which the server takes for a miss; then `dst` is as it was."""
        named = name(key)
        try:
            self._seal.open(_bytes(src), _bytes(dst), named)
        except Unauthentic as exc:
            self._refusals.count(exc.cause, named)
            raise


class Refusals:
    """Counts stored chunks that were refused, and says so in the log, at most every ten seconds."""

    def __init__(self) -> None:
        self._since: Counter[str] = Counter()
        self._quiet_until = 0.0

    def count(self, cause: str, named: Name) -> None:
        self._since[cause] += 1
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + LOG_EVERY_S
        counts = ", ".join(f"{num} {cause}" for cause, num in self._since.items())
        log.warning("KV at rest refused (%s); the last one is chunk %s", counts, named.digest())
        self._since.clear()


def name(key: ObjectKey) -> Name:
    return Name(key.model_name, key.kv_rank, key.object_group_id, key.chunk_hash, key.cache_salt)


def _bytes(memory: MemoryObj) -> memoryview:
    """Its bytes, in the one format that slices can be assigned to."""
    return memoryview(memory.byte_array).cast("B")
