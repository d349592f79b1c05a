"""One connection to NATS that mends itself: connecting, messages, subscriptions, requests.

Nothing here waits without a bound. Errors of the client library stop here; callers see those of `pdq.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import nats
import nats.errors
from nats.aio.subscription import Subscription

from pdq.bus import identity
from pdq.bus.cancel import heeding_cancel
from pdq.bus.quick import Take
from pdq.bus.wire import Message, Stored, encode_headers
from pdq.errors import Interrupted, Misconfigured, Rejected, Unavailable
from pdq.settings import BusSettings

log = logging.getLogger("pdq.bus")

API_TIMEOUT_S = 5.0

T = TypeVar("T")
StoredCallback = Callable[[Stored], None]
Responder = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a request: its subject and payload, to the payload of the answer."""


class BrokerErrors:
    """Within it the client library's errors become ours, Unavailable above all, that say what was being done."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        doing = self._doing
        match exc:
            case nats.errors.NoRespondersError():
                why = "are JetStream and a router up? at a site: the uplink? was `pdq init` run?"
                raise Unavailable(f"{doing}: nobody answers ({why})") from exc
            case nats.errors.MaxPayloadError():
                raise Rejected(f"{doing}: the payload is over the broker's limit", code="payload_too_large") from exc
            case nats.errors.Error() | TimeoutError() | ConnectionError():
                raise Unavailable(f"{doing}: {type(exc).__name__} {exc}".rstrip()) from exc


class Connection:
    """Made with `connect`, ended with `close`."""

    def __init__(self, settings: BusSettings, name: str, stop: asyncio.Event | None = None) -> None:
        self.settings = settings
        self.name = name
        self.closed = asyncio.Event()
        """Set when the connection is gone for good: the process must end."""
        self.reconnects = 0
        self._nc = identity.GuardedClient()
        self._connecting = False
        self._refusals = self._no_refusals()
        self._giving_up: asyncio.Task[None] | None = None
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._reported: tuple[str, float] = ("", 0.0)
        self._closing = False
        self._stop = stop or asyncio.Event()

    @classmethod
    async def connect(cls, settings: BusSettings, name: str, stop: asyncio.Event | None = None) -> Self:
        """Connect, waiting for the broker as `patiently` does. Raises Unavailable, Interrupted or Misconfigured."""
        bus = cls(settings, name, stop)
        await bus.patiently(bus._try_to_connect)
        return bus

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Try until the broker answers, for up to `connect_timeout_s`: for what a service needs at its start.

        Raises Unavailable after that, and Interrupted when `stop` is set meanwhile.
        """
        give_up = time.monotonic() + self.settings.connect_timeout_s
        told = False
        while True:
            try:
                return await work()
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
            if not told:
                log.info("waiting for the broker at %s", self.place)
                told = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await self._stop.wait()
                raise Interrupted("drain")

    async def _try_to_connect(self) -> None:
        self._connecting, self._refusals = True, self._no_refusals()
        try:
            with heeding_cancel():
                async with asyncio.timeout(5):
                    await self._connect_once()
        except Misconfigured:
            # Not `close`: it waits for ever for a connection whose TLS has failed.
            if self._nc._transport is not None:
                self._nc._transport.close()
            raise
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            raise Unavailable(f"no broker at {self.place}: {type(exc).__name__}") from exc
        finally:
            self._connecting = False

    async def _connect_once(self) -> None:
        given = identity.options(self.settings)
        self._nc = identity.GuardedClient()
        await self._nc.connect(
            self.settings.url.split(","),
            name=self.name,
            allow_reconnect=True,
            # The first connection is tried by `connect`; later ones are tried for ever.
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.25,
            connect_timeout=2,
            ping_interval=10,
            max_outstanding_pings=2,
            error_cb=self._on_error,
            reconnected_cb=self._reconnected,
            disconnected_cb=self._disconnected,
            closed_cb=self._on_closed,
            **given,
        )

    @property
    def place(self) -> str:
        """The broker's addresses without credentials."""
        return ",".join(url.rsplit("@", 1)[-1] for url in self.settings.url.split(","))

    @property
    def connected(self) -> bool:
        return bool(self._nc.is_connected)

    async def check(self) -> None:
        """Raise Unavailable while there is no connection: a service's readiness asks."""
        self._check_connected()

    def _check_connected(self) -> None:
        if not self.connected:
            raise Unavailable(f"not connected to the broker at {self.place}")

    async def watch(self, stop: asyncio.Event) -> None:
        """Raise Unavailable when the connection is gone for good; until then, or `stop`, wait."""
        waits = {asyncio.create_task(event.wait()) for event in (self.closed, stop)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        if not stop.is_set():
            raise Unavailable("the broker connection is closed for good")

    @property
    def server_info(self) -> dict[str, Any]:
        """What the server says of itself to whoever connects (its INFO): `version`, `host`, `auth_required`, ..."""
        return dict(self._nc._server_info)

    @property
    def max_payload(self) -> int:
        return int(self._nc.max_payload)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every reconnect; returns what takes it off again."""
        self._on_reconnect.append(callback)
        return lambda: self._on_reconnect.remove(callback)

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever the connection is lost, before anything comes over the next one; returns
        what takes it off again."""
        self._on_disconnect.append(callback)
        return lambda: self._on_disconnect.remove(callback)

    async def close(self) -> None:
        """Flush and close; bounded."""
        self._closing = True
        with contextlib.suppress(nats.errors.Error, TimeoutError, ConnectionError):
            with heeding_cancel():
                await self._nc.flush(timeout=2)
        with contextlib.suppress(nats.errors.Error, TimeoutError, ConnectionError):
            async with asyncio.timeout(5):
                await self._nc.close()

    # ---- core NATS

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish without an acknowledgement. Raises Unavailable when it cannot go out now.

        The client library would keep it for the next connection; by then what it says may not hold any more.
        """
        self._check_connected()
        with BrokerErrors(f"send to {subject}"):
            await self._nc.put(subject, data, reply=reply, head=encode_headers(headers))

    def post(self, subject: str, data: bytes) -> None:
        """As `send`, for whoever cannot wait: a few bytes that nothing may hold up."""
        self._check_connected()
        with BrokerErrors(f"send to {subject}"):
            self._nc.post(subject, data)

    async def subscribe(self, subject: str, callback: Take, *, queue: str = "", confirm: bool = True) -> Subscription:
        """Subscribe. `callback` is called where messages are read: it must not take long.

        With `confirm` the server knows of the interest when this returns; without, it will before it sees anything
        sent later on this connection.
        """
        with BrokerErrors(f"subscribe to {subject}"):
            subscription = await self._nc.listen(subject, callback, queue=queue)
            if not confirm:
                return subscription
            try:
                with heeding_cancel():
                    await self._nc.flush(timeout=API_TIMEOUT_S)
            except BaseException:
                await self.unsubscribe(subscription)
                raise
        return subscription

    async def follow(self, subject: str, callback: StoredCallback, *, confirm: bool = True) -> Subscription:
        """Live copies of a stream's messages, in stream order. confirm: as of `subscribe`."""

        def take(message: Message) -> None:
            if seq := message.sequence:
                callback(Stored(message.subject, seq, message.data, message))

        return await self.subscribe(subject, take, confirm=confirm)

    async def serve(self, subject: str, queue: str, answer: Responder) -> Subscription:
        """Answer requests to a subject, one of a queue group; requests are answered concurrently."""
        running: set[asyncio.Task[None]] = set()

        async def reply(message: Message) -> None:
            with contextlib.suppress(Unavailable):
                await self.send(message.reply, await answer(message.subject, message.data))

        def take(message: Message) -> None:
            if message.reply:
                task = asyncio.create_task(reply(message))
                running.add(task)
                task.add_done_callback(running.discard)

        return await self.subscribe(subject, take, queue=queue)

    async def unsubscribe(self, subscription: Subscription) -> None:
        with contextlib.suppress(nats.errors.Error, TimeoutError, ConnectionError):
            await subscription.unsubscribe()

    async def drain(self, subscription: Subscription) -> None:
        """Unsubscribe, but let what the server already sent reach the callback; bounded."""
        with contextlib.suppress(nats.errors.Error, TimeoutError, ConnectionError):
            with heeding_cancel():
                async with asyncio.timeout(API_TIMEOUT_S):
                    await subscription.drain()

    def inbox(self) -> str:
        return str(self._nc.new_inbox())

    async def flush(self) -> None:
        with BrokerErrors("flush"), heeding_cancel():
            await self._nc.flush(timeout=API_TIMEOUT_S)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Ask and return the answer's payload. Raises Unavailable."""
        return (await self.request_message(subject, data, timeout_s=timeout_s)).data

    async def request_message(self, subject: str, data: bytes, *, timeout_s: float) -> Message:
        with BrokerErrors(f"request to {subject}"):
            return await self._nc.ask(subject, data, timeout_s=timeout_s)

    # ---- connection events

    async def _on_error(self, exc: Exception) -> None:
        """The client library would try for ever. While it connects for the first time, raising here ends that."""
        if why := self._refusals.final(exc, before=not self._connecting):
            if self._connecting:
                raise Misconfigured(f"the broker at {self.place} {why}") from exc
            self._giving_up = self._giving_up or asyncio.create_task(self._give_up())
        # The client library reports the same trouble many times a second while a broker is away.
        text = f"{type(exc).__name__}: {exc}"
        if self._reported[0] != text or time.monotonic() - self._reported[1] > 10:
            self._reported = (text, time.monotonic())
            log.warning("broker connection: %s", text)

    async def _give_up(self) -> None:
        """Close for good. The client library's own close may fail or wait, and tell nobody, where it still has
        something to send to a broker that has hung up; the process must end all the same."""
        try:
            async with asyncio.timeout(API_TIMEOUT_S):
                await self._nc.close()
        except Exception as exc:
            log.warning("the connection was not closed in order: %s", type(exc).__name__)
        finally:
            if not self.closed.is_set():
                await self._on_closed()

    async def _disconnected(self) -> None:
        if not self._closing:
            log.warning("lost the broker at %s, reconnecting", self.place)
        for callback in list(self._on_disconnect):
            callback()

    def _no_refusals(self) -> identity.Refusals:
        return identity.Refusals(len(self.settings.url.split(",")))

    async def _reconnected(self) -> None:
        self._refusals = self._no_refusals()
        self.reconnects += 1
        log.info("broker at %s is back", self.place)
        for callback in list(self._on_reconnect):
            callback()

    async def _on_closed(self) -> None:
        if not self._closing:
            exc = self._nc.last_error
            log.error("the broker at %s %s", self.place, identity.refusal(exc) or f"closed this connection: {exc}")
        self.closed.set()
