"""Whose request it is, and what a tenant that is over its limits gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pdq.errors import OverLimit, PdqError
from pdq.tenants import Access

from pdq_gateway.errors import Failed

PAUSE_S = 0.1


def tenant_of(headers: Mapping[str, str], access: Access) -> str:
    """The tenant of a request, by its API key. `headers`: its own, names in any case. Raises Unauthorized."""
    return access.tenant_of(headers.get("authorization"))


class Refused:
    """Tenants that a router has refused for their limits: for `PAUSE_S` more they get that answer at once, so a flood
    over a limit submits some ten requests a second, whose `failed` the log has to keep."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, tuple[float, Failed]] = {}

    def note(self, tenant: str, error: PdqError) -> None:
        """Take in what a request of a tenant failed with."""
        if isinstance(error, Failed) and error.code == OverLimit.code:
            now = self._clock()
            self._until = {name: held for name, held in self._until.items() if held[0] > now}
            self._until[tenant] = (now + PAUSE_S, error)

    def check(self, tenant: str) -> None:
        """Raise what a tenant was refused with a moment ago."""
        until, error = self._until.get(tenant, (0.0, None))
        if error is not None and until > self._clock():
            raise Failed(error.info)
