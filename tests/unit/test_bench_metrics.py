"""What records of a load amount to: by hand-made records, whose figures can be worked out on paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.bench import records
from pdq.bench.metrics import by_duration, by_second, percentile, slos, spread, summarise
from pdq.bench.records import INTERRUPTED, Record
from pdq.bench.table import table
from pdq.cli.bench import repeated
from pdq.errors import Rejected


def record(
    at_s: float = 0.0,
    *times_s: float,
    tokens: int = 0,
    num: int = 1,
    end_s: float | None = None,
    error: str = "",
    **more: object,
) -> Record:
    """Planned and sent at `at_s`; chunks of `num` tokens came at `times_s` after that."""
    fields: dict[str, object] = {
        "planned_s": at_s,
        "sent_s": at_s,
        "end_s": at_s + (end_s if end_s is not None else (times_s or (1.0,))[-1]),
        "input_tokens": 100,
        "output_tokens": tokens or len(times_s) * num,
        "chunks": tuple((time, num) for time in times_s),
        "error": error,
        **more,
    }
    return Record(**fields)  # type: ignore[arg-type]


def test_one_request() -> None:
    found = summarise([record(2.0, 0.5, 0.6, 0.8, 1.5)])
    assert (found.completed, found.failed, found.interrupted) == (1, 0, 0)
    assert (found.input_tokens, found.output_tokens) == (100, 4)
    assert found.duration_s == pytest.approx(1.5)
    assert found.output_throughput == pytest.approx(4 / 1.5)
    assert found.total_token_throughput == pytest.approx(104 / 1.5)
    assert found.ttft_ms.mean == pytest.approx(500)
    assert found.ttst_ms.mean == pytest.approx(100)
    assert found.tpot_ms.mean == pytest.approx(1000 / 3)
    assert found.itl_ms.mean == pytest.approx(1000 / 3)
    assert found.itl_ms.p50 == pytest.approx(200)
    assert found.e2el_ms.mean == pytest.approx(1500)
    assert found.request_goodput is None and found.good_fraction is None
    assert found.tokens_per_chunk == 1


def test_tokens_that_come_together() -> None:
    """Seven tokens in two chunks: few gaps, whose percentiles say nothing of a token; TPOT does."""
    found = summarise([record(0.0, 0.4, 1.0, tokens=7, num=0)])
    assert found.tokens_per_chunk == 3.5
    assert found.itl_ms.p50 == pytest.approx(600)
    assert found.tpot_ms.p50 == pytest.approx(100)
    assert found.ttst_ms.p50 == pytest.approx(600)
    # Where the first chunk is known to hold two, the second token came with the first.
    assert summarise([record(0.0, 0.4, 1.0, num=2)]).ttst_ms.p50 == 0


def test_chunks_that_arrive_together_do_not_look_good() -> None:
    """Nine gaps of nothing and one of a second: the median gap is 0, but a stream is nearly always within the long."""
    times = [0.1, *[0.1 + place / 1e6 for place in range(1, 10)], 1.1]
    found = summarise([record(0.0, *times)])
    assert found.itl_ms.p50 < 0.01
    assert found.gap_ms.p50 == pytest.approx(1000, rel=1e-3)
    assert found.gap_ms.mean == pytest.approx(1000, rel=1e-3)


def test_gaps_by_duration() -> None:
    found = by_duration([0.1, 0.1, 0.2, 0.6])
    assert found.mean == pytest.approx(1000 * (0.01 + 0.01 + 0.04 + 0.36))
    assert found.p50 == pytest.approx(600)
    assert by_duration([0.25] * 4).std == pytest.approx(0)
    assert by_duration([]).count == 0


def test_goodput_is_of_requests_that_meet_all_objectives() -> None:
    load = [
        record(0.0, 0.2, 0.25),  # good
        record(1.0, 0.6, 0.65),  # its first token is late
        record(2.0, 0.2, 0.5),  # its second is slow
        record(3.0, 0.2),  # one token has no TPOT, and is good
        record(4.0, error="timeout", end_s=6.0),
    ]
    found = summarise(load, {"ttft": 500, "tpot": 100})
    assert found.duration_s == pytest.approx(10)
    assert found.request_goodput == pytest.approx(0.2)
    assert found.request_throughput == pytest.approx(0.4)
    assert found.good_fraction == pytest.approx(2 / 5)
    assert found.errors == {"timeout": 1}
    # At the objective itself is good, as for vLLM.
    assert summarise([record(0.0, 0.5)], {"ttft": 500}).good_fraction == 1
    assert summarise([record(0.0, 0.5)], {"e2el": 499}).good_fraction == 0


def test_what_does_not_count() -> None:
    load = [
        record(0.0, 9.0, warm_up=True),
        record(10.0, 1.0),
        record(11.0, 0.1, error=INTERRUPTED),
    ]
    found = summarise(load)
    assert (found.completed, found.failed, found.interrupted) == (1, 0, 1)
    assert found.ttft_ms.count == 1
    assert found.duration_s == pytest.approx(1)
    nothing = summarise([], {"ttft": 1})
    assert (nothing.completed, nothing.duration_s, nothing.request_goodput, nothing.good_fraction) == (0, 0, 0, 0)
    assert table(nothing)


def test_lag_and_requests_that_were_held() -> None:
    found = summarise([record(0.0, 1.0), record(1.0, 1.0, planned_s=0.5, held=True)])
    assert found.lag_ms.max == pytest.approx(500)
    assert found.held == 1
    assert re.search(r"held by --max-in-flight: +1\n", table(found))


def test_the_seconds_of_a_run() -> None:
    tokens, running = by_second([record(5.0, 0.5, 1.5, 1.6), record(5.5, 0.9, tokens=3, num=0)])
    assert tokens[:2] == [1, 5]
    assert running[:2] == [2, 2]
    # Spread over the chunks where nobody tells: 4 tokens in two chunks.
    assert by_second([record(0.0, 0.5, 1.5, tokens=4, num=0)])[0][:2] == [2, 2]


@given(st.lists(st.floats(0, 1e3), min_size=1), st.sampled_from([0, 50, 90, 95, 99, 100]))
def test_percentiles_lie_between_the_extremes(values: Sequence[float], q: float) -> None:
    assert min(values) <= percentile(sorted(values), q) <= max(values)


def test_percentiles() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert percentile([10, 20], 90) == pytest.approx(19)
    found = spread([0.001 * number for number in range(101)])
    assert (found.p50, found.p90, found.p99, found.max) == pytest.approx((50, 90, 99, 100))
    assert found.std == pytest.approx(29.1548, rel=1e-4)


def test_objectives() -> None:
    assert slos(["ttft:500", "tpot:50.5"]) == {"ttft": 500, "tpot": 50.5}
    for wrong in ("ttft", "ttft:", "ttft:-1", "ttft:nan", "itl:5", "ttft:inf", ":5"):
        with pytest.raises(Rejected, match="objective"):
            slos([wrong])
    assert repeated(["--goodput", "ttft:1", "tpot:2", "--json"]) == [
        "--goodput", "ttft:1", "--goodput", "tpot:2", "--json",
    ]  # fmt: skip
    assert repeated(["--goodput", "ttft:1", "--goodput", "tpot:2"]) == ["--goodput", "ttft:1", "--goodput", "tpot:2"]
    assert repeated(["--url", "x:1", "y:2"]) == ["--url", "x:1", "y:2"]


def test_the_table_has_the_lines_of_vllm() -> None:
    text = table(summarise([record(0.0, 0.5, 0.6)], {"ttft": 500}), rate=2.0)
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    assert lines["Successful requests"].strip() == "1"
    assert lines["Request rate configured (RPS)"].strip() == "2.00"
    assert lines["Request goodput (req/s)"].strip() == "1.67"
    assert lines["Mean TTFT (ms)"].strip() == "500.00"
    assert lines["P99 TPOT (ms)"].strip() == "100.00"
    assert {len(line) for line in text.splitlines() if line[0] in "-="} == {50}


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    load = [record(1.0, 0.5, 0.6), record(0.0, error="timeout", message="late")]
    records.write(path, load)
    assert records.read(path) == load[::-1]
    path.write_text(path.read_text() + '{"planned_s": 1}\n')
    with pytest.raises(Rejected, match="line 3"):
        records.read(path)
