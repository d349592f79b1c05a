"""Which broker a command speaks to: the one it was told, else that of the stack that runs on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

import msgspec

from pdq import settings
from pdq.bus import Bus
from pdq.errors import Misconfigured, Unavailable
from pdq.settings import BusSettings, Models
from pdq.up import record as records
from pdq.up.layout import Layout
from pdq.up.model import default_models_file
from pdq.up.record import Record

CONNECT_TIMEOUT_S = 2.0
SLACK_S = 0.5
URL = settings.variable(BusSettings, "url")


class NotRunning(Unavailable):
    """There is no broker to speak to."""

    code = "not_running"


class Target(NamedTuple):
    """`stack`: the local stack, where the broker is its own or its site's."""

    bus: BusSettings
    layout: Layout
    stack: Record | None
    environ: Mapping[str, str]

    def at(self, url: str) -> Target:
        """The same at another broker."""
        return self._replace(bus=msgspec.structs.replace(self.bus, url=url))

    @property
    def place(self) -> str:
        """The broker's address without credentials."""
        return self.bus.url.rpartition("@")[2]

    def models(self) -> Models | None:
        """The models that this stack serves, or that models.toml has; None where there is no such file."""
        path = self.layout.models if self.stack else default_models_file(settings.models_path(self.environ))
        return settings.load_models(path) if path.exists() else None


def target(nats_url: str, environ: Mapping[str, str] = os.environ, *, starting: bool = False) -> Target:
    """The broker named, that of `PDQ_NATS_URL`, or the running stack's. Raises NotRunning or Misconfigured.

    starting: a stack that has no broker yet will do.
    """
    settings.check_environment(environ)
    layout = Layout.of(settings.home(environ))
    bounded = {settings.variable(BusSettings, "connect_timeout_s"): f"{CONNECT_TIMEOUT_S:g}", **environ}
    url = nats_url or environ.get(URL, "")
    if url:
        return Target(settings.load(BusSettings, {**bounded, URL: url}), layout, _with_site(layout, url), environ)
    stack = records.running(layout)
    if stack is None:
        raise _not_running(layout)
    if not stack.nats_url and not starting:
        raise NotRunning("the stack is starting; `pdq status` shows how far it is")
    return Target(BusSettings(url=stack.nats_url, connect_timeout_s=CONNECT_TIMEOUT_S), layout, stack, environ)


def _with_site(layout: Layout, url: str) -> Record | None:
    """The running stack whose site's broker this is, if any."""
    with contextlib.suppress(Misconfigured, OSError):
        stack = records.running(layout)
        return stack if stack is not None and stack.site is not None and stack.site.nats_url == url else None
    return None


def _not_running(layout: Layout) -> NotRunning:
    last = records.read(layout)
    failed = f" (the last one failed: {last.error.message.splitlines()[0]})" if last and last.error else ""
    return NotRunning(f"no stack is running here{failed}: start one with `pdq up`, or set --nats-url or {URL}")


@contextlib.asynccontextmanager
async def bus(where: Target) -> AsyncIterator[Bus]:
    """A connection for the length of a `with`. Raises Unavailable, naming the address, in about two seconds."""
    log = logging.getLogger("pdq")
    # Until there is a connection its failure is the command's own error, not news.
    log.setLevel(logging.CRITICAL)
    try:
        async with asyncio.timeout(where.bus.connect_timeout_s + SLACK_S):
            made = await Bus.connect(where.bus, "pdq-cli")
    except TimeoutError:
        raise Unavailable(f"no broker answers at {where.place} within {where.bus.connect_timeout_s:g} s") from None
    except ValueError as exc:
        raise Misconfigured(f"{where.place} is not the address of a broker: {exc}") from exc
    log.setLevel(logging.WARNING)
    try:
        yield made
    finally:
        await made.close()
