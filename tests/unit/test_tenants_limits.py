"""Limits of tenants: what counts, and until when."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq import subjects
from pdq.bus import Stored
from pdq.errors import OverLimit, Rejected
from pdq.log import first, follow
from pdq.messages import Priority, StageClaims, State, Usage, encode_json
from pdq.tenants import Limits
from pdq.tenants.limiter import RETRY_AFTER_S, Limiter
from pdq.tenants.usage import FRESH_S, OTHERS_S, SWEEP_S, UNHEARD_S, TenantUsage
from pdq.tenants.window import LENGTH_S, Window

LONGEST_S = 3_600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def usage(clock: Clock) -> TenantUsage:
    return TenantUsage(LONGEST_S, clock)


def limiter(usage: TenantUsage, **limits: int) -> Limiter:
    """Of a tenant `a` with these limits; others have none."""
    return Limiter(usage, lambda tenant: Limits(**limits) if tenant == "a" else Limits())


def admit(door: Limiter, request: str, tokens: int = 10, tenant: str = "a", priority: Priority = "normal") -> None:
    door.admit(tenant, request, model="m", priority=priority, tokens=tokens)


def admitted(door: Limiter, request: str, tokens: int = 10, tenant: str = "a") -> bool:
    try:
        admit(door, request, tokens, tenant)
    except OverLimit:
        return False
    return True


ROUTED = first("routed", model="m", prompt_tokens=4, max_tokens=6)


def heard(state: State, request: str, tenant: str = "a") -> Stored:
    return Stored(f"pdq.live.{tenant}.{request}.state", 1, encode_json(state), {})


def claimed(state: State) -> State:
    return follow(state, "claim", stage="decode", worker="w", decode=StageClaims(attempt=1, owner="w"))


def finished(state: State, made: int) -> State:
    total = state.prompt_tokens + made
    usage = Usage(prompt_tokens=state.prompt_tokens, completion_tokens=made, total_tokens=total)
    return follow(state, "finished", decode=StageClaims(attempt=1), usage=usage)


# ---- the window


def test_what_is_added_counts_for_a_minute() -> None:
    window = Window()
    window.add(5, 100.9)
    assert window.total(100.9 + LENGTH_S) == 5
    assert window.total(100.9 + LENGTH_S + 1) == 0


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9)), max_size=60),
    st.integers(9, 30),
)
def test_no_minute_holds_more_than_the_limit(arrivals: list[tuple[float, int]], limit: int) -> None:
    window, now, let_in = Window(), 0.0, list[tuple[float, int]]()
    for pause, amount in arrivals:
        now += pause
        if window.wait_s(amount, limit, now) == 0:
            window.add(amount, now)
            let_in.append((now, amount))
    for start, _ in let_in:
        assert sum(amount for at, amount in let_in if start <= at < start + LENGTH_S) <= limit


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9)), min_size=1, max_size=60), st.integers(1, 9))
def test_what_waits_as_long_as_it_is_told_is_let_in(added: list[tuple[float, int]], amount: int) -> None:
    window, now, limit = Window(), 0.0, 9
    for pause, more in added:
        now += pause
        window.add(more, now)
    wait = window.wait_s(amount, limit, now)
    assert 0 <= wait <= LENGTH_S + 1
    if wait > 1:
        assert window.wait_s(amount, limit, now + wait - 1.0) > 0
    assert window.wait_s(amount, limit, now + wait + 1e-6) == 0


def test_a_correction_goes_with_what_it_corrects() -> None:
    window = Window()
    window.add(10, 100.0)
    window.change(-6, 100.0)
    assert window.total(150.0) == 4
    window.add(1, 161.5)
    assert window.total(161.5) == 1
    window.change(-3, 100.0)
    assert window.total(161.5) == 1, "what it would correct has left the window"


# ---- what counts


def test_a_request_counts_from_its_admission_to_its_end(usage: TenantUsage) -> None:
    door = limiter(usage, requests_in_flight=2)
    assert admitted(door, "r1") and admitted(door, "r2") and not admitted(door, "r3")
    routed = follow(ROUTED, "routed")
    usage.hear(heard(routed, "r1"))
    usage.hear(heard(claimed(routed), "r1"))
    assert not admitted(door, "r3")
    usage.hear(heard(finished(routed, 1), "r1"))
    assert admitted(door, "r3") and not admitted(door, "r4")


def test_a_request_that_is_delivered_again_has_its_place(usage: TenantUsage) -> None:
    door = limiter(usage, requests_in_flight=1, requests_per_minute=1)
    assert admitted(door, "r1") and admitted(door, "r1")
    assert not admitted(door, "r2")


def test_what_others_admit_counts_as_soon_as_it_is_heard(usage: TenantUsage) -> None:
    door = limiter(usage, requests_in_flight=2, requests_per_minute=2, tokens_in_flight=25)
    usage.hear(heard(first("accepted", model="m"), "r1"))
    assert not usage.of("a").entries, "it may be refused yet"
    usage.hear(heard(ROUTED, "r1"))
    assert usage.of("a").tokens == 10
    assert admitted(door, "r2", 15) and not admitted(door, "r3", 1)


def test_each_limit_by_itself(usage: TenantUsage, clock: Clock) -> None:
    for name, value, hint in [
        ("requests_in_flight", 3, RETRY_AFTER_S),
        ("requests_queued", 3, RETRY_AFTER_S),
        ("tokens_in_flight", 30, RETRY_AFTER_S),
        ("requests_per_minute", 3, LENGTH_S + 0.8),
        ("tokens_per_minute", 30, LENGTH_S + 0.8),
    ]:
        mine = TenantUsage(LONGEST_S, clock)
        door = limiter(mine, **{name: value})
        for number in range(3):
            admit(door, f"r{number}")
        with pytest.raises(OverLimit, match=name.replace("_", " ")) as refused:
            admit(door, "r3")
        error = refused.value
        assert (error.code, error.limit, error.value) == ("rate_limit_exceeded", name, value)
        assert error.retry_after_s == pytest.approx(hint, abs=0.06)
        assert str(value) in str(error) and f"try again in {error.retry_after_s:g} s" in str(error)
        assert admitted(door, "r3", tenant="b"), "another tenant's limits are its own"


def test_queued_are_those_without_a_worker(usage: TenantUsage) -> None:
    door = limiter(usage, requests_queued=1)
    assert admitted(door, "r1") and not admitted(door, "r2")
    usage.hear(heard(claimed(ROUTED), "r1"))
    assert admitted(door, "r2") and not admitted(door, "r3")
    usage.hear(heard(follow(claimed(ROUTED), "released", decode=StageClaims(attempt=1)), "r1"))
    usage.hear(heard(claimed(ROUTED), "r2"))
    assert not admitted(door, "r3"), "what was given back waits again"
    assert usage.of("a").waiting[("m", "normal")] == 1


def test_tokens_that_were_not_used_are_given_back(usage: TenantUsage) -> None:
    door = limiter(usage, tokens_per_minute=100)
    admit(door, "r1", 100)
    routed = first("routed", model="m", prompt_tokens=20, max_tokens=80)
    usage.hear(heard(routed, "r1"))
    assert not admitted(door, "r2", 70)
    usage.hear(heard(finished(routed, made=10), "r1"))
    assert not admitted(door, "r2", 71) and admitted(door, "r2", 70)
    usage.hear(heard(follow(routed, "failed"), "r2"))
    assert usage.of("a").tokens_minute.total(usage.now()) == 30, "nothing was computed of what failed"


def test_an_estimate_is_corrected_by_what_the_router_counted(usage: TenantUsage) -> None:
    door = limiter(usage, tokens_per_minute=100, tokens_in_flight=100)
    admit(door, "r1", 90)
    usage.hear(heard(ROUTED, "r1"))
    assert (usage.of("a").tokens, usage.of("a").tokens_minute.total(usage.now())) == (10, 10)
    assert admitted(door, "r2", 90)


def test_a_request_that_never_fits_is_not_told_to_try_again(usage: TenantUsage) -> None:
    for name in ("tokens_in_flight", "tokens_per_minute"):
        with pytest.raises(Rejected, match=f"101 tokens.* 100 {name.replace('_', ' ')}"):
            admit(limiter(usage, **{name: 100}), "r1", 101)
    assert not usage.of("a").entries


def test_a_minute_passes(usage: TenantUsage, clock: Clock) -> None:
    door = limiter(usage, requests_per_minute=2)
    assert admitted(door, "r1")
    clock.now += 30
    assert admitted(door, "r2") and not admitted(door, "r3")
    with pytest.raises(OverLimit) as refused:
        admit(door, "r3")
    clock.now += refused.value.retry_after_s
    assert admitted(door, "r3") and not admitted(door, "r4")


def test_what_was_not_routed_after_all_does_not_count(usage: TenantUsage) -> None:
    door = limiter(usage, requests_in_flight=1, requests_per_minute=1, tokens_per_minute=10)
    assert admitted(door, "r1") and not admitted(door, "r2")
    usage.forget("a", "r1")
    usage.forget("b", "r1")
    assert admitted(door, "r2") and not admitted(door, "r3")


def test_what_has_no_limits_is_never_refused(usage: TenantUsage) -> None:
    door = limiter(usage)
    assert all(admitted(door, f"r{number}", 10**9) for number in range(1_000))


# ---- what was missed


def test_an_end_that_was_missed_is_noticed_in_the_queues(usage: TenantUsage, clock: Clock) -> None:
    for request in ("r1", "r2"):
        usage.hear(heard(ROUTED, request))
    clock.now += FRESH_S + 1
    usage.hear(heard(ROUTED, "r3"))
    usage.keep({("a", "r2")})
    assert set(usage.of("a").entries) == {"r2", "r3"}, "r3 is too new to be known by its queue"
    assert usage.of("a").tokens == 20 and usage.of("a").waiting.total() == 2


def test_what_is_read_back_is_in_flight_but_not_of_this_minute(usage: TenantUsage) -> None:
    usage.hear(heard(claimed(ROUTED), "r1"), new=False)
    book = usage.of("a")
    assert len(book.entries) == 1 and book.tokens == 10
    assert book.requests_minute.total(usage.now()) == book.tokens_minute.total(usage.now()) == 0


def test_what_is_never_heard_of_ends_by_itself(usage: TenantUsage, clock: Clock) -> None:
    door = limiter(usage, requests_in_flight=2)
    assert admitted(door, "r1") and admitted(door, "r2") and not admitted(door, "r3")
    usage.hear(heard(ROUTED, "r2"))
    clock.now += max(UNHEARD_S, SWEEP_S) + 1
    assert admitted(door, "r3") and not admitted(door, "r4"), "r1 was known already, say: no router routed it"
    usage.hear(heard(ROUTED, "r3"))
    clock.now += LONGEST_S + 1
    assert admitted(door, "r4") and set(usage.of("a").entries) == {"r4"}


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b'{"event":1}', b'{"priority":"urgent"}'])
def test_what_cannot_be_read_counts_nothing(usage: TenantUsage, data: bytes) -> None:
    usage.hear(Stored("pdq.live.a.r1.state", 1, data, {}))
    assert not usage.of("a").entries


def test_the_end_of_an_unknown_request_counts_nothing(usage: TenantUsage) -> None:
    usage.hear(heard(finished(ROUTED, 1), "r1"))
    assert not usage.of("a").entries and usage.of("a").tokens == 0


def test_tenants_that_are_gone_take_no_room(usage: TenantUsage, clock: Clock) -> None:
    for number in range(100):
        usage.hear(heard(ROUTED, "r1", f"t{number}"))
        usage.hear(heard(finished(ROUTED, 1), "r1", f"t{number}"))
    clock.now += LENGTH_S + SWEEP_S + 1
    usage.of("a")
    assert not usage._books


def test_the_sums_are_those_of_the_entries(usage: TenantUsage) -> None:
    @given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["admit", "routed", "claim", "end", "forget"]))))
    def run(steps: list[tuple[int, str]]) -> None:
        mine = TenantUsage(LONGEST_S, Clock())
        for number, what in steps:
            request = f"r{number}"
            if what == "admit":
                mine.admit("a", request, model=f"m{number % 2}", priority="low", tokens=number)
            elif what == "forget":
                mine.forget("a", request)
            else:
                said = msgspec.structs.replace(ROUTED, model=f"m{number % 2}", priority="low")
                state = {"routed": said, "claim": claimed(said), "end": finished(said, 2)}[what]
                mine.hear(heard(state, request))
        book = mine.of("a")
        assert book.tokens == sum(entry.tokens for entry in book.entries.values())
        for queue in {("m0", "low"), ("m1", "low")}:
            assert book.waiting[queue] == sum(  # type: ignore[index]
                entry.waiting for entry in book.entries.values() if entry.queue == queue
            )
        assert book.waiting.total() == sum(entry.waiting for entry in book.entries.values())
        assert book.tokens_minute.total(mine.now()) >= book.tokens

    run()


# ---- several tenants


def test_a_tenant_is_one_of_several_while_another_was_heard_of_lately(usage: TenantUsage, clock: Clock) -> None:
    assert not usage.others("a")
    usage.hear(heard(ROUTED, "r1", "a"))
    assert not usage.others("a") and usage.others("b")
    usage.hear(heard(ROUTED, "r1", "b"))
    usage.hear(heard(ROUTED, "r2", "b"))
    assert usage.others("a") and usage.others("b") and usage.others("c")
    clock.now += OTHERS_S - 1
    usage.hear(heard(ROUTED, "r2", "a"))
    clock.now += 2
    assert usage.others("b") and not usage.others("a")


def test_all_agree_on_a_subject() -> None:
    assert subjects.parse_log("pdq.live.a.r1.state") == ("a", "r1", "state")
