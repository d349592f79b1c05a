"""What the probes bring and the checks look at. Nothing here asks anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdq.about import CONTRACT
from pdq.addresses import is_loopback
from pdq.messages import WorkerBeat
from pdq.settings import LimitSettings, Models, WorkerSettings
from pdq.up.record import Record


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The newest beat of a worker's stage, and when the broker stored it, Unix seconds by the broker's clock."""

    beat: WorkerBeat
    stored_s: float

    @property
    def name(self) -> str:
        return f"{self.beat.worker} ({self.beat.stage})"

    @property
    def contract(self) -> dict[str, str]:
        """The fields of its contract; empty for one that does not tell."""
        start = len(CONTRACT)
        return {name[start:]: value for name, value in self.beat.about.items() if name.startswith(CONTRACT)}

    @property
    def server(self) -> str:
        """Its LMCache server as `host:port`, as seen from the worker; empty: it uses none."""
        about = self.beat.about
        return f"{about['kv.host']}:{about['kv.port']}" if "kv.port" in about else ""


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """A nats-server that answered."""

    place: str
    """Where it was reached, without credentials."""
    info: dict[str, Any] = {}
    """What it says of itself to whoever connects: version, listener, limits."""
    account: dict[str, Any] | None = None
    """JetStream's account information; None: there is no JetStream here."""
    streams: dict[str, dict[str, Any] | None] = {}
    """JetStream's information by stream; None: there is no such stream."""
    consumers: dict[str, dict[str, Any] | None] = {}
    """The same by `stream/consumer`."""
    skew_s: float | None = None
    """This machine's clock less the broker's; None: it could not be compared."""
    rtt_s: float = 0.0
    workers: tuple[Worker, ...] = ()
    newer: tuple[str, ...] = ()
    """Live workers whose beats only a newer pdq reads, by name."""
    monitoring: dict[str, Any] | None = None
    """`/jsz` of its monitoring port, where that was given."""


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """An LMCache server, as its HTTP port tells."""

    host: str
    port: int
    http_port: int
    error: str = ""
    """Why it does not answer; empty: it does."""
    config: dict[str, Any] | None = None
    """As `/config` tells it, with passwords of lower tiers: never shown. None: it does not tell, as it should."""
    status: dict[str, Any] = {}
    version: str = ""
    listens: tuple[str, ...] = ()
    """Addresses on which its ports listen on this machine; empty: it runs elsewhere."""

    @property
    def place(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def first_tier(self) -> dict[str, Any]:
        """What it says of its first tier; empty when it does not answer."""
        found: dict[str, Any] = (self.status.get("storage_manager") or {}).get("l1_manager") or {}
        return found

    @property
    def memory_bytes(self) -> int:
        """Size of its first tier."""
        return int(self.first_tier.get("memory_total_bytes", 0))


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    path: str
    total: int
    free: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """An LMCache server's shared memory: how large it is, and how much of that it has taken so far, bytes."""

    name: str
    size: int
    taken: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes; 0: not known on this system."""

    memory_total: int = 0
    memory_available: int = 0
    disks: tuple[Disk, ...] = ()
    shm: Disk | None = None
    segments: tuple[Segment, ...] = ()
    copy_bytes_s: float = 0.0
    """How fast this machine copies memory."""
    hostname: str = ""
    error: str = ""
    """Why memory and disks are not known."""


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model whose files are on this machine. `error`: why they cannot be used."""

    path: str
    error: str = ""
    weights: str = ""
    tokenizer: str = ""
    context: int = 0
    """Tokens that the model was made for; 0: it does not say."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    exists: bool = False
    size: int = 0
    mode: int = 0
    """Permission bits."""
    readable: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known. What could not be asked is None, with the reason beside it."""

    environ: Mapping[str, str] = {}
    setting_errors: tuple[str, ...] = ()
    limits: LimitSettings = LimitSettings()
    work: WorkerSettings = WorkerSettings()
    models: Models | None = None
    models_error: str = ""
    stack: Record | None = None
    broker: Broker | None = None
    broker_error: str = ""
    broker_named: bool = False
    """The broker that does not answer was asked for by name, or is that of a stack that runs."""
    caches: tuple[Cache, ...] = ()
    machine: Machine = Machine()
    files: dict[str, ModelFiles] = {}
    """By slug, of models that have files."""
    key_file: KeyFile | None = None
    installed: dict[str, str] = {}
    """Distributions on this machine, by name."""
    pins: dict[str, str] = {}
    """Versions that pdq was tested with."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self.broker.workers if self.broker is not None else ()

    def users(self, cache: Cache) -> list[Worker]:
        """The workers that use this LMCache server. A loopback address means the worker's own machine."""
        here = self.machine.hostname
        return [
            worker
            for worker in self.workers
            if worker.server == cache.place and (not is_loopback(cache.host) or worker.beat.about.get("host") == here)
        ]

    def by_model(self) -> dict[str, list[Worker]]:
        """Live workers by the model that they serve."""
        found: dict[str, list[Worker]] = {}
        for worker in self.workers:
            found.setdefault(worker.beat.model, []).append(worker)
        return dict(sorted(found.items()))
