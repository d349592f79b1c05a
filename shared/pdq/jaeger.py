"""Traces asked of a Jaeger over its query API, `/api/v3`, which answers in OTLP JSON.

(jaegertracing.io, "APIs": `/api/v3` is the supported surface, port 16686. Of the versions in use some answer with
the trace itself, newer ones wrap it in `result`; an error is `{"error": {"httpCode": ..., "message": ...}}`.)
"""

from __future__ import annotations

from urllib.parse import urlsplit

import aiohttp
import msgspec

from pdq import logs, otlp, traces
from pdq.errors import Misconfigured, NotDecodable, Unavailable
from pdq.traces import Trace

TIMEOUT_S = 5.0
MAX_BYTES = 64 << 20
"""The largest answer that is read: some hundred thousand spans."""
MAX_SHOWN = 200
NOT_FOUND = 404


class _Error(msgspec.Struct, rename="camel"):
    message: str = ""
    http_code: int = 0


class _Answer(msgspec.Struct, rename="camel"):
    result: msgspec.Raw = msgspec.Raw(b"")
    error: _Error | None = None


class Jaeger:
    """One Jaeger, by the address of its query service. Raises Misconfigured for what is no address."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Misconfigured(f"{logs.scrub(url)!r} is not the address of a Jaeger: http://HOST:16686")
        self._url = url.rstrip("/")
        self.place = logs.scrub(self._url)
        """The address, for people."""

    async def trace(self, trace_id: str) -> Trace | None:
        """A trace by its id (32 hex digits), or None when it is not there (yet). Raises Unavailable."""
        request = await self.export(trace_id)
        try:
            found = traces.of_export(request) if request is not None else []
        except ValueError as exc:
            raise Unavailable(f"the Jaeger at {self.place} answers with spans that cannot be read: {exc}") from exc
        return next((trace for trace in found if trace.trace_id == trace_id), None)

    async def export(self, trace_id: str) -> otlp.ExportRequest | None:
        """The same as OTLP has it, span for span."""
        status, body = await self._get(f"/api/v3/traces/{trace_id}")
        try:
            answer = msgspec.json.decode(body, type=_Answer)
            if answer.error is None and status == 200:
                return otlp.decode(bytes(answer.result) or body)
        except (msgspec.MsgspecError, NotDecodable, RecursionError) as exc:
            raise Unavailable(f"{self.place} does not answer as a Jaeger does (HTTP {status})") from exc
        error = answer.error or _Error()
        if NOT_FOUND in (status, error.http_code) or "trace not found" in error.message:
            return None
        raise Unavailable(f"the Jaeger at {self.place} answers {status}: {_shown(error.message)}")

    async def _get(self, path: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url + path, headers={"Accept": "application/json"}) as response,
            ):
                body = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise Unavailable(f"the Jaeger at {self.place} answers with more than {MAX_BYTES >> 20} MiB")
                return response.status, bytes(body)
        except TimeoutError as exc:
            raise Unavailable(f"no answer from the Jaeger at {self.place} within {TIMEOUT_S:g} s") from exc
        except aiohttp.ClientError as exc:
            raise Unavailable(f"the Jaeger at {self.place} cannot be asked: {type(exc).__name__}") from exc


def _shown(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:MAX_SHOWN]
