"""What pdq asks of JetStream: durable publishes, reads, streams and consumers.

A durable publish is repeated under the same message id until it is acknowledged or its time is up, so a lost
acknowledgement never makes two messages.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import nats.errors

from pdq.bus.cancel import heeding_cancel
from pdq.bus.connection import API_TIMEOUT_S, BrokerErrors, Connection
from pdq.bus.storing import Storing
from pdq.bus.wire import (
    DELETE_FAILED,
    NO_CONSUMER,
    NO_MESSAGE,
    NO_STREAM,
    NOT_NOW,
    OTHER_STREAM,
    Ack,
    ApiError,
    Message,
    Stored,
    answer_of,
    direct,
    encode_headers,
    parse_headers,
    publish_error,
    seconds,
)
from pdq.errors import Misconfigured, NotStored, Rejected, Unavailable
from pdq.settings import BusSettings

ATTEMPT_TIMEOUT_S = 2.0
"""One try of a publish; it is repeated until the publish's own bound."""
PING_TIMEOUT_S = 1.0


class Bus(Connection):
    """A connection that also speaks JetStream. Make it with `connect`, end it with `close`."""

    def __init__(self, settings: BusSettings, name: str, stop: asyncio.Event | None = None) -> None:
        super().__init__(settings, name, stop)
        self._storing = Storing()
        self.on_reconnect(self._storing.forget)

    async def check_storing(self) -> None:
        """Raise Unavailable while there is no connection, or while the broker does not store what is published here."""
        await self.check()
        self._storing.check()

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
        Raises WrongSequence, QueueFull, Rejected (too large) or Unavailable (in doubt: it may be stored); the
        latter as NotStored where the broker is there.
        """
        sent = dict(headers or {})
        if msg_id:
            sent["Nats-Msg-Id"] = msg_id
        if expect_last is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
        head = self._head(data, sent)
        bound = self.settings.publish_timeout_s if timeout_s is None else timeout_s
        give_up = time.monotonic() + bound
        while True:
            try:
                return await self._publish_once(subject, data, head, give_up)
            except (nats.errors.NoRespondersError, nats.errors.TimeoutError, TimeoutError, ConnectionError) as exc:
                if time.monotonic() >= give_up:
                    raise await self._unacknowledged(subject, bound, exc) from exc
            except ApiError as exc:
                if exc.code not in NOT_NOW or time.monotonic() >= give_up:
                    raise publish_error(subject, exc) from exc
            except nats.errors.MaxPayloadError as exc:
                raise Rejected(f"publish to {subject}: payload too large", code="payload_too_large") from exc
            except nats.errors.Error as exc:
                raise Unavailable(f"publish to {subject}: {type(exc).__name__}") from exc
            await asyncio.sleep(min(0.1, max(0.0, give_up - time.monotonic())))

    async def offer(self, subject: str, data: bytes, *, headers: Mapping[str, str], timeout_s: float) -> Ack:
        """As `publish`, in one try: for whoever repeats it in an order of its own. NotStored is known at once."""
        head = self._head(data, headers)
        with _offer_errors(subject):
            return await self._publish_once(subject, data, head, time.monotonic() + timeout_s, most_s=timeout_s)

    async def check_taken(self, subject: str, *, timeout_s: float) -> None:
        """Raise as `offer` does where no stream answers a publish to `subject`. Nothing is stored: it asks for a stream
        of another name."""
        head = encode_headers({"Nats-Expected-Stream": "-"})
        with _offer_errors(subject):
            try:
                await self._publish_once(subject, b"", head, time.monotonic() + timeout_s, most_s=timeout_s)
            except ApiError as exc:
                if exc.code != OTHER_STREAM:
                    raise

    def _head(self, data: bytes, headers: Mapping[str, str]) -> bytes:
        """Headers, encoded. Raises Rejected for what the server would close the connection for, and with it the
        service."""
        head = encode_headers(headers)
        size = len(data) + len(head)
        if size > self.max_payload:
            raise Rejected(
                f"payload of {size} bytes is over the broker's limit of {self.max_payload}",
                code="payload_too_large",
            )
        return head

    async def _publish_once(
        self, subject: str, data: bytes, head: bytes, give_up: float, *, most_s: float = ATTEMPT_TIMEOUT_S
    ) -> Ack:
        # Published while disconnected, it would lie in the client's buffer and run much later, unnoticed.
        while not self._nc.is_connected:
            if time.monotonic() >= give_up:
                raise TimeoutError
            await asyncio.sleep(0.02)
        wait = min(most_s, max(0.05, give_up - time.monotonic()))
        message = await self._nc.ask(subject, data, timeout_s=wait, head=head)
        answer = answer_of(message.data)
        self._storing.worked(subject)
        return Ack(answer["stream"], int(answer["seq"]), bool(answer.get("duplicate")))

    async def _unacknowledged(self, subject: str, bound_s: float, exc: Exception) -> Unavailable:
        """The error of a publish that is given up: the broker is away, or it is there and does not store."""
        no_stream = isinstance(exc, nats.errors.NoRespondersError)
        if no_stream or await self._answers():
            return self._storing.failed(subject, self.place, bound_s, no_stream=no_stream)
        return Unavailable(f"publish to {subject}: no acknowledgement within {bound_s:g} s")

    async def _answers(self) -> bool:
        if not self.connected:
            return False
        try:
            with heeding_cancel():
                await self._nc.flush(timeout=PING_TIMEOUT_S)
        except (nats.errors.Error, TimeoutError, ConnectionError):
            return False
        return True

    async def purge(self, stream: str, subject: str) -> int:
        """Remove the messages of a subject (wildcards allowed) from a stream; returns how many. Raises Unavailable."""
        try:
            answer = await self.api(f"STREAM.PURGE.{stream}", {"filter": subject})
        except ApiError as exc:
            raise Unavailable(f"purge of {subject} in {stream}: {exc}") from exc
        return int(answer.get("purged", 0))

    async def delete(self, stream: str, seq: int, *, erase: bool = False) -> bool:
        """Delete one message; returns whether it was there. erase: overwrite it in the store. Raises Unavailable."""
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": not erase})
        except ApiError as exc:
            if exc.code != DELETE_FAILED:
                raise Unavailable(f"delete of {seq} in {stream}: {exc}") from exc
            return False
        return True

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
            parse_headers(base64.b64decode(message.get("hdrs", ""))),
            seconds(message["time"]),
        )

    async def read(
        self, stream: str, subject: str, *, after: int = 0, limit: int = 256, max_bytes: int = 0
    ) -> list[Stored]:
        """Up to `limit` messages of a subject (wildcards allowed) after a sequence, in stream order; with `max_bytes`
        none after those that come to as much.

        With replicas this may come from a follower that lags: whoever needs a certain message looks for it.
        """
        found: list[Stored] = []
        done = asyncio.get_running_loop().create_future()

        def collect(message: Message) -> None:
            if not message.status:
                found.append(direct(message.headers, message.data))
            elif not done.done():
                done.set_result(message.status)

        inbox = self.inbox()
        subscription = await self.subscribe(inbox, collect, confirm=False)
        try:
            query = {"seq": after + 1, "next_by_subj": subject, "batch": limit, "max_bytes": max_bytes}
            await self.send(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(query), reply=inbox)
            with BrokerErrors(f"read of {stream}"):
                async with asyncio.timeout(API_TIMEOUT_S):
                    status = await done
        finally:
            await self.unsubscribe(subscription)
        if status not in ("204", "404"):
            why = ": this broker has no such stream, or nobody leads it" if status == "503" else ""
            raise Unavailable(f"read of {stream}: status {status}{why}")
        return found

    # ---- JetStream: manage

    async def api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request to JetStream's API. Raises ApiError or Unavailable."""
        payload = msgspec.json.encode(body) if body is not None else b""
        with BrokerErrors(f"JetStream {verb}"):
            message = await self._nc.ask(f"$JS.API.{verb}", payload, timeout_s=API_TIMEOUT_S)
        try:
            return answer_of(message.data)
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
        if info is not None and not differences(info["config"], config):
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
        if info is not None and not differences(info["config"], config):
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


@contextlib.contextmanager
def _offer_errors(subject: str) -> Iterator[None]:
    with BrokerErrors(f"publish to {subject}"):
        try:
            yield
        except nats.errors.NoRespondersError as exc:
            raise NotStored(f"publish to {subject}: no stream takes it") from exc
        except ApiError as exc:
            raise publish_error(subject, exc) from exc


@contextlib.asynccontextmanager
async def connected(settings: BusSettings, name: str, stop: asyncio.Event) -> AsyncIterator[Bus]:
    """A Bus for the length of a `with`; `stop` ends the waits of a start, with Interrupted."""
    bus = await Bus.connect(settings, name, stop)
    try:
        yield bus
    finally:
        await bus.close()


def differences(actual: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of a configuration that the server has otherwise: its value and the wanted one.

    The server adds fields of its own, and drops those that are false or empty.
    """
    pairs = {name: (actual.get(name), value) for name, value in wanted.items()}
    return {name: (has, wants) for name, (has, wants) in pairs.items() if has != wants and (has or wants)}
