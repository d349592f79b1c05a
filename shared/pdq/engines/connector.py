"""LMCache's connector, measured and guarded. Loaded by vLLM inside the engine's processes.

It writes no transfer of its own. It tells the engine's front (pdq.engines.reports) what was found, loaded and
stored for each request, going by the transfers' own results, and it turns an error of a transfer into a miss:
a server that hangs or dies must never take the engine with it.

vLLM makes one instance beside the scheduler and one beside each model worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.utils import init_logger
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pdq.engines.lifeline import follow
from pdq.engines.loads import PacedLoads, tell_failed
from pdq.engines.reports import Loaded, Looked, Reporter, Stored

REPORTS = "pdq.reports"
"""Extra configuration: path of the front's socket; the core ends when the front is gone."""
MODEL = "pdq.model"
"""Extra configuration: the model's name in the tier. A path would differ between machines."""
LOOKUP_TIMEOUT = "pdq.lookup_timeout"
"""Extra configuration: seconds that a prompt waits for its lookup. The server answers that it is still busy, as
long as a lower tier does not answer it."""

ENGINE_SUFFIX = len("-12345678")
ANSWER_WAIT_NS = 10_000_000
"""A scheduler asks once in each step whether a lookup has ended, and LMCache's takes two such questions: two steps of
prefill are seconds. So the first of them waits as long for the answer, which mostly comes within some milliseconds."""
ANSWER_POLL_S = 0.0005

log = init_logger(__name__)


class Store(NamedTuple):
    request: str
    first: int
    end: int
    future: Any
    start_ns: int


def run_of(request_id: str) -> str:
    """The front's name of a request: vLLM appends eight random digits to it."""
    return request_id[:-ENGINE_SUFFIX]


