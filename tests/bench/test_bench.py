"""The benchmark runs, and its figures make sense. How large they are is no matter of tests."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pdq.bus import Bus
from pdq.settings import BusSettings, LimitSettings

from tests.bench import cpu, saturation, scale, streams, tokens
from tests.bench.load import offer
from tests.bench.paths import FloorPath, make_floor_streams
from tests.bench.report import PROCESSES, Round, summarise
from tests.bench.shape import NUM_STATES, Shape
from tests.bench.stats import percentile, ratios, spread
from tests.bench.workers import shares
from tests.broker import Broker

ROOT = Path(__file__).parents[2]


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)


def test_ratios_are_those_of_each_round() -> None:
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == spread([2.0, 3.0, 4.0])
    assert ratios([1.0], [0.0]) is None


def test_a_summary_counts_cpu_per_request() -> None:
    floor = Round([0.001, 0.002], [0.002, 0.004], 2, dict.fromkeys(PROCESSES, 0.004))
    pdq = Round([0.003, 0.004], [0.006, 0.008], 10, dict.fromkeys(PROCESSES, 0.012))
    result = summarise(1, [floor], [pdq], engine_ms=10.0)
    assert result.batches == 5
    rows = {row.name: row for row in result.cpu + result.latency}
    assert (rows["total"].floor_ms, rows["total"].pdq_ms) == pytest.approx((10.0, 30.0))
    assert (less := rows["total, less the engine"].ratio) is not None and less.median == pytest.approx(2.0)
    assert rows["end p99"].ratio == spread([2.0])


async def test_both_paths_finish_every_request() -> None:
    command = [sys.executable, "-m", "tests.bench.control", "--requests", "4", "--rounds", "2", "--at-once", "1", "3"]
    process = await asyncio.create_subprocess_exec(*command, "--json", cwd=ROOT, stdout=subprocess.PIPE)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0
    report = json.loads(out)
    shape = report["shape"]
    assert len(shape["states"]) == 6 and len(shape["outs"]) > 1
    assert min(shape["submit"], shape["prefill_job"], shape["decode_job"], *shape["states"], *shape["outs"]) > 0
    assert [(result["at_once"], result["requests"]) for result in report["results"]] == [(1, 8), (3, 8)]
    for result in report["results"]:
        assert [row["name"] for row in result["cpu"]] == [*PROCESSES, "total", "total, less the engine"]
        for row in result["latency"] + result["cpu"]:
            assert row["floor_ms"] > 0 and row["pdq_ms"] > 0, row
            assert row["ratio"]["min"] > 0, row


async def test_every_token_that_a_bare_subscriber_sees_comes_by_a_stream(tmp_path: Path) -> None:
    options = argparse.Namespace(streams=20, workers=2, seconds=3.0, slower=20.0)
    report = await streams.run(options, tmp_path)
    assert report.events >= 20 and (report.missing, report.failed) == (0, ())
    assert report.tokens_per_cpu_s > 0 and report.added_p99_ms >= report.added_p50_ms


async def test_what_a_request_costs_is_told_by_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "SETTLE_S", 0.1)
    monkeypatch.setattr(saturation, "MOST_STEPS", 1)
    options = argparse.Namespace(
        workers=[4, 8], rate=10.0, seconds=1.0, rounds=1, trial_seconds=0.5, profile="instant", trace_sample=1.0
    )
    report = await scale.run(options, tmp_path)
    assert [size.workers for size in report.sizes] == [4, 8]
    for size in report.sizes:
        assert (size.floor.requests, size.pdq.requests) == (10, 10)
        groups = {"router", "prefill", "decode", "nats-server", "client"}
        assert groups == set(size.pdq.cpu_ms) == set(size.floor.cpu_ms) == set(size.idle_cores)
        assert size.pdq.added_first_p50 and size.pdq.added_end_p50 <= size.pdq.added_end_p99
        for found in (size.floor_saturation, size.pdq_saturation):
            assert {trial.failed for trial in found.trials} == {0} and set(found.trials[0].cores) == groups
    assert report.flat == (report.growth <= 1.2) and "from 4 to 8 workers" in report.lines()[-1]


async def test_a_full_queue_of_the_floors_is_a_load_that_failed_in_part(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    broker.start()
    try:
        bus = await Bus.connect(BusSettings(url=broker.url), "test")
        await make_floor_streams(bus, LimitSettings(submit_per_subject=1).of_streams())
        shape = Shape(submit=100, prefill_job=100, decode_job=100, states=[100] * NUM_STATES, outs=[100])
        async with FloorPath(broker.url, shape) as floor:
            assert not (await offer(floor, rate=1.0, seconds=1.0)).failed
            offered = await offer(floor, rate=1e6, seconds=1e-4)
        await bus.close()
    finally:
        broker.stop()
    assert len(offered.answers) + len(offered.failed) == 100 and offered.answers
    assert {failure.partition(" ")[0] for failure in offered.failed} == {"ServiceUnavailableError:"}


@pytest.mark.parametrize(
    ("count", "expected"),
    [(500, [100] * 5), (5, [1] * 5), (7, [2, 2, 1, 1, 1]), (2, [1, 1]), (0, [])],
)
def test_workers_are_spread_over_as_many_processes(count: int, expected: list[int]) -> None:
    assert shares(count, 5) == expected


@pytest.mark.parametrize("edge", [3.0, 40.0, 55.0, 170.0])
async def test_the_edge_of_what_is_sustained_is_found(edge: float) -> None:
    async def attempt(rate: float) -> saturation.Trial:
        return saturation.Trial(rate, rate <= edge, rate, 0.0, 0, {}, f"limit at {rate:.1f}")

    found = await saturation.search(attempt, 50.0)
    assert edge / 1.07 < found.sustained <= edge if edge > 3 else found.sustained == 0
    over = min(trial.rate for trial in found.trials if not trial.sustained)
    most = saturation.TRIES * (saturation.MOST_STEPS + saturation.HALVINGS)
    assert found.limit == f"limit at {over:.1f}" and len(found.trials) <= most


async def test_a_rate_that_fails_once_is_no_limit() -> None:
    seen: list[float] = []

    async def attempt(rate: float) -> saturation.Trial:
        seen.append(rate)
        return saturation.Trial(rate, rate <= 100 and seen.count(rate) == 2, rate, 0.0, 0, {}, "?")

    assert 100 / 1.07 < (await saturation.search(attempt, 50.0)).sustained <= 100


async def test_a_rate_that_is_never_too_high_has_no_limit() -> None:
    async def attempt(rate: float) -> saturation.Trial:
        return saturation.Trial(rate, True, rate, 0.0, 0, {}, "?")

    found = await saturation.search(attempt, 1.0)
    assert found.limit == "not reached" and len(found.trials) == saturation.MOST_STEPS


def test_what_limits_is_a_process_that_has_a_core_or_else_all_cores() -> None:
    def told(spent: dict[str, list[float]], idle: float) -> str:
        return cpu.limit(cpu.Usage(2.0, spent, idle), 2)

    assert told({"a": [1.8], "b": [0.4, 0.6]}, 0.0) == "a: 0.90 of one core"
    assert told({"a": [1.4], "b": [1.2, 1.2]}, 0.05) == "the cores (1.9 of 2, b 1.2 of them)"
    assert told({"a": [1.4], "b": [0.6]}, 0.05) == "the cores (1.0 of 2, a 0.7 of them; other work 0.9)"
    assert told({"a": [1.4], "b": []}, 0.3) == "no process, and not the cores (0.7 of 2, a 0.7 of them)"


async def test_every_token_of_every_answer_comes_to_the_reader(tmp_path: Path) -> None:
    report = await tokens.run(argparse.Namespace(requests=4, tokens=160, rounds=1), tmp_path)
    assert set(report.rounds) == {"floor", "pdq"}
    for (result,) in report.rounds.values():
        assert result.tokens_per_s > 0 and result.batch > 1 and min(result.cpu_us.values()) > 0
