"""The bucket PDQ_TENANTS, for those who go by it: whose a key is, and what a tenant may have.

A directory holds all records in memory and asks every second what is new: one small question to the stream's leader,
and the records since the last answer. So a key that is added, revoked or limited counts within `REFRESH_S` and a round
trip, in every process that has a directory. While the broker is away it serves with what it knows: nothing
new can be submitted then.
"""

from __future__ import annotations

import asyncio
import logging

from pdq import subjects
from pdq.bus import Bus, Stored
from pdq.errors import Misconfigured, Unauthorized, Unavailable
from pdq.tenants.records import LONGEST_KEY_CHARS, KeyRecord, Limits, TenantRecord, digest_of
from pdq.tenants.store import is_deleted, read_after, record_of

log = logging.getLogger("pdq.tenants")

REFRESH_S = 1.0
NO_LIMITS = Limits()


class Directory:
    """`start` it, then `run` it beside what uses it."""

    def __init__(self, bus: Bus) -> None:
        self.any_seen = False
        """A tenant was there at some time: from then on keys are needed, whatever becomes of the bucket."""
        self.names: frozenset[str] = frozenset()
        """Of all tenants."""
        self._bus = bus
        self._records: dict[str, TenantRecord | KeyRecord | None] = {}
        """By subject; None: it was deleted, or cannot be read."""
        self._seq = 0
        self._created = ""
        self._failing = ""

    async def start(self) -> None:
        """Read all records. Waits for the broker as `patiently` does; raises Misconfigured without the bucket."""
        await self._bus.patiently(self.refresh)

    async def run(self) -> None:
        """Follow what changes, until cancelled. It never ends by itself: what cannot be read is said once."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
                self._failing = ""
            except (Unavailable, Misconfigured) as exc:
                self._say(str(exc))
            except Exception:
                if not self._failing:
                    log.exception("tenants cannot be read")
                self._failing = "exception"

    async def refresh(self) -> None:
        """Take in what changed since the last time. Raises Unavailable, or Misconfigured without the bucket."""
        info = await self._bus.stream_info(subjects.TENANTS)
        if info is None:
            raise Misconfigured(f"stream {subjects.TENANTS} does not exist: run `pdq init`")
        created, state = str(info["created"]), info["state"]
        known = self._seq == state["last_seq"]
        # Another bucket, or one from which something was removed, is read anew.
        whole = created != self._created or (known and len(self._records) != state["messages"])
        if whole or not known:
            found = await read_after(self._bus, 0 if whole else self._seq)
            # Where nothing is left, nothing tells how far this has read.
            self._seq = (0 if state["messages"] else int(state["last_seq"])) if whole else self._seq
            self._take(found, {} if whole else self._records)
            self._created = created

    def tenant_of(self, key: str) -> str:
        """The tenant that a key is of. Raises Unauthorized."""
        record = None
        if len(key) <= LONGEST_KEY_CHARS:
            record = self._records.get(subjects.key_record(digest_of(key)))
        if not isinstance(record, KeyRecord) or not record.valid(self._tenant(record.tenant)):
            raise Unauthorized("the API key is not valid: `pdq tenant add NAME` makes one")
        return record.tenant

    def limits(self, tenant: str) -> Limits:
        """Of a tenant that has no record: none."""
        record = self._tenant(tenant)
        return record.limits if record is not None else NO_LIMITS

    def others(self, tenant: str) -> bool:
        """Whether there is a record of any other tenant."""
        return len(self.names) > (tenant in self.names)

    def _tenant(self, tenant: str) -> TenantRecord | None:
        record = self._records.get(subjects.tenant_record(tenant))
        return record if isinstance(record, TenantRecord) else None

    def _take(self, stored: list[Stored], records: dict[str, TenantRecord | KeyRecord | None]) -> None:
        """Add what was read to `records`, which are those that hold from now on."""
        for one in stored:
            records[one.subject] = record = record_of(one)
            self._seq = one.seq
            if record is None and not is_deleted(one):
                log.warning("a record of tenants cannot be read: its keys are not valid here", extra={"seq": one.seq})
        self._records = records
        self.names = frozenset(record.tenant for record in records.values() if isinstance(record, TenantRecord))
        self.any_seen = self.any_seen or bool(self.names)

    def _say(self, trouble: str) -> None:
        if trouble != self._failing:
            log.warning("tenants cannot be read, those known stay: %s", trouble)
        self._failing = trouble
