"""What the bucket PDQ_TENANTS holds: one record a tenant, and one an API key.

A key is 32 random bytes behind `pdq_`. It is shown once, when it is made; only its SHA-256 is kept, which is the name
of its record. A slow hash (bcrypt, Argon2) would add nothing: those protect what people make up, and nobody can try all
values of 256 random bits. For the same reason the time that a plain look-up by the hash takes tells nothing of use.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

KEY_BYTES = 32
KEY_BEGIN = "pdq_"
LONGEST_KEY_CHARS = 200
"""Of what a client sends as a key: what is longer is none."""
PREFIX_CHARS = 12
"""How much of a key its record shows, so that people can tell keys apart: 48 of its 256 bits."""
LONGEST_LABEL_CHARS = 64

Limit = Annotated[int, Meta(ge=0, le=10**12)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tenant may have at one time, and in any 60 seconds. 0: no limit.

    Tokens of a request are those of its prompt and the most that it may generate; what it did not generate is given
    back at its end.
    """

    requests_in_flight: Limit = 0
    """Admitted, and not ended."""
    tokens_in_flight: Limit = 0
    """Of the requests in flight."""
    requests_queued: Limit = 0
    """In flight, and at no worker."""
    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0

    def set(self) -> dict[str, int]:
        """Those that limit, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value}


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    v: int = 1
    tenant: str
    created: float
    """Unix seconds, as all times here."""
    generation: int = 1
    """Keys of an older generation are not valid: one write revokes them all, and none of them ever comes back."""
    limits: Limits = Limits()


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    v: int = 1
    tenant: str
    prefix: str
    """Its first characters."""
    created: float
    generation: int = 1
    label: str = ""
    revoked: float = 0.0
    """When it was; 0: it was not by itself."""

    def valid(self, tenant: TenantRecord | None) -> bool:
        return tenant is not None and not self.revoked and self.generation == tenant.generation


def new_key() -> str:
    return KEY_BEGIN + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> str:
    """SHA-256 of a key, in hex. Of any text: what a client sends need be no key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
