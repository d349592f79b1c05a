"""Where a stack keeps its files: one directory, `PDQ_HOME/stack`, readable by its owner alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

KEEP_TRACES_BYTES = 64 << 20
"""Traces are kept from one `pdq up` to the next, until a file is larger than this."""


class Layout(NamedTuple):
    """The files of one stack. `prepare` makes the directories."""

    root: Path

    @classmethod
    def of(cls, home: Path) -> Layout:
        return cls(home.expanduser().absolute() / "stack")

    @property
    def record(self) -> Path:
        """What runs: see `pdq.up.record`."""
        return self.root / "stack.json"

    @property
    def lock(self) -> Path:
        """Held by the supervisor and by its guard, so for as long as anything of the stack is left."""
        return self.root / "lock"

    @property
    def models(self) -> Path:
        """models.toml of the services: the one model, with its path."""
        return self.root / "models.toml"

    @property
    def nats_config(self) -> Path:
        return self.root / "nats.conf"

    @property
    def nats_store(self) -> Path:
        return self.root / "nats"

    @property
    def site_config(self) -> Path:
        """Of the broker of `--edge`'s site."""
        return self.root / "site-nats.conf"

    @property
    def site_store(self) -> Path:
        return self.root / "site-nats"

    @property
    def sim_kv(self) -> Path:
        """The sim engine's KV tier."""
        return self.root / "sim-kv"

    @property
    def kv_pool(self) -> Path:
        """The common store of `--kv pool`, unless another is configured. It stays from one `pdq up` to the next."""
        return self.root / "kv-pool"

    @property
    def kv_key(self) -> Path:
        """What tenants' names are hashed with, and a pool is encrypted with."""
        return self.root / "kv-key"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    def trace(self, service: str) -> Path:
        """OTLP JSON of one service, an export request a line."""
        return self.traces / f"{service}.jsonl"

    def prepare(self) -> None:
        """Make the directories; move the logs of the last run, and traces that grew large, out of the way."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self.logs, self.traces, self.nats_store, self.site_store):
            directory.mkdir(mode=0o700, exist_ok=True)
        for log in self.logs.glob("*.log"):
            log.replace(log.with_suffix(".log.1"))
        for trace in self.traces.glob("*.jsonl"):
            if trace.stat().st_size > KEEP_TRACES_BYTES:
                trace.replace(trace.with_suffix(".jsonl.1"))
