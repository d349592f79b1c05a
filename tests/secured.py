"""A stack in which everybody has a key of his own: accounts, roles and tenants as `pdq nats accounts` makes them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from pdq.accounts import Keyring
from pdq.accounts.keyring import Kind
from pdq.bus import Bus
from pdq.settings import BusSettings

from tests.stack import Service, Stack


class SecuredStack(Stack):
    """Services are started with the key of their role, `init` runs with its own."""

    def __init__(self, directory: Path, tenants: tuple[str, ...], **settings: str) -> None:
        super().__init__(directory, **settings)
        self.keyring = Keyring(directory / "keys")
        self.keyring.write(tenants)
        self.broker.more = 'include "keys/accounts.conf"\n'

    def seed_file(self, name: str) -> str:
        """Of a role, or else of a tenant."""
        kinds: tuple[Kind, ...] = ("roles", "tenants")
        return next(str(file) for kind in kinds if (file := self.keyring.seed_file(kind, name)).exists())

    def add(self, module: str, **more: str) -> Service:
        return super().add(module, **{"PDQ_NATS_NKEY_FILE": self.seed_file(module.removeprefix("pdq_")), **more})

    def bus_settings(self, name: str) -> BusSettings:
        return BusSettings(url=self.url, nkey_file=self.seed_file(name), connect_timeout_s=5, publish_timeout_s=5)

    async def connect(self, name: str = "init") -> Bus:
        return await Bus.connect(self.bus_settings(name), f"test-{name}")

    def command(self, name: str, **more: str) -> dict[str, str]:
        """The environment of a `pdq` command, as this role or tenant."""
        kept = {"PATH", "HOME", "PYTHONPATH", "PDQ_NATS_URL", "PDQ_MODELS"}
        found = {key: value for key, value in self.environment("cli").items() if key in kept}
        own = {"PDQ_NATS_NKEY_FILE": self.seed_file(name), "PDQ_HOME": str(self.directory / "home")}
        return {**found, **own, **more}

    async def reload(self) -> None:
        """Have the broker read its configuration again, and wait until it has."""
        log = self.directory / "nats.log"
        before = log.read_text().count("Reloaded server configuration")
        assert self.broker.process is not None
        self.broker.process.send_signal(signal.SIGHUP)
        for _ in range(100):
            if log.read_text().count("Reloaded server configuration") > before:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(log.read_text()[-2_000:])
