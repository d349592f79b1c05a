"""A short soak, and what its parts say about leaks made up for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from pdq.settings import LimitSettings

from tests.soak import gauges, load
from tests.soak.growth import growth
from tests.soak.load import Workers
from tests.soak.report import Report
from tests.soak.run import Setup, run
from tests.soak.samples import Sample

HOUR_S = 3_600
SHORT = Setup(
    minutes=10 / 60,
    warm_up_minutes=0,
    seed=3,
    rate=8,
    prefill=Workers(2, 8, "llama2-70b-h100-tp8"),
    decode=Workers(2, 8, "llama3-8b-h100"),
    limits=LimitSettings(log_age_s=120, max_deadline_s=20, max_deliver=20, ack_wait_s=2, worker_ttl_s=6),
    sample_s=0.5,
    expire=False,
)


def memory(of: Callable[[float], float], noise: float = 0.5) -> list[tuple[float, float]]:
    """45 minutes of samples, one every 5 s, with noise."""
    rng = random.Random(1)
    return [(float(at), of(at) + rng.gauss(0, noise)) for at in range(900, HOUR_S, 5)]


def saw_tooth(at: float) -> float:
    """A collector that lets 8 MB gather, every two minutes."""
    return at % 120 / 15


@pytest.mark.parametrize("leak", [-2.0, 0.0, 0.3, 1.2, 5.0])
def test_a_leak_is_measured_through_noise_and_a_saw_tooth(leak: float) -> None:
    found = growth(memory(lambda at: 50 + saw_tooth(at) + leak * at / 600))
    assert found.per_10_min == pytest.approx(leak, abs=0.15)
    assert found.last - found.first == pytest.approx(leak * 4.5, abs=5)
    assert 0 < found.error < 0.3


def test_a_single_peak_is_none() -> None:
    found = growth(memory(lambda at: 500 if 3_000 <= at < 3_010 else 50))
    assert abs(found.per_10_min) < 0.15


def test_memory_that_grows_in_one_large_step_is_a_leak() -> None:
    found = growth(memory(lambda at: 50 if at < 2_000 else 54))
    assert found.per_10_min > 1


def test_too_few_samples_tell_nothing() -> None:
    with pytest.raises(ValueError, match="3 samples are too few"):
        growth([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)])


def test_a_report_names_the_process_and_what_it_gains() -> None:
    def samples(mb_a_second: float, files_a_second: float) -> list[Sample]:
        return [
            Sample(
                at_s=at,
                process="any",
                rss_mb=50 + at * mb_a_second,
                fds=10 + int(at * files_a_second),
                threads=4,
                cpu_s=at / 10,
            )
            for at in range(0, 600, 5)
        ]

    report = Report(seed=1, minutes=10, warm_up_minutes=0, rate=1, capacity={})
    report.measure({"router": samples(0.9 / 600, 0), "decode-0": samples(1.1 / 600, 0), "client": samples(0, 0.01)})
    assert [line.partition(" grows")[0] for line in report.growing] == ["decode-0: rss_mb", "client: fds"]
    assert not report.ok and report.lines()[-1].startswith("FAILED: 2 grow")
    assert all(process.cpu == 0.1 for process in report.processes)


def test_gauges_of_work_are_told_from_the_others() -> None:
    text = """
# TYPE pdq_worker_busy_slots gauge
pdq_worker_busy_slots 3
# TYPE pdq_worker_slots gauge
pdq_worker_slots 8
# TYPE pdq_engine_stat gauge
pdq_engine_stat{stat="running"} 2
pdq_engine_stat{stat="tokens"} 900
# TYPE pdq_stream_messages gauge
pdq_stream_messages{stream="PDQ_LOG"} 7
pdq_stream_messages{stream="PDQ_DEAD"} 5
pdq_stream_messages{stream="PDQ_REAP"} 1
# TYPE pdq_requests_total counter
pdq_requests_total 12
# TYPE pdq_requests_created gauge
pdq_requests_created 1.7e9
# TYPE process_open_fds gauge
process_open_fds 15
# TYPE pdq_new_gauge gauge
pdq_new_gauge 1
"""
    found = gauges.work(text)
    assert found == {
        "pdq_worker_busy_slots": 3,
        'pdq_engine_stat{stat="running"}': 2,
        'pdq_stream_messages{stream="PDQ_LOG"}': 7,
        'pdq_stream_messages{stream="PDQ_REAP"}': 1,
        # One that nobody has told about must be zero in the end, too.
        "pdq_new_gauge": 1,
    }
    assert [name for name in found if gauges.log_messages(name)] == ['pdq_stream_messages{stream="PDQ_LOG"}']


def test_a_seed_repeats_its_requests() -> None:
    assert load.asks(7, 3, 4.0) == load.asks(7, 3, 4.0)
    assert load.bads(7, 3, 40.0) == load.bads(7, 3, 40.0)
    names = [ask.request for window in range(20) for ask in load.asks(7, window, 4.0)]
    assert len(set(names)) == len(names)


def test_capacity_follows_workers_slots_and_time() -> None:
    prefill, decode = SHORT.prefill, SHORT.decode
    one = load.capacity(7, prefill, decode)
    assert load.capacity(7, prefill, decode._replace(number=4)).decode == pytest.approx(2 * one.decode)
    slower = load.capacity(7, prefill._replace(profile=f"{prefill.profile}*2"), decode)
    assert slower.prefill == pytest.approx(one.prefill / 2)
    # Twice the slots: more, but not twice as much, since a step of a larger batch takes longer.
    assert one.decode < load.capacity(7, prefill, decode._replace(slots=16)).decode < 2 * one.decode


async def test_a_short_soak(tmp_path: Path) -> None:
    report = await run(SHORT, tmp_path)
    assert (report.wrong, report.unsettled) == ([], []), "\n".join(report.lines())
    assert sum(report.outcomes.values()) == 80
    assert report.outcomes["finished"] > 40 and report.outcomes["cancelled"]
    assert {"job", "unreadable"} <= report.bad.keys() and report.dead_letters
    watched = {"router", "prefill-0", "prefill-1", "decode-0", "decode-1", "nats-server", "client"}
    assert {process.name for process in report.processes} == watched
    assert report.busy["decode"] > 0
