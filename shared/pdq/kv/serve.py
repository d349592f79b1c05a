"""Run one LMCache server from settings: `python -m pdq.kv.serve`.

LMCache's own server, in this process, with four things more: pdq's serde, so that what lies in a pool is
encrypted and authenticated; routes that tell which tier holds what (`pdq.kv.holdings`); its shared memory taken at
once (`pdq.kv.reserve`); and no routes that would show secrets. Settings are checked first: a bad one ends the process
before anything is allocated.

Settings: `PDQ_KV_*`, `PDQ_KV_SERVER_*`, and `PDQ_MODELS`, `PDQ_WORKER_MODEL` for the model's chunk size.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec

from pdq import settings
from pdq.addresses import is_loopback
from pdq.errors import Misconfigured, Unavailable
from pdq.kv import keys, nixl, pool, reserve, serde, server
from pdq.kv.keeper import Keeper, Redis
from pdq.kv.pool import Pool
from pdq.settings import KvServerSettings, KvSettings, TransferMode, WorkerSettings

HIDDEN_ROUTES = frozenset({"/env", "/config", "/run_script"})
"""They show the environment and the configuration, secrets included, or run what they are sent."""
START_S = 30.0
"""How long a pool may take to answer before the server gives up its start."""


def main() -> None:
    try:
        settings.check_environment()
        kv, sizes = settings.load(KvSettings), settings.load(KvServerSettings)
        spec = settings.load_models(settings.models_path()).one(settings.load(WorkerSettings).model)
        # /dev/shm outlives a container: a server that was killed has left its segment there.
        server.remove_shared_memory(sizes.shm_name)
        server.check(kv, sizes)
        store = prepared(kv)
        os.environ.update(server.environment())
        if kv.mode == "p2p" and is_loopback(kv.peer):
            # UCX, below NIXL, would else listen on the machine's networks, whatever address is advertised.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        extend(kv, sizes, store)
    except (Misconfigured, Unavailable) as exc:
        sys.exit(f"pdq: {exc}")
    from lmcache import torch_device_type
    from lmcache.cli.main import main as lmcache

    kv = msgspec.structs.replace(kv, transfer_mode=transfer_mode(kv, torch_device_type))
    lmcache(server.arguments(kv, sizes, spec.chunk_tokens, store))


def transfer_mode(kv: KvSettings, device: str) -> TransferMode:
    """`auto`, resolved where no accelerator is: engines on CPUs then drive all transfers, and a server that could drive
    them too would look each 5 ms for what it has to do. `device`: as LMCache finds it."""
    return "engine_driven" if kv.transfer_mode == "auto" and device == "cpu" else kv.transfer_mode


def prepared(kv: KvSettings) -> Pool | None:
    """The pool, ready to be opened; None when there is none. Raises Misconfigured, and Unavailable."""
    if kv.mode != "pool":
        return None
    store = pool.parse(kv, settings.aws())
    keys.read(kv.key_file)
    store.prepare()
    if redis := redis_of(store):
        asyncio.run(redis.check(START_S))
    return store


def redis_of(store: Pool | None) -> Redis | None:
    """The Redis of a pool, if it is one."""
    if store is None or store.kind != "redis":
        return None
    return Redis(store.adapter["host"], store.adapter["port"], store.credentials)


def extend(kv: KvSettings, sizes: KvServerSettings, store: Pool | None) -> None:
    """Add to LMCache, and take from it, what the module's docstring says."""
    from lmcache.v1.multiprocess.http_server import app

    from pdq.kv import holdings

    if kv.mode == "p2p":
        nixl.adapt()
    if sizes.shm_name:
        reserve.adapt(server.shared_memory(sizes.shm_name))
    quota_bytes = int(sizes.tenant_gb * (1 << 30))
    lookups = holdings.Lookups("peer" if kv.mode == "p2p" else "l2", quota_bytes)
    redis = redis_of(store)
    app.include_router(holdings.router(lookups, Keeper(redis) if redis else None))
    hide(app.router.routes)
    if store is None:
        return
    serde.register()
    if redis is not None:
        os.environ["LMCACHE_RESP_USERNAME"], os.environ["LMCACHE_RESP_PASSWORD"] = store.credentials[:2]
    elif store.kind == "s3":
        from pdq.kv import s3

        s3.adapt(store)


def hide(routes: list[Any]) -> None:
    """Take out `HIDDEN_ROUTES`."""
    routes[:] = [route for route in routes if getattr(route, "path", "") not in HIDDEN_ROUTES]


if __name__ == "__main__":
    main()
