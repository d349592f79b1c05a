"""Where a request waits: its priority's lane, or the one behind all."""

from __future__ import annotations

import pytest
from pdq.errors import Rejected
from pdq.log import first, follow
from pdq.messages import LANES, PRIORITIES, Lane, Priority, StageClaims, State
from pdq.settings import LimitSettings
from pdq.subjects import consumers
from pdq.tenants import Limits
from pdq.tenants.limiter import Limiter
from pdq.tenants.usage import OTHERS_S, TenantUsage
from pdq_router.admission import Overloaded
from pdq_router.shares import Shares

from tests.unit.test_tenants_limits import Clock, heard

SHARE = 3
NONE = Limits()


class Router:
    """The share of two registered tenants, as one router sees it."""

    def __init__(self, *, fair_share: int = SHARE, registered: bool = True, limits: Limits = NONE) -> None:
        self.clock = Clock()
        self.usage = TenantUsage(3_600.0, self.clock)
        self.shares = Shares(self.usage, Limiter(self.usage, lambda _: limits), lambda _: registered, fair_share)
        self.number = 0

    def route(self, tenant: str = "a", priority: Priority = "normal", model: str = "m") -> Lane:
        self.number += 1
        return self.shares.admit(tenant, f"r{self.number}", model=model, priority=priority, tokens=1)

    def hear(self, request: str, state: State, tenant: str = "a") -> None:
        self.usage.hear(heard(state, request, tenant))


def test_what_is_over_the_share_waits_behind_all() -> None:
    router = Router()
    assert [router.route() for _ in range(5)] == ["normal"] * SHARE + ["excess"] * 2
    assert [router.route("b") for _ in range(4)] == ["normal"] * SHARE + ["excess"]


def test_a_share_is_of_a_model_and_a_priority() -> None:
    router = Router()
    for priority in PRIORITIES:
        assert [router.route(priority=priority) for _ in range(SHARE + 1)] == [priority] * SHARE + ["excess"]
    assert router.route(model="n") == "normal"


def test_a_tenant_that_has_worked_off_its_flood_has_its_share_again() -> None:
    router = Router()
    assert [router.route() for _ in range(5)][-1] == "excess"
    claimed = first("claim", model="m", decode=StageClaims(attempt=1, owner="w"))
    for request in ("r1", "r2"):
        router.hear(request, claimed)
    assert router.route() == "excess", "three of its six wait still, and one more"
    router.hear("r3", claimed)
    router.hear("r4", follow(claimed, "finished"))
    assert router.route() == "normal"


def test_alone_there_is_nobody_to_be_fair_to() -> None:
    router = Router(registered=False)
    assert {router.route() for _ in range(10)} == {"normal"}
    assert router.route("b") == "normal"
    assert router.route() == "excess", "b was heard of"
    router.clock.now += OTHERS_S + 1
    assert router.route() == "normal", "not for an hour now"


def test_without_a_share_everybody_waits_in_one() -> None:
    router = Router(fair_share=0)
    assert {router.route(tenant) for _ in range(100) for tenant in ("a", "b")} == {"normal"}


def test_a_request_that_is_not_routed_after_all_takes_no_share() -> None:
    router = Router()
    for _ in range(SHARE):
        router.route()
    router.shares.forget("a", "r1")
    assert router.route() == "normal" and router.route() == "excess"


def test_a_limit_is_an_overload_of_the_tenant_only() -> None:
    router = Router(limits=Limits(requests_in_flight=1, tokens_per_minute=5))
    router.route()
    with pytest.raises(Overloaded) as refused:
        router.route()
    assert (refused.value.code, refused.value.retry_after_s) == ("rate_limit_exceeded", 1.0)
    assert router.route("b") == "normal"
    with pytest.raises(Rejected) as never:
        router.shares.admit("c", "r", model="m", priority="low", tokens=6)
    assert never.value.code == "invalid_value" and not isinstance(never.value, Overloaded)


def test_every_lane_has_its_consumer() -> None:
    names = [spec.config["durable_name"] for spec in consumers(LimitSettings().of_streams(), ["m"])]
    assert LANES == (*PRIORITIES, "excess")
    assert [name for name in names if name.startswith("m-")] == [f"m-{lane}" for lane in LANES] * 2
