"""What an LMCache server holds, and where a load came from: routes that `pdq.kv.serve` adds to the server's own.

LMCache's HTTP port tells neither which tier holds a chunk nor which tier a lookup was served from.

    POST /pdq/where           {model, world_size, salt, tokens} → Where
    GET  /pdq/lookups/ID      → Served, of one of the last LOOKUPS lookups; ID is the engine's own name of a request
    GET  /pdq/tiers           → Tiers: sizes, tenants, hit counts

All are read-only, and as bounded as the tiers themselves: one that does not answer counts as empty.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from lmcache.v1.distributed.api import PrefetchLockMode, PrefetchTaskSpec
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventCallback, EventSubscriber, get_event_bus
from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_grouped_object_keys

from pdq.kv.keeper import Keeper
from pdq.kv.sealed import SealedTier
from pdq.kv.where import MAX_TENANTS, Level, Question, Served, Tenant, TierName, Tiers, Where

LOOKUPS = 4_096
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.05
TIER_TIMEOUT_S = 2.0
LATE_S = 60.0
"""A tier that answers later than TIER_TIMEOUT_S is waited for so long, to give back the locks that it took."""

_question = msgspec.json.Decoder(Question)
_encoder = msgspec.json.Encoder()


class Lookups(EventSubscriber):  # type: ignore[misc]
    """Remembers which tier the last lookups were served from, and gives tenants that it sees their quota."""

    def __init__(self, far: TierName, quota_bytes: int = 0) -> None:
        """far: the name of what lies below the first tier. quota_bytes: of each tenant in it; 0: none."""
        self._far = far
        self._quota_bytes = quota_bytes
        self._served: OrderedDict[str, Served] = OrderedDict()
        self._quotas: Any = None
        self.asked_tokens = self.near_tokens = self.far_tokens = 0
        """Since the server's start."""

    def attach(self, quotas: Any) -> None:
        """Begin to listen; `quotas` is the server's registry of them."""
        self._quotas = quotas
        get_event_bus().register_subscriber(self)

    def get_subscriptions(self) -> dict[EventType, EventCallback]:
        return {EventType.MP_LOOKUP_PREFETCH_END: self._looked_up}

    def get(self, request: str) -> Served | None:
        return self._served.get(request)

    def _looked_up(self, event: Event) -> None:
        seen = event.metadata
        self._served[event.session_id] = Served(
            near_tokens=seen["l1_hit_tokens"], far_tokens=seen["l2_hit_tokens"], far=self._far
        )
        self.asked_tokens += seen["requested_tokens"]
        self.near_tokens += seen["l1_hit_tokens"]
        self.far_tokens += seen["l2_hit_tokens"]
        while len(self._served) > LOOKUPS:
            self._served.popitem(last=False)
        if self._quota_bytes and not self._quotas.has_quota(seen["cache_salt"]):
            # A salt without a quota would lose all that it has in the pool.
            self._quotas.set_quota(seen["cache_salt"], self._quota_bytes)


def router(lookups: Lookups, keeper: Keeper | None = None) -> APIRouter:
    """The routes; `lookups` listens, and `keeper` watches the pool, from the server's start to its end."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        storage = app.state.engine.storage_manager
        lookups.attach(storage.quota_manager)
        keeping = asyncio.create_task(keeper.run(storage)) if keeper else None
        yield
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})

    routes = APIRouter(lifespan=lifespan)

    async def where(request: Request) -> Response:
        engine = request.app.state.engine
        try:
            question = _question.decode(await request.body())
            groups = _groups(engine.context, question)
        except (msgspec.MsgspecError, ValueError) as exc:
            return Response(str(exc), status_code=400)
        return _json(await _where(engine.storage_manager, groups))

    async def served(request: Request) -> Response:
        found = lookups.get(request.path_params["request_id"])
        return Response(status_code=404) if found is None else _json(found)

    async def tiers(request: Request) -> Response:
        return _json(_tiers(request.app.state.engine.storage_manager, lookups))

    routes.add_route("/pdq/tiers", tiers, methods=["GET"])
    routes.add_route("/pdq/where", where, methods=["POST"])
    routes.add_route("/pdq/lookups/{request_id}", served, methods=["GET"])
    return routes


def _json(answer: Where | Served | Tiers) -> Response:
    return Response(_encoder.encode(answer), media_type="application/json")


def _groups(context: Any, question: Question) -> list[Any]:
    """The keys of the question's whole chunks, a row for each group of objects and rank. Raises ValueError."""
    registry, model = context.layout_desc_registry, (question.model, question.world_size)
    layouts = registry.find_group_layout_descs(*model)
    if not layouts:
        raise ValueError(f"no engine of model {question.model!r} has registered here")
    rows, _ = resolve_grouped_object_keys(
        context.token_hasher,
        *model,
        question.tokens,
        question.salt,
        layouts,
        registry.find_attn_desc(*model),
    )
    found: list[Any] = rows
    return found


