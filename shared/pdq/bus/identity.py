"""Who this process is to the broker, and by what it knows the broker."""

from __future__ import annotations

import ssl
import time
from pathlib import Path
from typing import Any

import nats.errors

from pdq import subjects
from pdq.accounts.keys import public_key
from pdq.bus.quick import QuickClient
from pdq.errors import Misconfigured
from pdq.settings import BusSettings

SECURE = "tls://"
PATIENCE_S = 10.0
"""How long a broker that took this process before may refuse it: its keys may be on their way."""


class GuardedClient(QuickClient):
    """The client library's, which tells nothing of itself to a broker without TLS that should have it."""

    def _connect_command(self) -> bytes:
        if "tls" in self.options and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        command: bytes = super()._connect_command()
        return command


def options(settings: BusSettings) -> dict[str, Any]:
    """What the client library must be told of it. Raises Misconfigured."""
    given: dict[str, Any] = {}
    if settings.user:
        given |= {"user": settings.user, "password": settings.password}
    if seed := _seed(settings):
        given |= {"nkeys_seed_str": seed, "inbox_prefix": subjects.inbox(public_key(seed)).encode()}
    if settings.inbox_prefix:
        given["inbox_prefix"] = settings.inbox_prefix.encode()
    if settings.tls_ca or settings.tls_cert or SECURE in settings.url:
        given["tls"] = _tls(settings)
    return given


class Refusals:
    """What speaks against this process since it had a connection; a new one for each that it gets."""

    def __init__(self, num_servers: int) -> None:
        self._left = num_servers
        self._since = 0.0

    def final(self, exc: Exception, *, before: bool) -> str:
        """Why there will be no connection with these settings; empty: there may be one yet.

        before: there has been a connection. Else it is enough that every server refuses.
        """
        why = refusal(exc)
        if why:
            self._left -= 1
            self._since = self._since or time.monotonic()
        over = time.monotonic() - self._since > PATIENCE_S if before else self._left <= 0
        return why if over else ""


def refusal(exc: Exception | None) -> str:
    """What the broker or this process has against the other; empty: nothing, it may work another time."""
    if isinstance(exc, nats.errors.AuthorizationError) or "authorization violation" in str(exc).lower():
        return "refuses these credentials"
    if isinstance(exc, nats.errors.SecureConnWantedError):
        return "has no TLS, and PDQ_NATS_TLS_CA or the address asks for it"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"has a certificate that is not trusted ({exc.verify_message}): PDQ_NATS_TLS_CA names whose are"
    if isinstance(exc, ssl.SSLError) and "alert" in str(exc.reason).lower():
        return f"refuses the TLS connection ({exc.reason}): does it ask for another PDQ_NATS_TLS_CERT?"
    return ""


def _seed(settings: BusSettings) -> str:
    if settings.nkey_seed or not settings.nkey_file:
        return settings.nkey_seed.strip()
    try:
        return Path(settings.nkey_file).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise Misconfigured(f"PDQ_NATS_NKEY_FILE cannot be read: {exc}") from exc


def _tls(settings: BusSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_cert:
            context.load_cert_chain(settings.tls_cert, settings.tls_key or None)
    except (OSError, ssl.SSLError) as exc:
        files = ", ".join(name for name in (settings.tls_ca, settings.tls_cert, settings.tls_key) if name)
        raise Misconfigured(f"PDQ_NATS_TLS_*: {files}: {exc.strerror or exc}") from exc
    return context
