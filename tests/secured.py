"""A stack in which everybody has a key of his own: accounts, roles and tenants as `pdq nats accounts` makes them.

Besides them there is an observer in some accounts, who may do all: what he does not see did not arrive there.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from pdq.accounts import ROLES, Keyring, Role, public_key
from pdq.accounts.keyring import Kind
from pdq.accounts.keys import make_seed
from pdq.bus import Bus
from pdq.settings import BusSettings, load

from tests.stack import Service, Stack

RELOADED = "Reloaded server configuration"


class SecuredStack(Stack):
    """Services are started with the key of their role, `init` runs with its own."""

    def __init__(
        self, directory: Path, tenants: Iterable[str], *, observed: Iterable[str] = (), **settings: str
    ) -> None:
        super().__init__(directory, **settings)
        self.keyring = Keyring(directory / "keys")
        self.observers = {account: make_seed() for account in observed}
        self.write(*tenants)
        self.broker.more = 'include "observed.conf"\n'

    def write(self, *tenants: str, roles: Iterable[Role] = ROLES) -> None:
        """Add tenants and what roles lack a key, and write the broker's accounts with the observers in them."""
        self.keyring.write(tenants, roles=roles)
        text = with_observers(self.keyring.config.read_text(), self.observers)
        (self.directory / "observed.conf").write_text(text)

    def seed_file(self, name: str) -> Path:
        """Of a role, or else of a tenant."""
        kinds: tuple[Kind, ...] = ("roles", "tenants")
        return next(file for kind in kinds if (file := self.keyring.seed_file(kind, name)).exists())

    def add(self, module: str, **more: str) -> Service:
        return super().add(module, **{"PDQ_NATS_NKEY_FILE": str(self.seed_file(module.removeprefix("pdq_"))), **more})

    def seed(self, name: str) -> str:
        """Of a role, a tenant, or the observer of an account."""
        return self.observers.get(name) or self.seed_file(name).read_text().strip()

    async def connect(self, name: str = "init") -> Bus:
        return await self.connect_with(self.seed(name))

    async def connect_with(self, seed: str) -> Bus:
        own = {"PDQ_NATS_URL": self.url, "PDQ_NATS_NKEY_SEED": seed, "PDQ_NATS_CONNECT_TIMEOUT_S": "5"}
        return await Bus.connect(load(BusSettings, {**self.settings, **own}), "test")

    async def peer(self, name: str) -> Peer:
        """As `connect`, without pdq between."""
        return await Peer.connect(self.url, nkeys_seed_str=self.seed(name))

    def command(self, name: str, **more: str) -> dict[str, str]:
        """The environment of a `pdq` command, as this role or tenant."""
        kept = {"PATH", "HOME", "PYTHONPATH", "PDQ_NATS_URL", "PDQ_MODELS"}
        found = {key: value for key, value in self.environment("cli").items() if key in kept}
        own = {"PDQ_NATS_NKEY_SEED": self.seed(name), "PDQ_HOME": str(self.directory / "home")}
        return {**found, **own, **more}

    async def reload(self) -> None:
        """Have the broker read its configuration again, and wait until it has: twice, as docs/security.md says."""
        for _ in range(2):
            await self._reload_once()

    async def _reload_once(self) -> None:
        log = self.directory / "nats.log"
        before = log.read_text().count(RELOADED)
        assert self.broker.process is not None
        self.broker.process.send_signal(signal.SIGHUP)
        for _ in range(200):
            if log.read_text().count(RELOADED) > before:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(log.read_text()[-2_000:])


def with_observers(text: str, observers: Mapping[str, str]) -> str:
    """A broker's configuration with one more user in some accounts, by seeds, who may do all there."""
    before, _, rest = text.partition("accounts: ")
    plain = "".join(line for line in rest.splitlines(True) if not line.lstrip().startswith("#"))
    accounts, end = json.JSONDecoder().raw_decode(plain)
    for account, seed in observers.items():
        accounts[account].setdefault("users", []).append({"nkey": public_key(seed)})
    return f"{before}accounts: {json.dumps(accounts)}{plain[end:]}"


class Peer:
    """A bare connection of one user, which may try anything. `refused`: the broker's refusals; `heard`: what came."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.refused: list[str] = []
        self.heard: list[Msg] = []

    @classmethod
    async def connect(cls, url: str, **options: Any) -> Peer:
        peer = cls(Client())

        async def error(exc: Exception) -> None:
            peer.refused.append(str(exc))

        await peer.client.connect(url, error_cb=error, allow_reconnect=False, **options)
        return peer

    async def listen(self, pattern: str) -> None:
        async def take(message: Msg) -> None:
            self.heard.append(message)

        await self.client.subscribe(pattern, cb=take)
        await self.settle()

    async def publish(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Returns once the broker has dealt with it."""
        await self.client.publish(subject, data, reply=reply)
        await self.settle()

    async def settle(self) -> None:
        """Until the broker has taken all that was sent here, and all is here that it had sent by then."""
        for _ in range(2):
            await asyncio.sleep(0)
            await self.client.flush(5)
        await asyncio.sleep(0)

    def has(self, data: bytes) -> bool:
        return any(message.data == data for message in self.heard)
