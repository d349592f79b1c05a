"""What a local stack consists of: the command, the environment and the readiness of each process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import aiohttp

from pdq import settings, subjects
from pdq.engines.vllm_config import environment, is_cpu_build
from pdq.init import init
from pdq.settings import EngineSettings, GatewaySettings, LimitSettings, ModelSpec, WorkerSettings, variable
from pdq.up import broker, caches, site
from pdq.up.caches import Caches, KvMode
from pdq.up.layout import Layout
from pdq.up.machine import HOST, cpu_halves, free_port, port_or_free
from pdq.up.model import EngineKind
from pdq.up.process import Spec
from pdq.up.site import Site

SERVICES = ("router", "gateway", "prefill", "decode")
PROBE_TIMEOUT_S = 2.0
DRAIN_S = 5.0
"""Whoever stops a local stack waits for it: running requests get less time than in a deployment."""
GPU_SHARE = 0.4
"""Two engines share one GPU."""


class Options(NamedTuple):
    """What `pdq up` was asked for. `environ`: the caller's, whose `PDQ_*` settings pass through where the
    stack does not decide them itself."""

    layout: Layout
    environ: Mapping[str, str]
    engine: EngineKind = "vllm"
    model: str = ""
    order: str = ""
    timeout_s: float = 900.0
    kv: KvMode = "host"
    """How KV goes from prefill to decode; the sim engine has a way of its own."""
    edge: bool = False
    """A site beside the hub, too."""

    @property
    def processes(self) -> tuple[str, ...]:
        tiers = caches.names(self.kv) if self.engine == "vllm" else ()
        return ("nats", *tiers, *SERVICES, *(site.PROCESSES if self.edge else ()))


class Plan:
    """The specs of one stack. They depend on each other's ports, so they are made in the order of the start."""

    def __init__(self, options: Options, model: ModelSpec) -> None:
        self.nats_url = ""
        self.site: Site | None = None
        self._options = options
        self._layout = options.layout
        self._model = model
        self._caches: Caches | None = None

    def brokers(self) -> list[Spec]:
        """The hub's, and the site's. Raises Misconfigured when nats-server is not installed."""
        port = free_port()
        self.nats_url = broker.url(port)
        layout, limits, environ = self._layout, self._limits(), clean(self._options.environ)
        config = broker.config(port, layout.nats_store, subjects.streams(limits.of_streams()))
        if self._options.edge:
            self.site = Site(layout, environ, limits)
            config += self.site.of_hub()
        broker.write(layout.nats_config, config)
        hub = broker.spec("nats", port, layout.nats_config, environ)
        return [hub, self.site.nats()] if self.site is not None else [hub]

    async def init(self) -> None:
        """Streams and consumers. Raises Misconfigured or Unavailable."""
        await broker.made(self.nats_url, partial(init, limits=self._limits(), models=[self._model.slug]))
        if self.site is not None:
            await self.site.init()

    def caches(self) -> list[list[Spec]]:
        """The KV tiers of the engines. Raises Misconfigured."""
        options = self._options
        self._caches = Caches(self._layout, clean(options.environ), options.kv, self._model)
        return self._caches.specs(answers)

    def router(self) -> Spec:
        order = {"PDQ_ROUTER_ORDER": self._options.order} if self._options.order else {}
        return self._service("router", order)

    def gateway(self) -> Spec:
        """OpenAI's API, on its usual port where that is free."""
        return self._gateway("gateway", self._gateway_port(), {})

    def at_site(self) -> list[Spec]:
        """The site's services; its gateway is on the port after the hub's."""
        if self.site is None:
            return []
        told = self.site.environment()
        port = self._gateway_port()
        return [
            self._service(site.FORWARDER, told),
            self._gateway(site.GATEWAY, port + 1 if port else 0, told),
        ]

    def _gateway_port(self) -> int:
        return settings.load(GatewaySettings, clean(self._options.environ)).port

    def _gateway(self, name: str, asked: int, more: Mapping[str, str]) -> Spec:
        port = port_or_free(asked)
        own = {"PDQ_GATEWAY_HOST": HOST, "PDQ_GATEWAY_PORT": str(port), **more}
        spec = self._service(name, own, module="pdq_gateway")
        return spec._replace(ports={"api": port, **spec.ports})

    def workers(self) -> list[Spec]:
        """Prefill and decode, on a half of the CPUs each."""
        return [self._worker(name, cpus) for name, cpus in zip(("prefill", "decode"), self._halves(), strict=True)]

    def template(self) -> dict[str, str] | None:
        """What a process is told that imports for both workers; None where each must do so itself.

        What is read while things are imported, numbers of threads above all, must be the same for both.
        """
        if self._options.engine != "vllm" or not is_cpu_build() or sys.platform != "linux":
            return None
        environ = clean(self._options.environ)
        loaded = [
            settings.load(EngineSettings, environ | {variable(EngineSettings, "cpus"): cpus}) for cpus in self._halves()
        ]
        of_prefill, of_decode = map(environment, loaded)
        # NumPy's BLAS, which nothing here uses, would start a thread for each CPU.
        return {"OPENBLAS_NUM_THREADS": "1"} | environ | of_prefill if of_prefill == of_decode else None

    def _halves(self) -> tuple[str, str]:
        return cpu_halves() if self._options.engine == "vllm" and is_cpu_build() else ("", "")

    def _worker(self, name: str, cpus: str) -> Spec:
        fixed = {"PDQ_ENGINE_KIND": self._options.engine, "PDQ_WORKER_MODEL": self._model.slug}
        if self._options.engine == "sim":
            fixed["PDQ_ENGINE_SIM_KV_DIR"] = str(self._layout.sim_kv)
        if self._caches is not None:
            fixed |= self._caches.of(name)
        spec = self._service(name, {"PDQ_ENGINE_CPUS": cpus} if cpus else {})
        drain_s = settings.load(WorkerSettings, spec.environment).drain_s
        return spec._replace(environment=dict(spec.environment) | fixed, stop_s=drain_s + 10)

    def _service(self, name: str, more: Mapping[str, str], *, module: str = "") -> Spec:
        port = free_port()
        defaults = {"PDQ_WORKER_DRAIN_S": f"{DRAIN_S:g}", "PDQ_ENGINE_GPU_MEMORY_UTILIZATION": f"{GPU_SHARE:g}"}
        fixed = {
            "PDQ_NATS_URL": self.nats_url,
            "PDQ_MODELS": str(self._layout.models),
            "PDQ_HTTP_HOST": HOST,
            "PDQ_HTTP_PORT": str(port),
            "PDQ_TRACE_FILE": str(self._layout.trace(name)),
        }
        return Spec(
            name,
            (sys.executable, "-m", module or f"pdq_{name}"),
            defaults | clean(self._options.environ) | fixed | dict(more),
            lambda: answers(f"http://{HOST}:{port}/readyz"),
            {"http": port},
        )

    def _limits(self) -> LimitSettings:
        return settings.load(LimitSettings, self._options.environ)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what is not meant for these processes: credentials of another broker,
    another worker's name, and what keeps Python from caching bytecode, which doubles an engine's start."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PDQ_NATS_USER", "PDQ_NATS_PASSWORD", "PDQ_NATS_NKEY_SEED", "PDQ_WORKER_ID"}
    return {name: value for name, value in environ.items() if name not in dropped}


async def answers(url: str) -> bool:
    """Whether a GET gives 200 soon."""
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
