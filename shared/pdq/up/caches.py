"""The KV tiers of a local stack: which LMCache servers it has, what is below them, which worker uses which.

None of them is vital: without KV, engines compute.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import msgspec

from pdq import settings
from pdq.kv import keys, pool
from pdq.kv import server as lmcache
from pdq.settings import KvServerSettings, KvSettings, ModelSpec, variable
from pdq.up.layout import Layout
from pdq.up.machine import HOST, free_port, has_shared_memory
from pdq.up.process import Spec

KvMode = Literal["host", "pool", "p2p"]

WORKERS = ("prefill", "decode")
MEMORY_GB = 1.0
"""First tier of a server. It evicts from 80 % on, and a load needs room twice: for KV, and for its sealed form."""
PEER_TIMEOUT_S, PEER_CHECK_S = 5, 1
"""A server that the coordinator has not heard of for so long is gone."""


def names(mode: KvMode) -> tuple[str, ...]:
    """The processes of `mode`, in the order of their start."""
    if mode == "host":
        return ("lmcache",)
    coordinator = ("coordinator",) if mode == "p2p" else ()
    return (*coordinator, *(f"lmcache-{worker}" for worker in WORKERS))


class Caches:
    """Made once, when the stack starts: ports are asked for right before they are used."""

    def __init__(self, layout: Layout, environ: Mapping[str, str], mode: KvMode, model: ModelSpec) -> None:
        """environ: of the processes, without what is not meant for them. Raises Misconfigured."""
        self._layout = layout
        self._environ = environ
        self._mode = mode
        self._model = model
        self._coordinator_port = free_port() if mode == "p2p" else 0
        self._common = self._shared_by_all()
        self._by_worker: dict[str, dict[str, str]] = {}

    def specs(self, answers: Callable[[str], Awaitable[bool]]) -> list[list[Spec]]:
        """The processes; what is in one list stops together. `answers`: whether a GET gives 200.

        Raises Misconfigured.
        """
        if self._mode == "host":
            return [[self._server("lmcache", WORKERS, answers)]]
        servers = [self._server(f"lmcache-{worker}", (worker,), answers) for worker in WORKERS]
        return [[self._coordinator(answers)], servers] if self._mode == "p2p" else [servers]

    def of(self, worker: str) -> dict[str, str]:
        """What to add to the environment of a worker."""
        return self._by_worker[worker]

    def _shared_by_all(self) -> dict[str, str]:
        configured = settings.load(KvSettings, self._environ)
        fixed = {
            "mode": self._mode,
            "host": HOST,
            "key_file": configured.key_file or str(keys.ensure(self._layout.kv_key)),
            "pool": "",
            "coordinator": f"http://{HOST}:{self._coordinator_port}" if self._mode == "p2p" else "",
        }
        if self._mode == "pool":
            fixed["pool"] = configured.pool or self._layout.kv_pool.as_uri()
        return {variable(KvSettings, name): value for name, value in fixed.items()}

    def _server(self, name: str, workers: tuple[str, ...], answers: Callable[[str], Awaitable[bool]]) -> Spec:
        own = {"port": free_port(), "http_port": free_port()}
        peer = {variable(KvSettings, "peer"): f"{HOST}:{free_port()}"} if self._mode == "p2p" else {}
        kv = self._common | {variable(KvSettings, key): str(port) for key, port in own.items()} | peer
        for worker in workers:
            self._by_worker[worker] = kv
        sizes = self._sizes(name)
        environ = {**self._environ, **kv, **settings.variables(sizes)}
        environ |= {"PDQ_MODELS": str(self._layout.models), "PDQ_WORKER_MODEL": self._model.slug}
        loaded = settings.load(KvSettings, environ)
        lmcache.check(loaded, sizes)
        if self._mode == "pool":
            pool.parse(loaded, settings.aws(environ))
        return Spec(
            name,
            tuple(lmcache.command()),
            environ,
            lambda: answers(f"http://{HOST}:{own['http_port']}/healthcheck"),
            {"lmcache": own["port"], "http": own["http_port"]},
            leftovers=(lmcache.shared_memory(sizes.shm_name),) if sizes.shm_name else (),
            vital=False,
        )

    def _sizes(self, name: str) -> KvServerSettings:
        default = {variable(KvServerSettings, "memory_gb"): str(MEMORY_GB)}
        asked = settings.load(KvServerSettings, default | dict(self._environ))
        number = 1 if self._mode == "host" else len(WORKERS)
        # One more: of a server that is started anew, engines hold the former segment until they know the new one.
        fits = has_shared_memory(lmcache.SHM_DIRECTORY, (number + 1) * asked.memory_gb)
        shm_name = f"pdq-{os.getpid()}-{name}" if fits else ""
        return msgspec.structs.replace(asked, host=HOST, shm_name=shm_name)

    def _coordinator(self, answers: Callable[[str], Awaitable[bool]]) -> Spec:
        port = self._coordinator_port
        line = [sys.executable, "-m", "lmcache.v1.mp_coordinator", "--host", HOST, "--port", str(port)]
        line += ["--instance-timeout", str(PEER_TIMEOUT_S), "--health-check-interval", str(PEER_CHECK_S)]
        return Spec(
            "coordinator",
            (*line, "--chunk-size", str(self._model.chunk_tokens)),
            {**self._environ, **lmcache.environment()},
            lambda: answers(f"http://{HOST}:{port}/healthz"),
            {"http": port},
            vital=False,
        )
