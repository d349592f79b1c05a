"""What is asked of an LMCache server about its tiers, and what it answers (`pdq.kv.holdings`)."""

from __future__ import annotations

from typing import Literal

import msgspec

TierName = Literal["l1", "l2", "peer"]
"""A server's memory, the pool below it, another server's memory."""


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the whole chunks of `tokens` are."""

    model: str
    world_size: int
    salt: str
    tokens: list[int]


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks from the prompt's begin, without a gap."""

    chunks: int
    """Whole chunks that the prompt has."""
    near: int
    """Those that the server's own memory holds."""
    far: int | None
    """Those that the pool holds; None: there is no pool."""
    not_taken: bool = False
    """The pool has failed to take some: these will not come."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a lookup found."""

    near_tokens: int
    """In the server's own memory."""
    far_tokens: int
    """After these, in `far`."""
    far: TierName

    @property
    def tier(self) -> TierName:
        """The farthest that had a part in it."""
        return self.far if self.far_tokens else "l1"


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of a server."""

    tier: TierName
    kind: str
    """`memory`, or LMCache's name of the adapter."""
    healthy: bool
    used_bytes: int
    """Of a pool: what this server has stored since its start and not evicted."""
    capacity_bytes: int
    """0: not bounded here."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant has in the pool, by this server."""

    salt: str
    used_bytes: int
    quota_bytes: int | None
    """None: it has none."""


class Tiers(msgspec.Struct, frozen=True, kw_only=True):
    """A server's tiers, nearest first, and what lookups found since its start. Tokens count in whole chunks."""

    levels: list[Level]
    tenants: list[Tenant]
    """Those with most, and no more than `MAX_TENANTS`."""
    asked_tokens: int
    near_tokens: int
    far_tokens: int


MAX_TENANTS = 100
