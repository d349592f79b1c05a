"""The arithmetic of `tests.bench.kv`, and the bare stores that need no server. How quick they are is no matter here."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from pdq.engines.base import Phase

from tests.bench import hops
from tests.bench.handoff import parts, readable_s
from tests.bench.kv_report import ModeResult, Report, Sample, hops_share
from tests.bench.raw import memcpy_s, opened

SAMPLE = Sample(
    tokens=1000,
    bytes=40_000_000,
    plain_s=4.0,
    ttft_s=5.0,
    compute_s=4.0,
    store_s=0.1,
    confirm_s=0.3,
    readable_s=0.5,
    fetch_s=0.2,
    load_s=0.15,
    first_s=0.05,
    memcpy_s=0.01,
    raw_out_s=0.2,
    raw_in_s=0.05,
)
SLOWER = msgspec.structs.replace(SAMPLE, ttft_s=6.0, plain_s=3.0, confirm_s=0.7, load_s=0.45, memcpy_s=0.02)


def test_the_share_is_all_that_moves_kv() -> None:
    assert (SAMPLE.out_s, SAMPLE.in_s) == pytest.approx((0.4, 0.35))
    assert SAMPLE.share == pytest.approx(0.75 / 5.0)
    assert SAMPLE.rest_s == pytest.approx(5.0 - 4.0 - 0.75 - 0.05)


def test_phases_become_parts() -> None:
    """The store is part of prefill's steps; what is not readable at their end is waited for."""
    prefill = (
        _phase("kv.lookup", 0, 5),
        _phase("engine.prefill", 5, 1_005),
        _phase("kv.store", 900, 1_105, {"pdq.kv.transfer_ms": 50.0}),
    )
    decode = (
        _phase("kv.lookup", 1_110, 1_150),
        _phase("kv.load", 1_150, 1_180),
        _phase("engine.decode", 1_180, 1_215, events=(("first_token", 1_210_000_000),)),
    )
    assert parts(prefill, decode) == pytest.approx(
        {
            "compute_s": 0.95,
            "store_s": 0.05,
            "confirm_s": 0.1,
            "fetch_s": 0.04,
            "load_s": 0.03,
            "first_s": 0.03,
        }
    )
    assert readable_s(prefill) == pytest.approx(0.205)


def test_a_store_that_ends_with_the_compute_is_not_waited_for() -> None:
    prefill = (_phase("engine.prefill", 0, 100), _phase("kv.store", 80, 99, {"pdq.kv.transfer_ms": 19.0}))
    decode = (
        _phase("kv.lookup", 100, 101),
        _phase("kv.load", 101, 102),
        _phase("engine.decode", 102, 104, events=(("first_token", 103_000_000),)),
    )
    assert parts(prefill, decode)["confirm_s"] == 0


def test_hops_are_a_share_of_the_time_that_they_add_to() -> None:
    assert hops_share([0.01, 0.9, 0.001], [0.99, 0.99, 50.0]) == pytest.approx(0.01)


def test_the_table_has_rates_ratios_and_shares() -> None:
    result = ModeResult(mode="file", load=1.5, samples=[SAMPLE, SLOWER])
    lines = _report(result).lines()
    out, readable, _, first = [line.split() for line in lines if line.startswith(" ")]
    # Medians are the lower of two: 0.4 s of 0.4 and 0.8; 40 and 40 times a memcpy; 2 and 4 times the bare store.
    assert out == "1000 tokens out, waited 40.0 400 100 4000 40.0 (40.0 … 40.0) 200 2.00 (2.00 … 4.00)".split()
    assert readable == "out, readable 40.0 500 80.0 4000 25.0 (25.0 … 50.0) 200 2.50 (2.50 … 2.50)".split()
    assert first[:8] == "1000 tokens 3000 5000 1.25 (1.25 … 2.00)".split()
    assert first[8:] == "4000 100 300 200 150 50.0 200 15.0 (15.0 … 24.2)".split()
    assert "two durable hops: 10.0 ms" in lines[-1] and "0.20% at 1000 tokens" in lines[-1]


def test_a_mode_without_a_bare_store_has_no_ratio_to_it() -> None:
    bare = msgspec.structs.replace(SAMPLE, raw_out_s=None, readable_s=None)
    lines = _report(ModeResult(mode="p2p", load=1.5, samples=[bare])).lines()
    out, into, _ = [line.split() for line in lines if line.startswith(" ")]
    assert (out[-2:], into[0], into[-4:]) == (["-", "-"], "in", "7.00 (7.00 … 7.00)".split())


@pytest.mark.parametrize("mode", ["file", "p2p"])
def test_a_bare_store_gives_back_what_was_written(mode: str, tmp_path: Path) -> None:
    payload = memoryview(os.urandom(3_000_000))
    with opened(mode, {}, tmp_path) as raw:
        times = raw([payload[:1_000_000], payload[1_000_000:]])
    assert times.in_s is not None and times.in_s > 0
    assert (times.out_s is None) == (mode == "p2p")


def test_a_copy_takes_time() -> None:
    assert memcpy_s(1_000_000) > 0


async def test_hops_are_measured(tmp_path: Path) -> None:
    seconds = await hops.durable_s(tmp_path, 3)
    assert len(seconds) == 3 and min(seconds) > 0


def _phase(
    name: str,
    start_ms: int,
    end_ms: int,
    attributes: dict[str, str | int | float | bool] | None = None,
    events: tuple[tuple[str, int], ...] = (),
) -> Phase:
    times = {"start_ns": start_ms * 1_000_000, "end_ns": end_ms * 1_000_000}
    return Phase(name=name, attributes=attributes or {}, events=events, **times)


def _report(result: ModeResult) -> Report:
    return Report(
        load_before=1.0,
        load_after=2.0,
        cores=2,
        model="m",
        kv_bytes_per_token=46_080,
        repeats=2,
        hops_s=[0.01],
        results=[result],
    )
