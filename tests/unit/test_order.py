"""The order of a request, as a decision table: every rule, and the border of each."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pdq.messages import AskedOrder, Order, OrderReason
from pdq_router.order import LEAST_WAIT_S, WAIT_FACTOR, OrderInputs, StageInputs, decide, estimate

AUTO: AskedOrder = "auto"
PREFILL: Order = "prefill-first"
FIRST: Order = "decode-first"
ONLY: Order = "decode-only"
CHUNK = 32


def stage(**fields: Any) -> StageInputs:
    return StageInputs(**{"workers": 1, "free_slots": 4, **fields})


def inputs(**fields: Any) -> OrderInputs:
    """A long prompt, one live worker a stage with nothing to do, and no cost known."""
    known: dict[str, Any] = {
        "prompt_tokens": 1_000,
        "chunk_tokens": CHUNK,
        "short_prompt_tokens": 256,
        "handoff_s": 0.01,
        "prefill": stage(),
        "decode": stage(),
    }
    return OrderInputs(**known | fields)


def measured(**fields: Any) -> OrderInputs:
    """Workers that compute 1,000 prompt tokens a second; KV of 1 kB a token moves at 1 MB a second, each way.

    So a prompt of 960 tokens takes 0.96 s to compute, and its KV 0.96 s to store and as much to load.
    """
    known: dict[str, Any] = {
        "prompt_tokens": 960,
        "prefill": stage(prompt_tokens_s=1_000.0),
        "decode": stage(prompt_tokens_s=1_000.0),
        "kv_bytes_per_token": 1_000,
        "store_bytes_s": 1e6,
        "load_bytes_s": 1e6,
        "handoff_s": 0.0,
    }
    return inputs(**known | fields)


def fast(**fields: Any) -> StageInputs:
    return stage(prompt_tokens_s=1_000.0, **fields)


def quick_prefill(**fields: Any) -> OrderInputs:
    """Prefill, and the way of its KV, are four times as fast as decode: 0.72 s against 0.96 s."""
    return measured(prefill=stage(prompt_tokens_s=4_000.0, **fields), store_bytes_s=4e6, load_bytes_s=4e6)


def asleep(prefill_lag_s: float = 0.0, **fields: Any) -> OrderInputs:
    """No prefill worker is alive; one comes within a minute."""
    return inputs(prefill=StageInputs(lag_s=prefill_lag_s), prefill_start_s=60.0, **fields)


def asleep_measured(prefill_lag_s: float = 0.0, **decode: Any) -> OrderInputs:
    """As it is with prefill at zero: only decode has measured anything. It computes the prompt in 0.96 s."""
    return asleep(prefill_lag_s, prompt_tokens=960, handoff_s=0.0, decode=fast(**decode))


TABLE: list[tuple[str, OrderInputs, Order, OrderReason]] = [
    # what was asked for stands, whatever else is known
    ("asked, short", inputs(requested=PREFILL, prompt_tokens=1), PREFILL, "requested"),
    ("asked, no worker", inputs(requested=PREFILL, default=ONLY, prefill=StageInputs()), PREFILL, "requested"),
    ("asked decode-first, no worker", inputs(requested=FIRST, prefill=StageInputs()), FIRST, "requested"),
    ("asked decode-only", inputs(requested=ONLY, default=PREFILL), ONLY, "requested"),
    # a setting that is an order
    ("set", inputs(default=PREFILL), PREFILL, "default"),
    ("set decode-first", inputs(default=FIRST), FIRST, "default"),
    ("set decode-only", inputs(default=ONLY, prompt_tokens=1, prefill=StageInputs()), ONLY, "default"),
    ("set, a chunk", inputs(default=PREFILL, prompt_tokens=32), PREFILL, "default"),
    ("set, under a chunk", inputs(default=PREFILL, prompt_tokens=31), ONLY, "short_prompt"),
    ("set, no worker", inputs(default=PREFILL, prefill=StageInputs()), ONLY, "no_prefill_worker"),
    ("set decode-first, no worker", inputs(default=FIRST, prefill=StageInputs()), ONLY, "no_prefill_worker"),
    ("set, neither", inputs(default=PREFILL, prompt_tokens=1, prefill=StageInputs()), ONLY, "no_prefill_worker"),
    # auto, asked for or set
    ("asked for auto", inputs(requested=AUTO, default=ONLY), PREFILL, "long_prompt"),
    ("auto, no worker", inputs(prefill=StageInputs()), ONLY, "no_prefill_worker"),
    ("auto, no worker, measured", measured(prefill=StageInputs(prompt_tokens_s=1.0)), ONLY, "no_prefill_worker"),
    ("auto, under a chunk", inputs(prompt_tokens=31, short_prompt_tokens=0), ONLY, "short_prompt"),
    ("auto, a chunk", inputs(prompt_tokens=32, short_prompt_tokens=0), PREFILL, "long_prompt"),
    # prefill scales from zero: until the oldest job has waited for as long as a start takes, a worker is to come
    ("asleep, set", asleep(default=PREFILL), PREFILL, "default"),
    ("asleep, set, at the last moment", asleep(59.9, default=PREFILL), PREFILL, "default"),
    ("asleep, set, and none came", asleep(60.0, default=PREFILL), ONLY, "no_prefill_worker"),
    ("asleep, set, under a chunk", asleep(default=PREFILL, prompt_tokens=31), ONLY, "short_prompt"),
    ("asleep, set decode-first", asleep(default=FIRST), ONLY, "no_prefill_worker"),
    ("asleep, asked decode-first", asleep(requested=FIRST), FIRST, "requested"),
    ("asleep, auto", asleep(), PREFILL, "long_prompt"),
    ("asleep, auto, and none came", asleep(60.0), ONLY, "no_prefill_worker"),
    ("asleep, auto, under the threshold", asleep(prompt_tokens=255), ONLY, "short_prompt"),
    ("asleep, a chunk cached", asleep(cached_tokens=32), PREFILL, "long_prompt"),
    # ... auto wakes it where decode would take longer than its start: 60 s + 0.96 s = (1 + 250 / 4) × 0.96 s
    ("asleep, decode idle", asleep_measured(), ONLY, "decode_sooner"),
    ("asleep, 249 streams", asleep_measured(running=249), ONLY, "decode_sooner"),
    ("asleep, 251 streams", asleep_measured(running=251), PREFILL, "prefill_sooner"),
    ("asleep, half started", asleep_measured(30.0, running=126), PREFILL, "prefill_sooner"),
    # decode's own queue is waited in either way
    ("asleep, decode lags", asleep_measured(lag_s=600.0, waiting=9), ONLY, "decode_sooner"),
    # what is missing is what counts
    ("all but 31 cached", inputs(cached_tokens=969), ONLY, "cached"),
    ("more than all cached", inputs(cached_tokens=2_000), ONLY, "cached"),
    ("all but 31 cached, measured", measured(cached_tokens=929), ONLY, "cached"),
    # costs not known: a threshold
    ("under the threshold", inputs(prompt_tokens=255), ONLY, "short_prompt"),
    ("at the threshold", inputs(prompt_tokens=256), PREFILL, "long_prompt"),
    ("missing under it", inputs(prompt_tokens=1_000, cached_tokens=745), ONLY, "short_prompt"),
    ("missing at it", inputs(prompt_tokens=1_000, cached_tokens=744), FIRST, "partly_cached"),
    ("no decode worker", inputs(decode=StageInputs()), PREFILL, "long_prompt"),
    # costs known. Nobody else there, and workers alike: moving KV never pays
    ("idle", measured(), ONLY, "decode_sooner"),
    ("idle, KV in no time", measured(store_bytes_s=1e15, load_bytes_s=1e15, handoff_s=0.01), ONLY, "decode_sooner"),
    # four running answers that would stand still for 0.96 s cost as much as that: eight are what it is to move KV
    ("one stream", measured(decode=fast(running=1)), ONLY, "decode_sooner"),
    ("eight streams: even", measured(decode=fast(running=8)), ONLY, "decode_sooner"),
    ("nine streams", measured(decode=fast(running=9)), PREFILL, "prefill_sooner"),
    ("nine streams on two workers", measured(decode=fast(running=9, workers=2)), ONLY, "decode_sooner"),
    # a faster prefill worker, slower by its queue again
    ("prefill four times as fast", quick_prefill(), PREFILL, "prefill_sooner"),
    ("but it lags", quick_prefill(lag_s=0.25, waiting=1), ONLY, "decode_sooner"),
    # decode's own queue is the same for all
    ("decode lags", measured(decode=fast(lag_s=60.0, waiting=9, running=9)), PREFILL, "prefill_sooner"),
    ("decode lags, idle else", measured(decode=fast(lag_s=60.0, waiting=9)), ONLY, "decode_sooner"),
    # what was never measured: a stage is as fast as the other, KV moves in no time
    ("decode not measured", measured(decode=stage(running=9)), PREFILL, "prefill_sooner"),
    ("decode not measured, idle", measured(decode=stage()), ONLY, "decode_sooner"),
    ("prefill not measured", measured(prefill=stage(), decode=fast(running=9)), PREFILL, "prefill_sooner"),
    (
        "KV never moved",
        measured(store_bytes_s=0.0, load_bytes_s=0.0, decode=fast(running=1)),
        PREFILL,
        "prefill_sooner",
    ),
    # decode may look first where it likely holds half or more, and a slot is to spare
    ("half cached", inputs(cached_tokens=500), FIRST, "partly_cached"),
    ("less than half cached", inputs(cached_tokens=499), PREFILL, "long_prompt"),
    ("half cached, measured", measured(cached_tokens=480, decode=fast(running=9)), FIRST, "partly_cached"),
    ("one slot more than prefills", inputs(cached_tokens=500, prefill=stage(running=3)), FIRST, "partly_cached"),
    ("as many slots as prefills", inputs(cached_tokens=500, prefill=stage(running=4)), PREFILL, "long_prompt"),
    ("no free slot", inputs(cached_tokens=500, decode=stage(free_slots=0)), PREFILL, "long_prompt"),
    ("something waits for prefill", inputs(cached_tokens=500, prefill=stage(waiting=1)), PREFILL, "long_prompt"),
    ("something waits for decode", inputs(cached_tokens=500, decode=stage(waiting=1)), PREFILL, "long_prompt"),
    ("KV nearly full", inputs(cached_tokens=500, decode=stage(kv_usage=0.89)), FIRST, "partly_cached"),
    ("KV full", inputs(cached_tokens=500, decode=stage(kv_usage=0.9)), PREFILL, "long_prompt"),
]


@pytest.mark.parametrize(("given", "order", "reason"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_decision(given: OrderInputs, order: Order, reason: OrderReason) -> None:
    decision = decide(given)
    assert (decision.order, decision.reason) == (order, reason)
    assert decide(given) == decision


def test_the_table_has_every_reason_and_every_order() -> None:
    assert {row[3] for row in TABLE} == set(get_args(OrderReason))
    assert {row[2] for row in TABLE} == set(get_args(Order))


def test_without_a_rate_nothing_is_estimated() -> None:
    assert estimate(measured(prefill=stage(), decode=stage())) is None


@pytest.mark.parametrize("unknown", ["prefill", "decode"])
def test_a_stage_that_has_not_measured_its_rate_has_the_others(unknown: str) -> None:
    assert estimate(measured(**{unknown: stage()})) == estimate(measured())


@pytest.mark.parametrize(
    ("unknown", "way_s"), [("store_bytes_s", 0.96), ("load_bytes_s", 0.96), ("kv_bytes_per_token", 1.92)]
)
def test_a_way_that_was_not_measured_takes_no_time(unknown: str, way_s: float) -> None:
    known, found = estimate(measured()), estimate(measured(**{unknown: 0}))
    assert known is not None and found is not None
    assert found.prefill_first_s == pytest.approx(known.prefill_first_s - way_s)


def test_estimates() -> None:
    given = measured(
        prompt_tokens=1_000,
        cached_tokens=320,
        handoff_s=0.5,
        prefill=stage(prompt_tokens_s=2_000.0, lag_s=10.0, waiting=1),
        decode=fast(lag_s=100.0, waiting=1, running=6, workers=2),
        store_bytes_s=2e6,
        load_bytes_s=4e6,
    )
    found = estimate(given)
    assert found is not None
    # 680 tokens are missing, 672 of them in whole chunks; 992 of all are.
    assert found.prefilled_s == pytest.approx(10 + 0.34 + 0.336 + 0.5)
    assert found.prefill_first_s == pytest.approx(found.prefilled_s + 100 + 0.248)
    assert found.decode_first_s == pytest.approx(found.prefill_first_s + 0.5)
    assert found.decode_only_s == pytest.approx(100 + 0.08 + 1.75 * 0.68)


def test_the_log_gets_all_numbers_and_nothing_that_is_not_known() -> None:
    told = decide(inputs(requested=PREFILL)).inputs
    assert "prefill_start_s" not in told and decide(asleep()).inputs["prefill_start_s"] == 60.0
    assert told["prompt_tokens"] == 1_000 and told["prefill_workers"] == 1 and told["decode_free_slots"] == 4
    assert not [name for name in told if name.startswith("estimate_") or name.endswith(("bytes_s", "tokens_s"))]
    told = decide(measured()).inputs
    assert told["estimate_decode_only_s"] == 0.96 and told["estimate_prefill_first_s"] == 2.88
    assert told["prefill_prompt_tokens_s"] == 1_000 and told["store_bytes_s"] == 1e6
    assert all(isinstance(number, int | float) for number in told.values())


def test_how_long_decode_waits_for_a_prefill() -> None:
    """As long as the setting says; less where it is known to take less, but not next to nothing."""
    assert decide(inputs(requested=FIRST, prefill_wait_s=30.0)).prefill_wait_s == 30.0
    quick = measured(requested=FIRST, prefill_wait_s=30.0)
    assert decide(quick).prefill_wait_s == decide(quick).inputs["prefill_wait_s"] == WAIT_FACTOR * 1.92
    tiny = measured(requested=FIRST, prompt_tokens=32, prefill_wait_s=30.0)
    assert decide(tiny).prefill_wait_s == LEAST_WAIT_S
    assert decide(measured(requested=FIRST, prefill_wait_s=1.0)).prefill_wait_s == 1.0
    lagging = measured(requested=FIRST, prefill=fast(lag_s=60.0, waiting=1), prefill_wait_s=30.0)
    assert decide(lagging).prefill_wait_s == 30.0
