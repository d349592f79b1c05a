"""Admission by a tenant's limits.

Every router counts the requests of all tenants, however they come in, and checks each one right before it is routed.
Between several routers the counts differ by what is on its way: a limit on what is in flight or queued may be passed by
what the others admit in one round trip of the broker, and no 60 seconds hold more than a limit per minute and that. A
router that starts knows what is in flight from the queues, and begins its minute anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdq.errors import OverLimit, Rejected
from pdq.messages import Priority
from pdq.tenants.records import Limits
from pdq.tenants.usage import TenantUsage

RETRY_AFTER_S = 1.0
"""A hint: nobody knows when a request in flight ends."""


class Limiter:
    """limits_of: a tenant's limits."""

    def __init__(self, usage: TenantUsage, limits_of: Callable[[str], Limits]) -> None:
        self._usage = usage
        self._limits_of = limits_of

    def admit(self, tenant: str, request: str, *, model: str, priority: Priority, tokens: int) -> None:
        """Count a request, which may take so many tokens, from now on; one that is counted already has its place.

        Raises OverLimit where it must wait, and Rejected where it never fits.
        """
        if (tenant, request) not in self._usage:
            self.check(tenant, tokens)
            self._usage.admit(tenant, request, model=model, priority=priority, tokens=tokens)

    def check(self, tenant: str, tokens: int) -> None:
        """Raise OverLimit or Rejected where a request of so many tokens is over a limit now, or ever."""
        limits = self._limits_of(tenant)
        for name in ("tokens_in_flight", "tokens_per_minute"):
            if 0 < getattr(limits, name) < tokens:
                raise _never(tenant, tokens, name, getattr(limits, name))
        have, now = self._usage.of(tenant), self._usage.now()
        _at_one_time(tenant, "requests_in_flight", len(have.entries), 1, limits.requests_in_flight)
        _at_one_time(tenant, "requests_queued", have.waiting.total(), 1, limits.requests_queued)
        _at_one_time(tenant, "tokens_in_flight", have.tokens, tokens, limits.tokens_in_flight)
        for name, window, amount in (
            ("requests_per_minute", have.requests_minute, 1),
            ("tokens_per_minute", have.tokens_minute, tokens),
        ):
            limit = getattr(limits, name)
            if limit and (wait := window.wait_s(amount, limit, now)):
                raise _over(tenant, name, window.total(now), amount, limit, wait)


def _at_one_time(tenant: str, name: str, has: int, amount: int, limit: int) -> None:
    if limit and has + amount > limit:
        raise _over(tenant, name, has, amount, limit, RETRY_AFTER_S)


def _over(tenant: str, name: str, has: int, amount: int, limit: int, wait_s: float) -> OverLimit:
    named = name.replace("_", " ")
    hint = max(1, math.ceil(wait_s * 10)) / 10
    message = f"tenant {tenant} is at its limit of {limit} {named}: it has {has}, this request adds {amount}"
    return OverLimit(f"{message}: try again in {hint:g} s", limit=name, value=limit, retry_after_s=hint)


def _never(tenant: str, tokens: int, name: str, limit: int) -> Rejected:
    message = (
        f"prompt and answer may take {tokens} tokens; the limit of tenant {tenant} is {limit} {name.replace('_', ' ')}"
    )
    return Rejected(message, code="invalid_value", param="max_tokens")
