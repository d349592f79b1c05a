"""The replay of a trace by two orders: every request ends, and is judged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from pdq.bench.records import INTERRUPTED, Record

from tests.bench import replay
from tests.bench.replay_report import figures, judge, table
from tests.bench.replay_setup import TPOT_TIMES, TTFT_TIMES, Setup

SETUP = Setup(profile="llama3-8b-h100", factor=2.0, kv_us=3.0, prefill_workers=2, decode_workers=2)
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.5,{700 + 100 * second},12\n" for second in range(6)
)
TTFT_S = TTFT_TIMES * SETUP.prompt_ms(1_000) / 1e3
TPOT_S = TPOT_TIMES * SETUP.token_ms(1_005) / 1e3


def record(first_s: float, gap_s: float, tokens: int = 10, **fields: object) -> Record:
    chunks = tuple((first_s + gap_s * place, 1) for place in range(tokens))
    known = {"planned_s": 0.0, "sent_s": 0.0, "end_s": chunks[-1][0] if chunks else first_s, "chunks": chunks}
    return msgspec.convert(known | {"input_tokens": 1_000, "output_tokens": tokens} | fields, Record)


@pytest.mark.parametrize(
    ("given", "ttft", "tpot"),
    [
        (record(0.99 * TTFT_S, 0.99 * TPOT_S), True, True),
        (record(1.01 * TTFT_S, 0.99 * TPOT_S), False, True),
        (record(0.99 * TTFT_S, 1.01 * TPOT_S), True, False),
        (record(0.99 * TTFT_S, 0.0, 1), True, True),
        (record(0.1, 0.001, error="queue_full"), False, False),
        # what still ran at the end: by its pace up to then, however long it had waited for the next token
        (record(0.1, 0.99 * TPOT_S, error=INTERRUPTED, end_s=99.0), True, True),
        (record(0.1, 1.01 * TPOT_S, error=INTERRUPTED, end_s=99.0), True, False),
        (record(1.01 * TTFT_S, 0.0, 0, error=INTERRUPTED), False, True),
    ],
)
def test_a_request_is_judged_by_both_bounds(given: Record, ttft: bool, tpot: bool) -> None:
    verdict = judge(given, SETUP)
    assert verdict is not None and (verdict.ttft, verdict.tpot, verdict.good) == (ttft, tpot, ttft and tpot)


def test_what_had_time_left_at_the_end_is_not_judged() -> None:
    waits = record(0.99 * TTFT_S, 0.0, 0, error=INTERRUPTED)
    assert judge(waits, SETUP) is None
    found = figures("auto", [waits, record(0.1, 0.001), record(0.1, 9.0)], SETUP, 10.0, {}, {})
    assert (found.requests, found.unended, found.good_share, found.good_per_s) == (3, 1, 0.5, 0.1)


async def test_each_order_gets_every_request_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    options = replay.Options(
        traces={"code": tmp_path / "trace.csv"},
        setups={"code": SETUP},
        orders=("prefill-first", "auto"),
        seconds=4.5,
        warm_up_s=1.0,
        rest_s=60.0,
        save=tmp_path,
    )
    (found,) = await replay.run(options, tmp_path)
    assert [each.order for each in found.orders] == ["prefill-first", "auto"]
    assert found.requests == 5 and 0 < found.prefill_load < 1
    for each in found.orders:
        assert (each.requests, each.failed, each.unended) == (5, 0, 0)
        assert 0 <= each.good_share <= min(each.ttft_share, each.tpot_share) <= 1
        assert each.good_per_s == pytest.approx(each.good_share * 5 / 4.5)
        assert sum(each.decisions.values()) == 6 and min(each.cpu_cores.values()) >= 0
        assert len((tmp_path / f"code-{each.order}.jsonl").read_text().splitlines()) == 6
    assert found.orders[0].decisions == {"prefill-first default": 6}
    assert "good/s" in table([found])
