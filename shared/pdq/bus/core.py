"""One connection to NATS and what pdq asks of JetStream through it.

Nothing here waits without a bound. A durable publish is repeated under the same message id until it is
acknowledged or its time is up, so a lost acknowledgement never makes two messages.
Errors of the client library stop here; callers see those of `pdq.errors`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import nats
import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pdq.errors import Interrupted, Misconfigured, QueueFull, Rejected, Unavailable, WrongSequence
from pdq.settings import BusSettings

log = logging.getLogger("pdq.bus")

API_TIMEOUT_S = 5.0
ATTEMPT_TIMEOUT_S = 2.0
"""One try of a publish; it is repeated until the publish's own bound."""

# JetStream error codes (docs.nats.io, "JetStream API errors"), as met on server 2.15.
NO_STREAM, NO_CONSUMER, NO_MESSAGE, DELETE_FAILED = 10059, 10014, 10037, 10057
WRONG_LAST_SEQUENCE = (10071, 10164)
STORE_FULL, TOO_LARGE, DUPLICATE_IN_PROCESS = 10077, 10054, 10158
NOT_NOW = frozenset({10008, 10009, DUPLICATE_IN_PROCESS})
"""A cluster without a leader for the moment, or the same publish under way elsewhere: ask again."""

T = TypeVar("T")
Callback = Callable[[Msg], Awaitable[None]]
StoredCallback = Callable[["Stored"], None]
Responder = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a request: its subject and payload, to the payload of the answer."""


class Stored(NamedTuple):
    """A message read back from a stream, or a live copy of it."""

    subject: str
    seq: int
    data: bytes
    headers: dict[str, str]
    time_s: float = 0.0

    @property
    def seq_before(self) -> int:
        """Of a live copy: sequence of the message before it on the same subject, 0 if it is the first."""
        return int(self.headers.get("Nats-Last-Sequence", "0"))


class Ack(NamedTuple):
    """JetStream's acknowledgement of a publish."""

    stream: str
    seq: int
    duplicate: bool


class ApiError(Exception):
    """An error JetStream's API answered with; mapped by the caller that knows what it means."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(description)
        self.code = code


@contextlib.contextmanager
def broker_errors(doing: str) -> Iterator[None]:
    """Turn the client library's errors into Unavailable, saying what was being done."""
    try:
        yield
    except nats.errors.NoRespondersError as exc:
        raise Unavailable(f"{doing}: nobody answers (is JetStream up, and was `pdq init` run?)") from exc
    except nats.errors.MaxPayloadError as exc:
        raise Rejected(f"{doing}: the payload is over the broker's limit", code="payload_too_large") from exc
    except (nats.errors.Error, TimeoutError, ConnectionError) as exc:
        raise Unavailable(f"{doing}: {type(exc).__name__} {exc}".rstrip()) from exc