class PdqConnector(LMCacheMPConnector):  # type: ignore[misc]
    """See the module. Configured by vLLM's `kv_connector_extra_config`: `lmcache.mp.*` and the three above."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._reporter = Reporter(extra[REPORTS])
        if role == KVConnectorRole.SCHEDULER:
            follow(extra[REPORTS])
            self.scheduler_adapter.model_name = extra[MODEL]
        else:
            self.worker_adapter.model_name = extra[MODEL]
        self._lookup_timeout_ns = int(extra[LOOKUP_TIMEOUT] * 1e9)
        self._lookups: dict[str, int] = {}
        self._looked: dict[str, Looked] = {}
        self._loads: dict[str, int] = {}
        self._paced: PacedLoads | None = None
        self._stores: list[Store] = []

    # beside the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        started = self._lookups.setdefault(request.request_id, time.time_ns())
        found, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        while found is None and time.time_ns() - started < ANSWER_WAIT_NS:
            time.sleep(ANSWER_POLL_S)
            found, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None and time.time_ns() - started > self._lookup_timeout_ns:
            log.warning("the KV tiers did not answer in time; the prompt is computed")
            self.scheduler_adapter._finished_lookup_results[request.request_id] = 0
            found, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is not None:
            self._report_lookup(request.request_id, num_computed_tokens, found, started)
        return found, asynchronous

    def _report_lookup(self, request_id: str, local: int, external: int, started: int) -> None:
        tier = self.request_trackers[request_id].num_lmcache_hit_tokens
        before = self._looked.get(request_id)
        if before and (before.local_tokens, before.tier_tokens, before.external_tokens) == (local, tier, external):
            return  # the scheduler asks again while it has no room for the request
        looked = Looked(
            run=run_of(request_id),
            request=request_id,
            local_tokens=local,
            tier_tokens=tier,
            external_tokens=external,
            start_ns=started,
            end_ns=time.time_ns(),
        )
        self._looked[request_id] = looked
        self._reporter.send(looked)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._lookups.pop(request.request_id, None)
        self._looked.pop(request.request_id, None)
        result: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return result

    # beside a model worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if isinstance(self.worker_adapter.transfer_ctx, EngineDrivenTransferContext):
            self._paced = PacedLoads(self.worker_adapter)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self._transfers("RETRIEVE")
        self._loads.update((meta.request_id, time.time_ns()) for meta in loads)
        try:
            if self._paced:
                self._paced.go_on(loads)
            else:
                super().start_load_kv(forward_context, **kwargs)
        except Exception:
            log.exception("loading KV failed; the prompts are computed")
            self._fail_loads(loads)

    def wait_for_save(self) -> None:
        stores, started = self._transfers("STORE"), time.time_ns()
        before = dict(self.worker_adapter.store_futures)
        try:
            super().wait_for_save()
        except Exception:
            log.exception("storing KV failed; the server counts as down until it answers again")
            self._mark_down()
        for meta in stores:
            # The adapter keeps the newest future of a request only: one that was there before is an earlier store's.
            future = self.worker_adapter.store_futures.get(meta.request_id)
            future = None if future is before.get(meta.request_id) else future
            self._stores.append(Store(meta.request_id, meta.op.start, meta.op.end, future, started))
        self._settle_stores()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._settle_stores()
        self._defuse()
        sent, received = super().get_finished(finished_req_ids)
        self._report_loads(received or ())
        return sent, received

    def shutdown(self) -> None:
        self._reporter.close()
        super().shutdown()

    def _transfers(self, direction: str) -> list[Any]:
        return [meta for meta in self._get_connector_metadata().requests if meta.direction == direction]

    def _settle_stores(self) -> None:
        """Report the stores whose result is known; what is open when the server is down has failed."""
        open_stores, healthy = [], self.worker_adapter.is_healthy
        for store in self._stores:
            ok = _result(store.future)
            if ok is None and healthy:
                open_stores.append(store)
            else:
                self._report_store(store, bool(ok))
        self._stores = open_stores

    def _report_store(self, store: Store, ok: bool) -> None:
        self._reporter.send(
            Stored(
                run=run_of(store.request),
                first=store.first,
                end=store.end,
                ok=ok,
                start_ns=store.start_ns,
                end_ns=time.time_ns(),
            )
        )

    def _report_loads(self, request_ids: Iterable[str]) -> None:
        failed = self.worker_adapter._failed_request_ids
        for request_id in request_ids:
            started = self._loads.pop(request_id, None)
            if started is not None:
                ok = request_id not in failed
                self._reporter.send(Loaded(run=run_of(request_id), ok=ok, start_ns=started, end_ns=time.time_ns()))

    def _fail_loads(self, loads: list[Any]) -> None:
        """Hand the blocks of loads that were never submitted back to vLLM, which computes them."""
        self._mark_down()
        if self._paced:
            self._paced.fail()
            return
        for meta in loads:
            if meta.request_id not in self.worker_adapter.retrieve_futures:
                tell_failed(self.worker_adapter, meta.request_id, meta.op.flat_block_ids)

    def _defuse(self) -> None:
        """A future that raises would kill the engine core in the adapter's own poll: it becomes a plain failure."""
        adapter = self.worker_adapter
        for request_id, future in adapter.store_futures.items():
            if _raises(future):
                adapter.store_futures[request_id] = _failed()
        for request_id, (future, blocks) in adapter.retrieve_futures.items():
            if _raises(future):
                adapter.retrieve_futures[request_id] = (_failed(), blocks)

    def _mark_down(self) -> None:
        """The heartbeat registers again and lifts this when the server answers its next ping."""
        self.worker_adapter._health_event.clear()


def _result(future: Any) -> bool | None:
    """True: done; False: failed, or never submitted; None: still running."""
    if future is None:
        return False
    try:
        return bool(future.result(timeout=0)) if future.query() else None
    except Exception:
        return False


def _raises(future: Any) -> bool:
    try:
        if future.query():
            future.result(timeout=0)
    except Exception:
        return True
    return False


def _failed() -> Any:
    future = MessagingFuture()
    future.set_result(False)
    return future
