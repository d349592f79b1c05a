"""Small figures of each benchmark, for the tests of their page."""

from __future__ import annotations

from typing import Any

from pdq.bench.compare import report as compare
from pdq.bench.compare.kv import KvCount
from pdq.bench.compare.loads import Sizes
from pdq.bench.compare.pace import Pace
from pdq.bench.compare.rows import Row
from pdq.bench.compare.verdicts import BreakEven, Ratio, Winner
from pdq.bench.metrics import Spread

from tests.bench import cold_start, kv_report, replay_report, report, scale_report, streams, tokens, up
from tests.bench.claims import RATIOS
from tests.bench.load import Answer
from tests.bench.replay_setup import Setup
from tests.bench.saturation import Saturation, Trial
from tests.bench.sections import Replays
from tests.bench.shape import Shape

CPU = dict.fromkeys(report.PROCESSES, 0.01)


def _control() -> report.Report:
    half = report.Round([0.001, 0.002], [0.002, 0.004], 2, CPU)
    return report.Report(
        load_before=0.1,
        load_after=0.2,
        cores=2,
        rounds=1,
        trace_sample=1.0,
        shape=Shape(1, 2, 3, [4, 5], [6, 7]),
        engine_cpu_ms={"prefill": 0.5, "decode": 1.1},
        results=[report.summarise(at_once, [half], [half], 1.0) for at_once in (1, 16)],
    )


def _scale() -> scale_report.Report:
    path = scale_report.figures([scale_report.Round([Answer(0.03, 0.5)], CPU)], Answer(0.02, 0.4))
    rate = Saturation(81.0, "the cores", [Trial(81.0, True, 80.0, 12.0, 0, CPU, "the cores")])
    sizes = [scale_report.Size(workers, CPU, path, path, rate, rate) for workers in (10, 100)]
    return scale_report.Report(
        load_before=0.1,
        load_after=0.2,
        cores=2,
        profile="llama3-8b-h100",
        alone_first_ms=20.0,
        alone_end_ms=400.0,
        rate=12.0,
        seconds=20.0,
        rounds=1,
        trace_sample=1.0,
        bound_ms=500.0,
        trial_s=5.0,
        sizes=sizes,
        growth=scale_report.growth([size.pdq for size in sizes]),
        floor_growth=1.0,
        flat=True,
    )


def _streams() -> streams.Report:
    return streams.Report(
        load_before=0.0,
        streams=7,
        workers=2,
        measured_s=3.0,
        events=4_300,
        kb_per_stream=1.5,
        tokens_per_cpu_s=6_789.0,
        gateway_cpu_us_per_token=147.0,
        bare_cpu_us_per_token=40.0,
        added_p50_ms=1.25,
        added_p99_ms=9.5,
        missing=0,
        failed=(),
    )


def _kv() -> kv_report.Report:
    times = ("plain", "ttft", "compute", "store", "confirm", "fetch", "load", "first", "memcpy")
    samples = [
        kv_report.Sample(
            tokens=tokens,
            bytes=tokens * 46_080,
            readable_s=None,
            raw_out_s=None,
            raw_in_s=0.1,
            **{f"{name}_s": 0.1 + number / 10 for number, name in enumerate(times)},
        )
        for tokens in (64, 1_800)
    ]
    return kv_report.Report(
        load_before=0.1,
        load_after=0.2,
        cores=2,
        model="a model",
        kv_bytes_per_token=46_080,
        repeats=1,
        hops_s=[0.004],
        results=[kv_report.ModeResult(mode=mode, load=0.1, samples=samples) for mode in ("host", "file")],
    )


def _compare() -> compare.Report:
    spread = Spread(count=3, mean=1.0, std=0.1, p50=1.0, p90=2.0, p95=3.0, p99=4.0)
    row = Row(
        setup="a", load="mixed", completed=3, itl_ms=spread, ttft_ms=spread, ttft_long_ms=spread, tokens_per_s=9.0
    )
    moved = Row(setup="d", load="mixed", completed=3, itl_ms=spread, ttft_ms=spread, kv=KvCount(), tokens_per_s=8.0)
    return compare.Report(
        machine={"model": "a model"},
        setups={"a": "plain", "d": "pool", "g": "vLLM's"},
        rounds=1,
        seed=0,
        sizes=Sizes(seconds=5.0, warm_up_s=1.0, chat_rate=0.5, long_every_s=8.0, short_rate=1.0),
        pace=Pace(long_s=4.0, chat_s=0.25, few_s=0.05, many_s=0.06),
        prefill_share={"chats": 1.2, "mixed": 9.5},
        rows=[row, moved, Row(setup="g", load="mixed", error="it does not run")],
        ratios=[Ratio(name=name, value=3.5, over="a mixed: 7.0 ms", under="d mixed: 2.0 ms") for name in RATIOS],
        winners=[
            Winner(load="mixed", measure="tokens/s", setup="a", value=9.0, runner_up="d", runner_up_value=8.0),
            Winner(load="mixed", measure="p99 ITL of chats", setup="d", value=4.0, runner_up="a", runner_up_value=4.5),
        ],
        break_even=[BreakEven(measure="tokens/s", prompt_tokens_per_answer_token=None, text="none")],
    )


def _replays() -> Replays:
    spread = Spread(count=3, mean=1.0, std=0.1, p50=1.0, p90=2.0, p95=3.0, p99=4.0)
    orders = [
        replay_report.Figures(
            order=order,
            requests=9,
            failed=0,
            unended=1,
            good_per_s=good,
            good_share=0.9,
            ttft_share=0.95,
            tpot_share=0.92,
            ttft_ms=spread,
            tpot_ms=spread,
            streams=1.5,
            lag_p99_ms=2.0,
            decisions={"short_prompt": 4},
            cpu_cores=CPU,
        )
        for order, good in (("decode-only", 1.0), (replay_report.AUTO, 0.98))
    ]
    replay = replay_report.Replay(
        trace="code",
        setup=Setup(profile="llama2-70b-h100-tp8", factor=16.0, kv_us=8.0),
        seconds=600.0,
        requests=9,
        input_tokens=900,
        output_tokens=90,
        prefill_load=0.5,
        load_average=(0.1, 0.2),
        client_cores=0.1,
        orders=orders,
    )
    return Replays([replay])


FIGURES: dict[str, Any] = {
    "control": _control(),
    "scale": _scale(),
    "tokens": tokens.Report(0.1, 4, 160, {name: [tokens.Result(9e4, 16.0, {"reader": 1.5})] for name in tokens.PATHS}),
    "streams": _streams(),
    "kv": _kv(),
    "cold_start": cold_start.Report(
        role="prefill", tier="cold", cores=2, load_after=0.1, starts=[{"served": 9.5}, {"served": 8.5}]
    ),
    "compare": _compare(),
    "replay": _replays(),
    "up": up.Report(
        cores=2,
        load_after=0.1,
        ups=[{"ready": 11.0, "took_router": 1.5}],
        against=[{"ready": 30.0}],
        floors=[{"engine_alone": 4.0, "two_engines": 9.0}],
    ),
}