async def _where(storage: Any, groups: list[Any]) -> Where:
    if not groups:
        return Where(chunks=0, near=0, far=None)
    keys = [key for group in groups for key in group.keys]
    # Peers are asked by one thread of LMCache's own, and hold nothing for this server.
    shared = [adapter for about, adapter in storage.l2_adapters() if about.type_name != "p2p"]
    layouts = {group.object_group_id: group.layout_desc for group in groups}
    far = await asyncio.gather(*(_far(adapter, keys, layouts, len(groups)) for adapter in shared))
    return Where(
        chunks=len(groups[0].keys),
        near=_near(storage, groups),
        far=max(far) if far else None,
        not_taken=any(adapter.not_taken(keys) for adapter in shared if isinstance(adapter, SealedTier)),
    )


def _near(storage: Any, groups: list[Any]) -> int:
    """Leading chunks that the first tier holds whole."""
    spec = PrefetchTaskSpec(key_groups=groups, lock_mode=PrefetchLockMode.NO_LOCK)
    result = storage.query_prefetch_status(storage.submit_prefetch_task(spec, skip_l2=True))
    return min(_leading(row, len(groups[0].keys)) for row in result.hit_cells) if result.hit_cells else 0


async def _far(adapter: Any, keys: list[Any], layouts: dict[int, Any], num_rows: int) -> int:
    """Leading chunks that a lower tier holds whole; 0 when it does not answer in time."""
    asking = asyncio.create_task(_ask(adapter, keys, layouts, num_rows))
    try:
        async with asyncio.timeout(TIER_TIMEOUT_S):
            return await asyncio.shield(asking)
    except TimeoutError:
        return 0


async def _ask(adapter: Any, keys: list[Any], layouts: dict[int, Any], num_rows: int) -> int:
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    give_up, pause_s = time.monotonic() + LATE_S, FIRST_POLL_S
    while (held := adapter.query_lookup_and_lock_result(task)) is None:
        if time.monotonic() > give_up:
            return 0
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_POLL_S)
    adapter.submit_unlock([key for index, key in enumerate(keys) if held.test(index)])
    chunks = len(keys) // num_rows
    return min(_leading(held, chunks, row * chunks) for row in range(num_rows))


def _tiers(storage: Any, lookups: Lookups) -> Tiers:
    used, capacity = storage.get_l1_usage()
    memory = Level(tier="l1", kind="memory", healthy=True, used_bytes=used, capacity_bytes=capacity)
    by_salt = sorted(storage.get_usage_bytes_by_cache_salt().items(), key=lambda item: -item[1])
    return Tiers(
        levels=[memory, *(_level(about.type_name, adapter) for about, adapter in storage.l2_adapters())],
        tenants=[_tenant(storage.quota_manager, salt, size) for salt, size in by_salt[:MAX_TENANTS]],
        asked_tokens=lookups.asked_tokens,
        near_tokens=lookups.near_tokens,
        far_tokens=lookups.far_tokens,
    )


def _level(kind: str, adapter: Any) -> Level:
    usage = adapter.get_usage()
    return Level(
        tier="peer" if kind == "p2p" else "l2",
        kind=kind,
        healthy=bool(adapter.report_status()["is_healthy"]),
        used_bytes=usage.total_bytes_used,
        capacity_bytes=usage.total_capacity_bytes,
    )


def _tenant(quotas: Any, salt: str, size: int) -> Tenant:
    return Tenant(
        salt=salt, used_bytes=size, quota_bytes=quotas.get_limit_bytes(salt) if quotas.has_quota(salt) else None
    )


def _leading(bits: Any, num: int, first: int = 0) -> int:
    """How many of `num` bits from `first` on are set before one is not."""
    return next((index for index in range(num) if not bits.test(first + index)), num)
