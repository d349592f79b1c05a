"""The bucket PDQ_TENANTS, for those who change it: tenants, their keys and limits.

Every change is a compare-and-set on one record, so two operators at one time lose nothing of each other's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import UNREADABLE, Rejected, Unavailable, WrongSequence
from pdq.messages import decode_json, encode_json
from pdq.tenants.records import LONGEST_LABEL_CHARS, PREFIX_CHARS, KeyRecord, Limits, TenantRecord, digest_of, new_key

PAGE = 500
MAX_TRIES = 20

R = TypeVar("R", TenantRecord, KeyRecord)


class Added(NamedTuple):
    """A key that was made. It is nowhere else: who loses it makes another."""

    key: str
    tenant: TenantRecord
    record: KeyRecord


class Known(NamedTuple):
    """A tenant and all keys that it ever had, oldest first."""

    tenant: TenantRecord
    keys: tuple[KeyRecord, ...]

    @property
    def valid_keys(self) -> tuple[KeyRecord, ...]:
        return tuple(key for key in self.keys if key.valid(self.tenant))


class Store:
    """Methods raise Unavailable, and Rejected for what names no tenant or key."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def add(self, tenant: str, *, label: str = "", limits: Mapping[str, int] | None = None) -> Added:
        """Make a key, and its tenant where there is none of this name. `limits`: those to set, by name."""
        _check(tenant, label)
        changes = dict(limits or {})

        def change(newest: TenantRecord | None) -> TenantRecord:
            record = newest or TenantRecord(tenant=tenant, created=time.time())
            return _limited(record, changes)

        owner = await self._update(subjects.tenant_record(tenant), TenantRecord, change)
        key = new_key()
        record = KeyRecord(
            tenant=tenant, prefix=key[:PREFIX_CHARS], created=time.time(), generation=owner.generation, label=label
        )
        await self._update(subjects.key_record(digest_of(key)), KeyRecord, lambda _: record)
        return Added(key, owner, record)

    async def known(self) -> list[Known]:
        """All tenants, by name."""
        tenants, keys = dict[str, TenantRecord](), list[KeyRecord]()
        for stored in await read_after(self._bus, 0):
            record = record_of(stored)
            if isinstance(record, TenantRecord):
                tenants[record.tenant] = record
            elif isinstance(record, KeyRecord):
                keys.append(record)
        keys.sort(key=lambda key: key.created)
        return [Known(tenants[name], tuple(key for key in keys if key.tenant == name)) for name in sorted(tenants)]

    async def one(self, tenant: str) -> Known:
        """A tenant. Raises Rejected when there is none of this name."""
        for known in await self.known():
            if known.tenant.tenant == tenant:
                return known
        raise _unknown(tenant)

    async def limit(self, tenant: str, limits: Mapping[str, int]) -> TenantRecord:
        """Set some of a tenant's limits; 0 takes one away."""
        _check(tenant)

        def change(newest: TenantRecord | None) -> TenantRecord:
            if newest is None:
                raise _unknown(tenant)
            return _limited(newest, limits)

        return await self._update(subjects.tenant_record(tenant), TenantRecord, change)

    async def revoke(self, tenant: str) -> Known:
        """Make all keys of a tenant invalid, for ever and at once. The tenant stays, with its limits."""
        before = await self.one(tenant)

        def change(newest: TenantRecord | None) -> TenantRecord:
            if newest is None:
                raise _unknown(tenant)
            return msgspec.structs.replace(newest, generation=newest.generation + 1)

        await self._update(subjects.tenant_record(tenant), TenantRecord, change)
        return before

    async def revoke_key(self, tenant: str, prefix: str) -> KeyRecord:
        """Make one key of a tenant invalid, by how it begins. Raises Rejected when that names none, or several."""
        found = await self._keys_like(tenant, prefix)

        def change(newest: KeyRecord | None) -> KeyRecord:
            record = newest or found.record
            return record if record.revoked else msgspec.structs.replace(record, revoked=time.time())

        return await self._update(found.subject, KeyRecord, change)

    async def _keys_like(self, tenant: str, prefix: str) -> _Found:
        known = await self.one(tenant)
        # A whole key will do too, so that whoever finds one can revoke it; the record has its beginning only.
        begin = prefix[:PREFIX_CHARS]
        found = []
        for stored in await read_after(self._bus, 0):
            record = record_of(stored)
            if isinstance(record, KeyRecord) and record.tenant == tenant and begin and record.prefix.startswith(begin):
                found.append(_Found(stored.subject, record))
        valid = [one for one in found if one.record.valid(known.tenant)]
        if len(valid) == 1:
            return valid[0]
        shown = begin if begin.isprintable() else ascii(begin)
        if valid:
            raise Rejected(f"{len(valid)} keys of {tenant} begin with {shown}: give more of it", param="--key")
        was = "no valid key" if found else "no key"
        raise Rejected(f"{tenant} has {was} that begins with {shown}", code="not_found", param="--key")

    async def _update(self, subject: str, kind: type[R], change: Callable[[R | None], R]) -> R:
        for _ in range(MAX_TRIES):
            stored = await self._bus.last(subjects.TENANTS, subject)
            present = stored is not None and not is_deleted(stored)
            newest = decode_json(stored.data, kind) if stored is not None and present else None
            record = change(newest)
            if record == newest:
                return record
            try:
                await self._bus.publish(subject, encode_json(record), expect_last=stored.seq if stored else 0)
            except WrongSequence:
                continue
            return record
        raise Unavailable(
            f"{subject.rpartition('.')[0]}: the record changed {MAX_TRIES} times while it was being written"
        )


