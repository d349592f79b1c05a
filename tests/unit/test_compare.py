"""`pdq bench compare`, its pure parts: what is asked, what the rows say, who wins, and what a failure looks like."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pdq.bench.compare import hardware, kv, loads, pace, plots, setups
from pdq.bench.compare.hardware import Hardware, Place
from pdq.bench.compare.kv import KvCount
from pdq.bench.compare.loads import Sizes
from pdq.bench.compare.pace import NotMeasured, Pace
from pdq.bench.compare.report import Report, report
from pdq.bench.compare.rows import NOT_LOADED, Row, Run, row
from pdq.bench.compare.run import Plan
from pdq.bench.compare.setups import Setup
from pdq.bench.compare.verdicts import MEASURES, Point, advantage, best_budget, break_even, ratios, winners
from pdq.bench.metrics import Spread
from pdq.bench.prompts import Prompts
from pdq.bench.records import Record
from pdq.bench.target import Api, Ask, Failed, Hearing
from pdq.errors import Misconfigured, Rejected
from pdq.messages import KvReport

SIZES = Sizes(seconds=40, warm_up_s=4, chat_rate=0.5, long_every_s=8, short_rate=1)
ALL = setups.wanted("a,b,c,d,e,f,g", "64,256")


def plan(*names: str) -> Plan:
    found = tuple(setup for setup in ALL if not names or setup.name in names)
    return Plan(setups=found, rounds=2, sizes=SIZES, seed=7, timeout_s=60)


# ---- what is asked


def test_all_set_ups_are_asked_the_same_and_each_round_something_else() -> None:
    for name in loads.TITLES:
        assert plan("a").load(name, 0) == plan("d").load(name, 0) != plan("d").load(name, 1)


def test_the_chats_among_long_prompts_are_those_alone() -> None:
    chats, mixed = loads.plan("chats", SIZES, 1), loads.plan("mixed", SIZES, 1)
    longs = [request for request in mixed if request.input_tokens >= loads.LONG_INPUT[0]]
    among = [request for request in mixed if request not in longs]
    assert among == list(chats) and len(chats) > 5
    assert [request.at_s for request in longs] == [8, 16, 24, 32, 40]
    assert all(1000 <= request.input_tokens <= 1800 for request in longs)
    assert all(32 <= request.input_tokens <= 64 and request.output_tokens == 120 for request in among)
    assert 24 < max(request.at_s for request in mixed) < 44
    assert max(request.at_s for request in loads.plan("short", SIZES, 1)) < 24
    assert mixed == sorted(mixed, key=lambda request: request.at_s)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_long_prompts_have_lengths_from_all_of_the_range(seed: int) -> None:
    longs = [request.input_tokens for request in loads.plan("mixed", SIZES, seed) if request.input_tokens >= 1000]
    assert len(longs) == 5 and 1300 < sum(longs) / 5 < 1500
    assert min(longs) < 1250 and max(longs) > 1550


def test_a_load_that_measures_nothing_is_refused() -> None:
    with pytest.raises(Rejected):
        loads.plan("short", Sizes(seconds=1, warm_up_s=0.5, chat_rate=1, long_every_s=1, short_rate=0.01), 3)


def test_prompts_of_two_set_ups_have_nothing_in_common() -> None:
    load = loads.plan("chats", SIZES, 1)
    first, second = (Prompts("completions", "m", {}) for _ in range(2))
    assert first.body(0, load[0])[:40] != second.body(0, load[0])[:40]


# ---- how dense it is

PACE = Pace(long_s=4.0, chat_s=0.2, few_s=0.05, many_s=0.06)


def test_the_loads_are_what_one_half_can_bear() -> None:
    found = pace.rates(PACE, None)
    # Little's law: of answers that take 120 * 0.05 s, 3.5 run at one time.
    assert found.chat_rate * 6 == pytest.approx(3.5, rel=0.01)
    assert 4 / found.long_every_s + found.chat_rate * 0.2 == pytest.approx(0.6, rel=0.01)
    assert found.short_rate * 96 == pytest.approx(8 / 0.06, rel=0.01)


def test_a_machine_twice_as_fast_is_asked_twice_as_much() -> None:
    slow = Pace(long_s=8.0, chat_s=0.4, few_s=0.1, many_s=0.12)
    one, other = pace.rates(slow, None), pace.rates(PACE, None)
    assert other.chat_rate == pytest.approx(2 * one.chat_rate, rel=0.01)
    assert other.short_rate == pytest.approx(2 * one.short_rate, rel=0.01)
    assert one.long_every_s == pytest.approx(2 * other.long_every_s, rel=0.01)


def test_more_chats_leave_less_time_for_long_prompts() -> None:
    assert pace.rates(PACE, 1.0).long_every_s == pytest.approx(4 / 0.4, rel=0.01)
    assert pace.rates(PACE, 100.0).long_every_s == pytest.approx(40)


class Silent:
    """Who measures, and tells nobody."""

    def __init__(self) -> None:
        self.num_ended = 0

    def doing(self, text: str) -> None: ...

    def ended(self, record: Record) -> None:
        self.num_ended += 1

    def skipped(self, num_requests: int) -> None: ...

    def say(self, text: str) -> None: ...


class Engine:
    """A target that has a slot for each request, and fails from its `fails_at`-th on."""

    api: Api = "completions"
    model = "m"

    def __init__(self, fails_at: int = 1000) -> None:
        self._fails_at = fails_at
        self.num_asked = 0

    async def ask(self, ask: Ask, hearing: Hearing) -> None:
        self.num_asked += 1
        if self.num_asked >= self._fails_at:
            raise Failed("http_500", "out of order")
        await asyncio.sleep(0.02)
        hearing.chunk(1)
        await asyncio.sleep(0.01)
        hearing.chunk(1)


async def test_an_engine_is_asked_for_its_pace() -> None:
    engine, shown = Engine(), Silent()
    found = await pace.ask(engine, 10, shown)
    assert shown.num_ended == pace.NUM_REQUESTS == engine.num_asked - len(loads.warm_up())
    assert min(found.long_s, found.chat_s) >= 0.02 and min(found.few_s, found.many_s) >= 0.009


@pytest.mark.parametrize("fails_at", [1, 12])
async def test_an_engine_that_fails_has_no_pace(fails_at: int) -> None:
    with pytest.raises(NotMeasured, match="does not answer: out of order"):
        await pace.ask(Engine(fails_at), 10, Silent())


def test_the_pace_is_that_of_the_answers() -> None:
    first = {"a long prompt": (5.0, 4.0, 9.0), "a chat": (0.1, 0.3, 0.2)}
    found = {name: [record(0, 40, [], ttft_s=time_s) for time_s in times] for name, times in first.items()}
    found |= {
        name: [record(0, 40, [0.9, gap_s, gap_s])] * 4 for name, gap_s in (("a few chats", 0.05), ("many chats", 0.06))
    }
    told = pace.of(found)
    assert (told.long_s, told.chat_s) == (5, 0.2)
    assert (told.few_s, told.many_s) == (pytest.approx(0.05), pytest.approx(0.06))
    with pytest.raises(NotMeasured, match="in one piece"):
        pace.of(found | {"many chats": [record(0, 40, [])]})


# ---- the set-ups


def test_each_budget_is_one_more_of_a() -> None:
    assert [setup.name for setup in setups.wanted("d,a,d", "256,64")] == ["d", "a", "a-64", "a-256"]
    assert [setup.name for setup in setups.wanted("b", "256,64")] == ["b"]
    assert all(setup.loads == ("mixed",) for setup in ALL if setup.budget)


@pytest.mark.parametrize("letters, budgets", [("a,x", ""), ("", "64"), ("a", "0"), ("a", "many")])
def test_a_set_up_that_there_is_not_is_refused(letters: str, budgets: str) -> None:
    with pytest.raises(Rejected) as refused:
        setups.wanted(letters, budgets)
    assert refused.value.code == "usage"


def test_rounds_go_forth_and_back_and_d_and_e_share_their_processes() -> None:
    names = [[[setup.name for setup in each] for each in setups.starts(ALL, number)] for number in (0, 1)]
    assert names[0] == [["a"], ["a-64"], ["a-256"], ["b"], ["c"], ["d", "e"], ["f"], ["g"]]
    assert names[1] == [["g"], ["f"], ["e", "d"], ["c"], ["b"], ["a-256"], ["a-64"], ["a"]]
    assert [list(setups.order(setups.ALL, number)) for number in (0, 1)] == [
        ["chats", "mixed", "short"],
        ["short", "mixed", "chats"],
    ]


# ---- the hardware


def test_gpus_are_halved_and_an_odd_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: False)
    for number in (0, 1, 2, 3):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    found = hardware.find({}, tmp_path)
    assert [place.environment for place in (*found, found.both)] == [
        {"CUDA_VISIBLE_DEVICES": devices} for devices in ("0,1", "2,3", "0,1,2,3")
    ]
    assert found.first.pinned(("run",)) == ("run",)
    with pytest.raises(Misconfigured):
        hardware.find({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)


def test_cpus_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: True)
    monkeypatch.setattr(hardware, "cpu_halves", lambda: ("0,1", "2,3"))
    found = hardware.find({})
    assert (found.both.cpus, found.both.environment) == ("0,1,2,3", {})
    assert found.second.pinned(("run", "it")) == ("taskset", "--cpu-list", "2,3", "run", "it")
    monkeypatch.setattr(hardware, "cpu_halves", lambda: ("0", "1,2"))
    with pytest.raises(Misconfigured):
        hardware.find({})


# ---- rows


def record(at_s: float, tokens: int, gaps_s: list[float], error: str = "", ttft_s: float = 0.5) -> Record:
    times = [ttft_s]
    for gap_s in gaps_s:
        times.append(times[-1] + gap_s)
    return Record(
        planned_s=at_s,
        sent_s=at_s,
        end_s=at_s + times[-1],
        input_tokens=tokens,
        planned_input_tokens=tokens,
        output_tokens=len(times),
        chunks=tuple((time_s, 1) for time_s in times),
        error=error,
    )


def run(name: str, *records: Record, number: int = 1, kv: KvCount | None = None, error: str = "") -> Run:
    return Run(setup=name, load="mixed", round=number, records=records, kv=kv, error=error)


def setup_of(name: str) -> Setup:
    return next(setup for setup in ALL if setup.name == name)


def test_gaps_of_chats_are_told_without_those_of_long_prompts() -> None:
    records = [record(0, 40, [0.1, 0.1]), record(1, 1500, [9.0], ttft_s=4)]
    found = row(setup_of("a"), "mixed", [run("a", *records)], {})
    assert found.itl_ms.max == pytest.approx(100) and found.itl_ms.count == 2
    assert (found.ttft_ms.p50, found.ttft_long_ms.p50) == (500, 4000)
    assert found.itl_p999_ms == pytest.approx(100) and found.stall_fraction == 0
    assert found.error == "" and found.completed == 2


def test_a_stall_is_a_gap_far_over_the_median() -> None:
    found = row(setup_of("a"), "mixed", [run("a", record(0, 40, [0.1] * 98 + [0.4, 2.0]))], {})
    assert found.stall_fraction == pytest.approx(0.01) and found.itl_ms.max == pytest.approx(2000)
    assert found.gap_ms.p99 == pytest.approx(2000) and found.itl_ms.p99 < 450


def test_rounds_are_one_after_the_other_not_at_one_time() -> None:
    """Each lasts two seconds and has five tokens."""
    runs = [run("a", record(0, 40, [0.5, 0.5, 0.25, 0.25]), number=number) for number in (1, 2)]
    found = row(setup_of("a"), "mixed", runs, {"ttft": 600})
    assert found.tokens_per_s == pytest.approx(2.5)
    assert found.good_per_s == pytest.approx(0.5) and found.good_fraction == 1


@pytest.mark.parametrize(
    "count, counts",
    [
        (KvCount(promised_tokens=100, loaded_tokens=95), True),
        (KvCount(promised_tokens=100, loaded_tokens=80), False),
        (KvCount(promised_tokens=100), False),
        (KvCount(), False),
    ],
)
def test_what_computed_its_prompts_anew_does_not_count(count: KvCount, counts: bool) -> None:
    found = row(setup_of("d"), "mixed", [run("d", record(0, 40, [0.1]), kv=count)], {})
    assert found.counts == counts
    assert counts or found.error.startswith(NOT_LOADED)


def test_kv_is_counted_by_the_log_of_each_request() -> None:
    told = KvReport(promised_tokens=96, loaded_tokens=64, local_tokens=32)
    assert kv.counted(told) + kv.counted(None) == KvCount(promised_tokens=96, loaded_tokens=96)
    text = '# TYPE x counter\nvllm:external_prefix_cache_hits_total{engine="0"} 192.0\nvllm:other_total{a="b"} 7\n'
    assert (kv.hits(text), kv.hits("")) == (192, 0)
    records = [record(0, tokens, [0.1], error) for tokens, error in ((200, ""), (33, ""), (34, ""), (900, "timeout"))]
    assert kv.promised_by_files(records, 32) == 192 + 0 + 32


# ---- verdicts


def figures(name: str, load: loads.Name, itl_p99: float, ttft: float = 100, tokens: float = 10, error: str = "") -> Row:
    return Row(
        setup=name,
        load=load,
        error=error,
        completed=1,
        itl_ms=Spread(count=9, p99=itl_p99),
        ttft_ms=Spread(count=9, p50=ttft, p99=ttft),
        tokens_per_s=tokens,
    )


ROWS = [
    figures("a", "chats", 100),
    figures("d", "chats", 110, ttft=200),
    figures("a", "mixed", 4000, ttft=500),
    figures("a-64", "mixed", 600),
    figures("a-256", "mixed", 900, error="it did not start"),
    figures("d", "mixed", 120, ttft=700),
    figures("e", "mixed", 1, error=NOT_LOADED),
    figures("a", "short", 100, tokens=60),
    figures("d", "short", 100, tokens=30),
]
SPLIT = ("d", "e", "f", "g")


def test_the_ratios_are_those_that_are_wanted() -> None:
    found = {ratio.name: ratio for ratio in ratios(ROWS)}
    assert found["chats' p99 ITL, mixed: (a) default by (d)"].value == pytest.approx(4000 / 120)
    best = found["chats' p99 ITL, mixed: (a) best budget by (d)"]
    assert best.value == 5 and best.over.startswith("a-64 mixed: 600.0")
    assert found["chats' p99 ITL of (d): mixed by chats alone"].value == pytest.approx(120 / 110)
    assert ratios([row for row in ROWS if row.setup == "a"]) != []
    chosen = best_budget(ROWS, MEASURES[0])
    assert chosen is not None and chosen.setup == "a-64"


def test_who_wins_each_load_and_what_failed_does_not() -> None:
    found = {(won.load, won.measure): won for won in winners(ROWS, SPLIT)}
    assert (found["mixed", "p99 ITL"].setup, found["mixed", "p99 ITL"].runner_up) == ("d", "a-64")
    assert (found["mixed", "p50 TTFT of chats"].setup, found["mixed", "p50 TTFT of chats"].runner_up) == ("a-64", "d")
    won = found["short", "tokens/s"]
    assert (won.setup, won.value, won.runner_up, won.runner_up_value) == ("a", 60, "d", 30)
    assert ("mixed", "p50 TTFT of long prompts") not in found, "nothing was measured"


def test_more_tokens_and_shorter_times_are_the_better() -> None:
    first, second = figures("d", "mixed", 100, tokens=30), figures("a", "mixed", 300, tokens=60)
    itl, tokens = MEASURES[0], MEASURES[-1]
    assert (advantage(itl, first, second), advantage(tokens, first, second)) == (3, 0.5)


def test_the_break_even_lies_where_the_winner_changes() -> None:
    found = break_even("x", [Point(1, 0.5, "short"), Point(4, 2, "mixed")])
    assert found.prompt_tokens_per_answer_token == pytest.approx(2)
    assert found.text == "between short and mixed (short 0.50 times, mixed 2.00 times)"


@pytest.mark.parametrize(
    "points, told",
    [
        ([], "not measured"),
        ([Point(1, 2, "short")], "not measured"),
        ([Point(1, 0.99, "short"), Point(4, 1.02, "mixed")], "none: both kinds are alike"),
        ([Point(1, 0.5, "short"), Point(2, 1.03, "chats"), Point(4, 0.9, "mixed")], "none: where they differ, disagg"),
        ([Point(1, 0.5, "short"), Point(4, 0.6, "mixed")], "none: where they differ, disaggregation does not pay"),
        ([Point(1, 1.5, "short"), Point(4, 1.6, "mixed")], "none: where they differ, disaggregation pays"),
    ],
)
def test_where_the_data_give_no_break_even_it_says_so(points: list[Point], told: str) -> None:
    found = break_even("x", points)
    assert found.prompt_tokens_per_answer_token is None and found.text.startswith(told)


# ---- the report


def told() -> tuple[Report, list[Run]]:
    moved = KvCount(promised_tokens=64, loaded_tokens=64)
    runs = [
        run("a", record(0, 40, [0.1, 2.0]), record(1, 1400, [0.1], ttft_s=3)),
        run("d", record(0, 40, [0.1, 0.2]), kv=moved),
        run("g", error="vllm-prefill ended while the stack was starting | ImportError: no such connector"),
    ]
    return report(plan("a", "d", "g"), runs, {"ttft": 400.0}, {"model": "m"}, PACE), runs


def test_a_set_up_that_did_not_start_is_a_row_with_its_error() -> None:
    lines = told()[0].lines()
    assert lines[1] == "  a      plain vLLM on both, default budget"
    lines = lines[lines.index("") + 3 :]
    assert lines[0].startswith("mixed: the same chats, and long prompts (")
    assert any(line.startswith("  g!") for line in lines)
    assert any("(g) does not count: vllm-prefill ended" in line and "ImportError" in line for line in lines)
    (ours,) = [line for line in lines if line.startswith("  d ")]
    assert ours.split()[-3:] == ["0", "0", "64/64"]
    assert any("chats' p99 ITL, mixed: (a) default by (d)" in line for line in lines)
    assert lines[-2].endswith("a long prompt 4.00 s, a chat 0.20 s, a token 50.0 ms beside 3 others, 60.0 ms beside 7")
    assert "0.5 chats/s, a long prompt each 8 s, 1 short/s" in lines[-1]


def test_a_comparison_is_drawn(tmp_path: Path) -> None:
    made = plots.write(tmp_path, *told())
    assert [path.suffix for path in made] == [".png"] * 4 + [".html"]
    page = made[-1].read_text("utf-8")
    assert page.count("data:image/png;base64,") == 4 and "(g) does not count" in page


def test_both_places_are_one() -> None:
    assert Hardware(Place(cpus="0"), Place(cpus="1")).both == Place(cpus="0,1")
    assert (str(Place(cpus="0")), str(Place(devices="1"))) == ("CPU 0", "GPU 1")
