"""What a worker measures of its own work, and what a router makes of the workers' beats."""

from __future__ import annotations

import pytest
from pdq.engines.base import Phase
from pdq.messages import Costs, WorkerBeat
from pdq.stage import costs
from pdq.stage.costs import CostMeter
from pdq_router.workers import Queue, stages_of

S = 1_000_000_000


def phase(name: str, start_s: float, end_s: float, first_token_s: float = 0.0, **attributes: float) -> Phase:
    events = (("first_token", int(first_token_s * S)),) if first_token_s else ()
    named = {f"pdq.{key.replace('_', '.', 1) if key.startswith('kv_') else key}": n for key, n in attributes.items()}
    return Phase(name=name, start_ns=int(start_s * S), end_ns=int(end_s * S), attributes=named, events=events)


def meter() -> CostMeter:
    return CostMeter(chunk_tokens=32, kv_bytes_per_token=100)


def test_nothing_is_known_at_first() -> None:
    assert meter().costs() == Costs(kv_bytes_per_token=100)


def test_a_prefill_is_measured_by_what_it_computed() -> None:
    found = meter()
    found.saw(
        (
            phase("kv.lookup", 0, 1, kv_tokens=64, kv_local_tokens=32),
            phase("kv.load", 1, 2, kv_tokens=64, kv_bytes=6_400),
            phase("engine.prefill", 2, 4, tokens=200),
            phase("kv.store", 4, 5, kv_tokens=96, kv_bytes=9_600),
        ),
        200,
    )
    told = found.costs()
    # 104 of 200 tokens were neither loaded nor there.
    assert (told.prompt_tokens_s, told.load_bytes_s, told.store_bytes_s) == (52.0, 6_400.0, 9_600.0)


def test_a_decode_is_measured_up_to_its_first_token() -> None:
    found = meter()
    found.saw((phase("engine.decode", 10, 60, first_token_s=12, tokens=500),), 200)
    assert found.costs().prompt_tokens_s == 100.0


@pytest.mark.parametrize(("computed", "known"), [(31, False), (32, True)])
def test_less_than_a_chunk_is_not_measured(computed: int, known: bool) -> None:
    found = meter()
    load = phase("kv.load", 0, 1, kv_tokens=168, kv_bytes=1)
    found.saw((load, phase("engine.decode", 1, 3, first_token_s=2)), 168 + computed)
    assert (found.costs().prompt_tokens_s > 0) == known


def test_a_store_that_overlaps_the_computing_costs_what_it_adds() -> None:
    found = meter()
    found.saw((phase("engine.prefill", 0, 10), phase("kv.store", 2, 10.5, kv_bytes=1_000)), 100)
    assert found.costs().store_bytes_s == 2_000.0


def test_a_store_that_failed_is_not_measured() -> None:
    found = meter()
    found.saw((phase("engine.prefill", 0, 10), phase("kv.store", 10, 20, kv_bytes=0)), 100)
    assert found.costs().store_bytes_s == 0.0


def test_the_newest_counts_for_a_tenth_once_there_are_many_and_long_work_for_more() -> None:
    found = meter()
    for _ in range(20):
        found.saw((phase("engine.prefill", 0, 1),), 100)
    assert found.costs().prompt_tokens_s == 100.0
    found.saw((phase("engine.prefill", 0, 10),), 100)
    assert found.costs().prompt_tokens_s == pytest.approx(100 / 1.9, abs=0.001)
    few = meter()
    few.saw((phase("engine.prefill", 0, 9),), 100)
    few.saw((phase("engine.prefill", 0, 1),), 100)
    assert few.costs().prompt_tokens_s == 20.0, "the first, a cold engine's, does not last"


def test_what_was_measured_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr(costs.time, "monotonic", lambda: now)
    found = meter()
    found.saw((phase("engine.prefill", 0, 1),), 100)
    now += costs.FORGET_S - 1
    assert found.costs().prompt_tokens_s == 100.0
    now += 1
    assert found.costs().prompt_tokens_s == 0.0


def beat(stage: str, slots: int = 4, kv_usage: float = 0.0, **measured: float) -> WorkerBeat:
    return WorkerBeat(
        worker="w",
        stage=stage,  # type: ignore[arg-type]
        model="m",
        slots=slots,
        kv_usage=kv_usage,
        costs=Costs(kv_bytes_per_token=100, **measured),  # type: ignore[arg-type]
    )


def test_a_stage_is_the_sum_of_its_queues_and_the_mean_of_its_workers() -> None:
    found = stages_of(
        prefill=[Queue(3, 2, 1.5), Queue(1, 1, 4.0), Queue(0, 0, 0.0)],
        prefill_beats=(
            beat("prefill", prompt_tokens_s=100.0, store_bytes_s=10.0, load_bytes_s=7.0),
            beat("prefill", prompt_tokens_s=300.0),
            beat("prefill"),
        ),
        decode=[Queue(0, 5, 0.0)],
        decode_beats=(beat("decode", kv_usage=0.8, load_bytes_s=20.0), beat("decode", slots=2, kv_usage=0.3)),
    )
    prefill, decode = found.prefill, found.decode
    assert (prefill.workers, prefill.waiting, prefill.running, prefill.free_slots, prefill.lag_s) == (3, 4, 3, 9, 4.0)
    assert prefill.prompt_tokens_s == 200.0, "of those that have measured it"
    assert (decode.workers, decode.free_slots, decode.kv_usage, decode.prompt_tokens_s) == (2, 1, 0.3, 0.0)
    assert (found.store_bytes_s, found.load_bytes_s, found.kv_bytes_per_token) == (10.0, 20.0, 100)


def test_a_stage_without_workers() -> None:
    found = stages_of([], (), [Queue(2, 9, 1.0)], ())
    assert (found.prefill.workers, found.prefill.free_slots, found.kv_bytes_per_token) == (0, 0, 0)
    assert (found.decode.waiting, found.decode.free_slots, found.decode.lag_s) == (2, 0, 1.0)