class _Found(NamedTuple):
    subject: str
    record: KeyRecord


async def read_after(bus: Bus, seq: int) -> list[Stored]:
    """The newest record of each name that was written after a sequence of the bucket, in that order."""
    found: list[Stored] = []
    while True:
        page = await bus.read(subjects.TENANTS, subjects.ALL_TENANTS, after=seq, limit=PAGE)
        found += page
        if len(page) < PAGE:
            return found
        seq = page[-1].seq


def record_of(stored: Stored) -> TenantRecord | KeyRecord | None:
    """A record of the bucket; None for one that was deleted, or that this version cannot read."""
    kind = _kind_of(stored.subject)
    if kind is None or is_deleted(stored):
        return None
    try:
        return decode_json(stored.data, kind)
    except UNREADABLE:
        return None


def _kind_of(subject: str) -> type[TenantRecord] | type[KeyRecord] | None:
    if subject.startswith(subjects.tenant_record("")):
        return TenantRecord
    return KeyRecord if subject.startswith(subjects.key_record("")) else None


def is_deleted(stored: Stored) -> bool:
    """Whether it is the mark that other clients of key-value buckets delete with."""
    return "KV-Operation" in stored.headers


def _limited(record: TenantRecord, changes: Mapping[str, int]) -> TenantRecord:
    try:
        limits = msgspec.convert({**msgspec.structs.asdict(record.limits), **changes}, Limits)
    except msgspec.ValidationError as exc:
        raise Rejected(f"limits: {exc}") from None
    return msgspec.structs.replace(record, limits=limits)


def _check(tenant: str, label: str = "") -> None:
    if not subjects.is_token(tenant):
        raise Rejected(f"tenant {tenant[:40]!a} must match [A-Za-z0-9_-]{{1,64}}", param="NAME")
    if len(label) > LONGEST_LABEL_CHARS or not label.isprintable():
        raise Rejected(f"a label has at most {LONGEST_LABEL_CHARS} printable characters", param="--label")


def _unknown(tenant: str) -> Rejected:
    shown = tenant if subjects.is_token(tenant) else ascii(tenant[:40])
    return Rejected(f"there is no tenant {shown}; `pdq tenant list` shows them", code="not_found", param="NAME")
