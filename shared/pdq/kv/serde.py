"""pdq's encryption of KV at rest, as a serde of the LMCache server: `{"type": "pdq", "key_file": "…"}`.

The server looks serdes up by name, so `register` runs in its process before its own main (`pdq.kv.serve`).
"""

from __future__ import annotations

TYPE = "pdq"


def spec(key_file: str) -> dict[str, object]:
    """The `serde` part of an L2 adapter's configuration."""
    return {"type": TYPE, "key_file": key_file}


def register() -> None:
    """Make the type `pdq` known to the LMCache of this process. A second call does nothing."""
    from lmcache.v1.distributed import storage_manager
    from lmcache.v1.distributed.serde import get_registered_serde_types, register_serde_factory

    from pdq.kv import sealed

    if TYPE not in get_registered_serde_types():
        register_serde_factory(TYPE, sealed.factory())
        # LMCache has no place to name another wrapper; with its own, everything here holds but the repair.
        storage_manager.SerdeL2AdapterWrapper = sealed.wrapped