class Bus:
    """A connection that mends itself. Make it with `connect`, end it with `close`."""

    def __init__(self, settings: BusSettings, name: str, stop: asyncio.Event | None = None) -> None:
        self.settings = settings
        self.name = name
        self.closed = asyncio.Event()
        """Set when the connection is gone for good: the process must end."""
        self.reconnects = 0
        self._nc = NatsClient()
        self._on_reconnect: list[Callable[[], None]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._reported: tuple[str, float] = ("", 0.0)
        self._closing = False
        self._stop = stop or asyncio.Event()

    @classmethod
    async def connect(cls, settings: BusSettings, name: str, stop: asyncio.Event | None = None) -> Bus:
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
                await asyncio.wait_for(self._stop.wait(), 0.25)
                raise Interrupted("drain")

    async def _try_to_connect(self) -> None:
        try:
            await asyncio.wait_for(self._connect_once(), 5)
        except (nats.errors.AuthorizationError, nats.errors.InvalidUserCredentialsError) as exc:
            raise Misconfigured(f"the broker at {self.place} refuses these credentials") from exc
        except (nats.errors.Error, OSError, TimeoutError) as exc:
            if "authorization" in str(exc).lower():
                raise Misconfigured(f"the broker at {self.place} refuses these credentials") from exc
            raise Unavailable(f"no broker at {self.place}: {type(exc).__name__}") from exc

    async def _connect_once(self) -> None:
        self._nc = NatsClient()
        options: dict[str, Any] = {}
        if self.settings.user:
            options |= {"user": self.settings.user, "password": self.settings.password}
        if self.settings.nkey_seed:
            options["nkeys_seed_str"] = self.settings.nkey_seed
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
            **options,
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
            await self._nc.flush(timeout=2)
        with contextlib.suppress(nats.errors.Error, TimeoutError, ConnectionError):
            await asyncio.wait_for(self._nc.close(), 5)

    # ---- core NATS

    async def send(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish without an acknowledgement. Raises Unavailable when it cannot go out now.

        The client library would keep it for the next connection; by then what it says may not hold any more.
        """
        await self.check()
        with broker_errors(f"send to {subject}"):
            await self._nc.publish(subject, data, reply=reply, headers=headers)

    async def subscribe(
        self, subject: str, callback: Callback, *, queue: str = "", confirm: bool = True
    ) -> Subscription:
        """Subscribe. With `confirm` the server knows of the interest when this returns; without, it will
        before it sees anything sent later on this connection."""
        with broker_errors(f"subscribe to {subject}"):
            subscription = await self._nc.subscribe(subject, queue=queue, cb=callback)
            if not confirm:
                return subscription
            # A flush's PING can overtake the SUB that is still queued: let the queue drain first.
            await asyncio.sleep(0)
            try:
                await self._nc.flush(timeout=API_TIMEOUT_S)
            except BaseException:
                await self.unsubscribe(subscription)
                raise
        return subscription

    async def follow(self, subject: str, callback: StoredCallback) -> Subscription:
        """Live copies of a stream's messages, in stream order."""

        async def take(message: Msg) -> None:
            headers = dict(message.headers or {})
            if "Nats-Sequence" in headers:
                callback(Stored(message.subject, int(headers["Nats-Sequence"]), bytes(message.data), headers))

        return await self.subscribe(subject, take)

    async def serve(self, subject: str, queue: str, answer: Responder) -> Subscription:
        """Answer requests to a subject, one of a queue group; requests are answered concurrently."""
        running: set[asyncio.Task[None]] = set()

        async def reply(message: Msg) -> None:
            with contextlib.suppress(Unavailable):
                await self.send(message.reply, await answer(message.subject, bytes(message.data)))

        async def take(message: Msg) -> None:
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
            await asyncio.wait_for(subscription.drain(), API_TIMEOUT_S)

    def inbox(self) -> str:
        return str(self._nc.new_inbox())

    async def flush(self) -> None:
        with broker_errors("flush"):
            await asyncio.sleep(0)
            await self._nc.flush(timeout=API_TIMEOUT_S)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Ask and return the answer's payload. Raises Unavailable."""
        return bytes((await self.request_message(subject, data, timeout_s=timeout_s)).data)

    async def request_message(self, subject: str, data: bytes, *, timeout_s: float) -> Msg:
        with broker_errors(f"request to {subject}"):
            return await self._nc.request(subject, data, timeout=timeout_s)

    # ---- JetStream: write

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str = "",
        headers: dict[str, str] | None = None,
        expect_last: int | None = None,
        timeout_s: float | None = None,
    ) -> Ack:
        """Publish durably; returns once the stream has acknowledged.

        expect_last: sequence the last message of this very subject must have (0: none yet).
        Raises WrongSequence, QueueFull, Rejected (too large) or Unavailable (in doubt: it may be stored).
        """
        sent = dict(headers or {})
        if msg_id:
            sent["Nats-Msg-Id"] = msg_id
        if expect_last is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
        if len(data) > self.max_payload:
            raise Rejected(
                f"payload of {len(data)} bytes is over the broker's limit of {self.max_payload}",
                code="payload_too_large",
            )
        bound = self.settings.publish_timeout_s if timeout_s is None else timeout_s
        give_up = time.monotonic() + bound
        while True:
            try:
                return await self._publish_once(subject, data, sent, give_up)
            except (nats.errors.NoRespondersError, nats.errors.TimeoutError, TimeoutError, ConnectionError) as exc:
                if time.monotonic() >= give_up:
                    raise Unavailable(f"publish to {subject}: no acknowledgement within {bound:g} s") from exc
            except ApiError as exc:
                if exc.code not in NOT_NOW or time.monotonic() >= give_up:
                    raise _publish_error(subject, exc) from exc
            except nats.errors.MaxPayloadError as exc:
                raise Rejected(f"publish to {subject}: payload too large", code="payload_too_large") from exc
            except nats.errors.Error as exc:
                raise Unavailable(f"publish to {subject}: {type(exc).__name__}") from exc
            await asyncio.sleep(min(0.1, max(0.0, give_up - time.monotonic())))

    async def _publish_once(self, subject: str, data: bytes, headers: dict[str, str], give_up: float) -> Ack:
        # Published while disconnected, it would lie in the client's buffer and run much later, unnoticed.
        while not self._nc.is_connected:
            if time.monotonic() >= give_up:
                raise TimeoutError
            await asyncio.sleep(0.02)
        wait = min(ATTEMPT_TIMEOUT_S, max(0.05, give_up - time.monotonic()))
        message = await self._nc.request(subject, data, timeout=wait, headers=headers or None)
        answer = _answer(message.data)
        return Ack(answer["stream"], int(answer["seq"]), bool(answer.get("duplicate")))

    async def purge(self, stream: str, subject: str) -> int:
        """Remove the messages of a subject (wildcards allowed) from a stream; returns how many. Raises Unavailable."""
        try:
            answer = await self.api(f"STREAM.PURGE.{stream}", {"filter": subject})
        except ApiError as exc:
            raise Unavailable(f"purge of {subject} in {stream}: {exc}") from exc
        return int(answer.get("purged", 0))

    async def delete(self, stream: str, seq: int) -> None:
        """Delete one message; one that is gone already is fine. Raises Unavailable."""
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except ApiError as exc:
            if exc.code != DELETE_FAILED:
                raise Unavailable(f"delete of {seq} in {stream}: {exc}") from exc

    # ---- JetStream: read

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest message of a subject, from the stream's leader: never stale."""
        return await self._get(stream, {"last_by_subj": subject})

    async def get(self, stream: str, seq: int) -> Stored | None:
        return await self._get(stream, {"seq": seq})

    async def first(self, stream: str, subject: str, *, after: int = 0) -> Stored | None:
        """The first message of a subject (wildcards allowed) after a sequence, from the stream's leader."""
        return await self._get(stream, {"seq": after + 1, "next_by_subj": subject})

    async def _get(self, stream: str, query: dict[str, Any]) -> Stored | None:
        try:
            answer = await self.api(f"STREAM.MSG.GET.{stream}", query)
        except ApiError as exc:
            if exc.code == NO_MESSAGE:
                return None
            raise Unavailable(f"read of {stream}: {exc}") from exc
        message = answer["message"]
        return Stored(
            message["subject"],
            int(message["seq"]),
            base64.b64decode(message.get("data", "")),
            _parse_headers(base64.b64decode(message.get("hdrs", ""))),
            _seconds(message["time"]),
        )

    async def read(self, stream: str, subject: str, *, after: int = 0, limit: int = 256) -> list[Stored]:
        """Up to `limit` messages of a subject (wildcards allowed) after a sequence, in stream order.

        With replicas this may come from a follower that lags: whoever needs a certain message looks for it.
        """
        found: list[Stored] = []
        done = asyncio.get_running_loop().create_future()

        async def collect(message: Msg) -> None:
            headers = dict(message.headers or {})
            status = headers.get("Status")
            if status is None:
                found.append(_direct(headers, message.data))
            elif not done.done():
                done.set_result(status)

        inbox = self.inbox()
        subscription = await self.subscribe(inbox, collect)
        try:
            query = {"seq": after + 1, "next_by_subj": subject, "batch": limit}
            await self.send(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(query), reply=inbox)
            with broker_errors(f"read of {stream}"):
                status = await asyncio.wait_for(done, API_TIMEOUT_S)
        finally:
            await self.unsubscribe(subscription)
        if status not in ("204", "404"):
            raise Unavailable(f"read of {stream}: status {status}")
        return found

    # ---- JetStream: manage

    async def api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request to JetStream's API. Raises ApiError or Unavailable."""
        payload = msgspec.json.encode(body) if body is not None else b""
        with broker_errors(f"JetStream {verb}"):
            message = await self._nc.request(f"$JS.API.{verb}", payload, timeout=API_TIMEOUT_S)
        try:
            return _answer(message.data)
        except ApiError as exc:
            if exc.code in NOT_NOW:
                raise Unavailable(f"JetStream {verb}: {exc}") from exc
            raise

    async def stream_info(self, stream: str, subject: str = "") -> dict[str, Any] | None:
        """JetStream's stream information, with a count per subject where a filter is given; None: no stream."""
        body = {"subjects_filter": subject} if subject else None
        try:
            return await self.api(f"STREAM.INFO.{stream}", body)
        except ApiError as exc:
            if exc.code == NO_STREAM:
                return None
            raise Unavailable(f"stream {stream}: {exc}") from exc

    async def consumer_info(self, stream: str, consumer: str) -> dict[str, Any] | None:
        try:
            return await self.api(f"CONSUMER.INFO.{stream}.{consumer}")
        except ApiError as exc:
            if exc.code in (NO_STREAM, NO_CONSUMER):
                return None
            raise Unavailable(f"consumer {consumer} of {stream}: {exc}") from exc

    async def ensure_stream(self, config: dict[str, Any]) -> str:
        """Create or update; returns `created`, `updated` or `unchanged`. Raises Misconfigured."""
        name = config["name"]
        info = await self.stream_info(name)
        verb = "CREATE" if info is None else "UPDATE"
        if info is not None and _covers(info["config"], config):
            return "unchanged"
        try:
            await self.api(f"STREAM.{verb}.{name}", config)
        except ApiError as exc:
            raise Misconfigured(f"stream {name} cannot be made as configured: {exc}") from exc
        return "created" if info is None else "updated"

    async def ensure_consumer(self, stream: str, config: dict[str, Any]) -> str:
        """Create or update a durable consumer; returns as `ensure_stream`. Raises Misconfigured."""
        name = config["durable_name"]
        info = await self.consumer_info(stream, name)
        if info is not None and _covers(info["config"], config):
            return "unchanged"
        body = {"stream_name": stream, "config": config, "action": "" if info else "create"}
        try:
            await self.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", body)
        except ApiError as exc:
            raise Misconfigured(f"consumer {name} of {stream} cannot be made as configured: {exc}") from exc
        return "created" if info is None else "updated"

    async def check_consumers(self, wanted: list[tuple[str, str]]) -> None:
        """Raise Misconfigured, naming `pdq init`, when one of (stream, consumer) is missing.

        Waits for a broker that goes away meanwhile, as `patiently` does.
        """
        for stream, consumer in wanted:
            if await self.patiently(partial(self.consumer_info, stream, consumer)) is None:
                raise Misconfigured(f"consumer {consumer} of stream {stream} does not exist: run `pdq init`")

    # ---- connection events

    async def _on_error(self, exc: Exception) -> None:
        # The client library reports the same trouble many times a second while a broker is away.
        text = f"{type(exc).__name__}: {exc}"
        if self._reported[0] != text or time.monotonic() - self._reported[1] > 10:
            self._reported = (text, time.monotonic())
            log.warning("broker connection: %s", text)

    async def _disconnected(self) -> None:
        if not self._closing:
            log.warning("lost the broker at %s, reconnecting", self.place)
        for callback in list(self._on_disconnect):
            callback()

    async def _reconnected(self) -> None:
        self.reconnects += 1
        log.info("broker at %s is back", self.place)
        for callback in list(self._on_reconnect):
            callback()

    async def _on_closed(self) -> None:
        self.closed.set()


@contextlib.asynccontextmanager
async def connected(settings: BusSettings, name: str, stop: asyncio.Event) -> AsyncIterator[Bus]:
    """A Bus for the length of a `with`; `stop` ends the waits of a start, with Interrupted."""
    bus = await Bus.connect(settings, name, stop)
    try:
        yield bus
    finally:
        await bus.close()


def _answer(data: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(data)
    error = answer.get("error")
    if error:
        raise ApiError(int(error.get("err_code", 0)), str(error.get("description", "")))
    return answer


def _publish_error(subject: str, exc: ApiError) -> Exception:
    if exc.code in WRONG_LAST_SEQUENCE:
        return WrongSequence(f"{subject}: {exc}")
    if exc.code == STORE_FULL:
        return QueueFull(f"{subject}: {exc}", per_subject="per subject" in str(exc))
    if exc.code == TOO_LARGE:
        return Rejected(f"publish to {subject}: {exc}", code="payload_too_large")
    return Unavailable(f"publish to {subject}: {exc} ({exc.code})")


def _covers(actual: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether every wanted value is what the server has; it adds fields of its own, and drops false ones."""
    return all(actual.get(name) == value or (not value and not actual.get(name)) for name, value in wanted.items())


def _direct(headers: dict[str, str], data: bytes) -> Stored:
    return Stored(
        headers["Nats-Subject"],
        int(headers["Nats-Sequence"]),
        bytes(data),
        headers,
        _seconds(headers["Nats-Time-Stamp"]),
    )


def _seconds(stamp: str) -> float:
    """RFC 3339 with up to nanoseconds, to Unix seconds."""
    head, _, fraction = stamp.rstrip("Z").partition(".")
    whole = datetime.fromisoformat(head + "+00:00").timestamp()
    return whole + (float(f"0.{fraction}") if fraction else 0.0)


def _parse_headers(raw: bytes) -> dict[str, str]:
    headers = {}
    for line in raw.decode("utf-8", "replace").split("\r\n")[1:]:
        name, found, value = line.partition(":")
        if found:
            headers[name.strip()] = value.strip()
    return headers
