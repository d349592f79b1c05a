"""What a tenant may take: its limits, and its fair share of a queue.

The queues of a model are first come, first served, so a tenant that sends five hundred requests would be waited for by
all others. Of each tenant, model and priority only `fair_share` requests wait in the lane of their priority; what is
over goes to one lane behind all of them, which gets the turns that they leave, and one of fifteen else. So a request of
another tenant waits for a share of each tenant before it, however many they send. Where there is only one tenant there
is nobody to be fair to: all lanes are those of the priorities.

The lane stands in the request's register, so a submit that is delivered again gets the job that it had.
"""

from __future__ import annotations

from collections.abc import Callable

from pdq.errors import OverLimit
from pdq.messages import Lane, Priority
from pdq.tenants.limiter import Limiter
from pdq.tenants.usage import TenantUsage

from pdq_router.admission import Overloaded


class Shares:
    """registered: whether there is a record of any tenant but this one. fair_share: 0 is none."""

    def __init__(
        self, usage: TenantUsage, limiter: Limiter, registered: Callable[[str], bool], fair_share: int
    ) -> None:
        self._usage = usage
        self._limiter = limiter
        self._registered = registered
        self._fair_share = fair_share

    def admit(self, tenant: str, request: str, *, model: str, priority: Priority, tokens: int) -> Lane:
        """Count a request from now on, and say where it waits.

        Raises Overloaded, or Rejected for what is over a limit by itself.
        """
        lane = self._lane(tenant, model, priority)
        try:
            self._limiter.admit(tenant, request, model=model, priority=priority, tokens=tokens)
        except OverLimit as exc:
            raise Overloaded(str(exc), code=exc.code, retry_after_s=exc.retry_after_s) from exc
        return lane

    def forget(self, tenant: str, request: str) -> None:
        """Count a request no more that was not routed."""
        self._usage.forget(tenant, request)

    def _lane(self, tenant: str, model: str, priority: Priority) -> Lane:
        if not self._fair_share or self._usage.of(tenant).waiting[model, priority] < self._fair_share:
            return priority
        return "excess" if self._registered(tenant) or self._usage.others(tenant) else priority
