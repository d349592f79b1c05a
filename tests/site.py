"""A hub and its sites, for tests: real brokers whose stores outlive a kill, and an uplink that can be broken.

    hub = OpenHub(directory, "plant")            # a Stack: `add` services, `start`, `stop`
    site = Site(hub, "plant")                    # a Stack as well, of what runs at the site
    await hub.start(); await site.start()
    client = Client(await site.connect(), site.name)
    site.uplink.cut(); site.uplink.heal(); site.broker.kill(); site.broker.start()

Whoever comes without a key is let in, as with `pdq up --edge`. With KeyedHub everybody has one, at the sites as well,
and the uplink may have TLS.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

from nats.aio.msg import Msg
from pdq import subjects
from pdq.accounts import SITE_ROLES, SiteRole, Uplink, public_key, render, render_listener, render_site, write_site
from pdq.accounts.keys import make_seed
from pdq.bus import Bus
from pdq.errors import Unavailable
from pdq.init import init_edge
from pdq.settings import BusSettings, LimitSettings, load

from tests.broker import free_port
from tests.certificates import Authority
from tests.chaos.proxy import Proxy
from tests.secured import Peer, SecuredStack, with_observers
from tests.stack import Service, Stack


class OpenHub(Stack):
    """A hub where nobody needs a key but the leaf of its one site."""

    def __init__(self, directory: Path, site: str, *, limits: LimitSettings | None = None, **settings: str) -> None:
        super().__init__(directory, limits=limits, **settings)
        self.leaf_port = free_port()
        self.tls_ca = ""
        self._site, self._seed = site, make_seed()
        key = public_key(self._seed)
        self.broker.more = render({}, {site: (key,)}, anybody=True)
        self.broker.more += render_listener(f"127.0.0.1:{self.leaf_port}", only=(site, key))

    def uplink_seed(self, site: str) -> str:
        assert site == self._site
        return self._seed


class KeyedHub(SecuredStack):
    """A hub with keys for everybody; with an authority, leaves come over TLS. tenants: its sites, and others."""

    def __init__(
        self,
        directory: Path,
        tenants: Iterable[str],
        *,
        authority: Authority | None = None,
        observed: Iterable[str] = (),
        **settings: str,
    ) -> None:
        super().__init__(directory, tenants, observed=("PDQ", *observed), **settings)
        self.leaf_port = free_port()
        self.tls_ca = authority.file if authority else ""
        pair = authority.sign("hub") if authority else None
        self.broker.more += render_listener(f"127.0.0.1:{self.leaf_port}", tls=pair)


class Line:
    """The network between a site and its hub: `cut`, `silent`, `delay` and `heal` as the proxy has them, at once.

    It runs in a thread, so that it outlives the event loop of one test.
    """

    def __init__(self, port: int) -> None:
        self.proxy = Proxy(port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._run(self.proxy.start())

    def stop(self) -> None:
        if not self._thread.is_alive():
            self._loop.close()
            return
        self._run(self.proxy.close())
        self._run(self._gone())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        self._do(self.proxy.cut)

    def silent(self) -> None:
        self._do(self.proxy.silent)

    def delay(self, seconds: float) -> None:
        self._do(lambda: self.proxy.delay(seconds))

    def heal(self) -> None:
        self._do(self.proxy.heal)

    def _do(self, change: Callable[[], None]) -> None:
        async def done() -> None:
            change()

        self._run(done())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _gone(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class Site(Stack):
    """A site's broker, a leaf of the hub, and what runs there: `broker`, `uplink`, `services`."""

    def __init__(
        self,
        hub: OpenHub | KeyedHub,
        name: str,
        *,
        limits: LimitSettings | None = None,
        observed: Iterable[str] = (),
        **settings: str,
    ) -> None:
        directory = hub.directory / f"site-{name}"
        directory.mkdir()
        super().__init__(directory, limits=limits, **{"PDQ_TENANT": name, **settings})
        self.name = name
        self.hub = hub
        self.keyed = isinstance(hub, KeyedHub)
        self.uplink = Line(hub.leaf_port)
        self.seeds: dict[SiteRole, str] = {}
        if isinstance(hub, KeyedHub):
            roles = self._carried(hub, "tls://not-yet:1") / "roles"
            self.seeds = {role: (roles / f"{role}.nk").read_text().strip() for role in SITE_ROLES}
        self.observers = {account: make_seed() for account in observed}
        """Users who may do all within an account of the site's broker."""
        self.broker.jetstream = f'domain: "{name}"\n'

    def add(self, module: str, **more: str) -> Service:
        role = module.removeprefix("pdq_")
        key = {"PDQ_NATS_NKEY_SEED": self.seeds[role]} if self.keyed else {}  # type: ignore[index]
        return super().add(module, **{**key, **more})

    async def start(self, *, within_s: float = 20) -> None:
        """Returns once the uplink is there and all services are ready."""
        self.uplink.start()
        self.broker.more = self._config()
        self.broker.start()
        bus = await self.connect("init")
        await init_edge(bus, self.limits)
        await bus.close()
        await self.linked(within_s)
        for service in self.services:
            service.start()
        for service in self.services:
            service.wait_ready()

    def stop(self) -> None:
        super().stop()
        self.uplink.stop()

    async def connect(self, role: SiteRole = "client") -> Bus:
        """A connection to the site's broker in a role (without keys, all roles are one)."""
        key = {"PDQ_NATS_NKEY_SEED": self.seeds[role]} if self.keyed else {}
        given = {"PDQ_NATS_URL": self.url, "PDQ_NATS_CONNECT_TIMEOUT_S": "5", **key}
        return await Bus.connect(load(BusSettings, given), "test")

    async def peer(self, name: str = "client") -> Peer:
        """As `connect`, without pdq between; also as the observer of an account."""
        seeds = {**self.seeds, **self.observers}
        return await Peer.connect(self.url, **({"nkeys_seed_str": seeds[name]} if self.keyed else {}))

    async def linked(self, within_s: float = 20) -> None:
        """Wait until a question from the site reaches the hub, and an answer comes back."""
        question = subjects.read(self.name, "linked")
        there = await (self.hub.peer("PDQ") if isinstance(self.hub, KeyedHub) else Peer.connect(self.hub.url))
        await there.client.subscribe(question, cb=_answer)
        here = await self.connect()
        try:
            async with asyncio.timeout(within_s):
                while not await _answered(here, question):
                    await asyncio.sleep(0.02)
        finally:
            await here.close()
            await there.client.close()

    def _config(self) -> str:
        """As `pdq nats site` makes it, or `pdq up --edge`."""
        url = f"{'tls' if self.hub.tls_ca else 'nats'}://127.0.0.1:{self.uplink.proxy.port}"
        named = "server_name: $PDQ_SITE\n"
        if not isinstance(self.hub, KeyedHub):
            return render_site(self.name, Uplink(url, self.hub.uplink_seed(self.name)), {}, anybody=True) + named
        carried = self._carried(self.hub, url)
        observed = with_observers((carried / "site.conf").read_text(), self.observers)
        (carried / "observed.conf").write_text(observed)
        return f'include "{os.path.relpath(carried, self.directory)}/observed.conf"\n{named}'

    def _carried(self, hub: KeyedHub, url: str) -> Path:
        return write_site(hub.keyring, self.name, url, hub.tls_ca).directory


async def _answer(message: Msg) -> None:
    await message.respond(b"{}")


async def _answered(bus: Bus, question: str) -> bool:
    try:
        await bus.request(question, b"{}", timeout_s=1)
    except Unavailable:
        return False
    return True
