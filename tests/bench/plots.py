"""The plots of docs/benchmarks.md, as SVG. The same figures give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pdq.bench import metrics
from pdq.bench.compare import loads
from pdq.bench.compare import report as compare
from pdq.bench.compare.rows import Row

from tests.bench import kv_report, page, report, scale_report
from tests.bench.sections import Replays
from tests.bench.stats import percentile

SIZE_INCHES = (8.0, 4.0)
COLOURS = ("#3465a4", "#d9822b", "#4e9a06", "#75507b", "#c4a000", "#cc0000")
GREY = "#777777"


class Plot(NamedTuple):
    """A picture of one benchmark's figures."""

    benchmark: str
    title: str
    draw: Callable[[Axes, Any], None]


def write(runs: page.Runs, directory: Path) -> None:
    """Those of the benchmarks that were run; those of the others are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        run, path = runs[plot.benchmark], directory / f"{name}.svg"
        if isinstance(run, page.Run):
            _save(plot, run.figures, path)
        else:
            path.unlink(missing_ok=True)


def _save(plot: Plot, figures: Any, path: Path) -> None:
    with rc_context({"svg.hashsalt": "pdq", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(plot.title)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        plot.draw(axes, figures)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _stacks(axes: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each name, of parts on top of each other."""
    bottoms = dict.fromkeys(bars, 0.0)
    for part, colour in zip(next(iter(bars.values())), COLOURS, strict=False):
        heights = [max(0.0, bar[part]) for bar in bars.values()]
        axes.bar(list(bars), heights, bottom=list(bottoms.values()), label=part, color=colour, width=0.6)
        bottoms = {name: bottom + height for (name, bottom), height in zip(bottoms.items(), heights, strict=True)}
    axes.legend(loc="upper left", fontsize="small")
    axes.margins(y=0.35)


def _control(axes: Axes, found: report.Report) -> None:
    bars = {}
    for result in found.results:
        rows = [row for row in result.cpu if row.name in report.PROCESSES]
        bars[f"floor, {result.at_once} at a time"] = {row.name: row.floor_ms for row in rows}
        bars[f"pdq, {result.at_once} at a time"] = {row.name: row.pdq_ms for row in rows}
    _stacks(axes, bars)
    axes.set_ylabel("ms of CPU a request")


def _scale_cpu(axes: Axes, found: scale_report.Report) -> None:
    bars = {}
    for size in found.sizes:
        bars[f"floor, {size.workers}"] = size.floor.cpu_ms
        bars[f"pdq, {size.workers}"] = size.pdq.cpu_ms
    _stacks(axes, bars)
    axes.set_ylabel("ms of CPU a request")


def _scale_rate(axes: Axes, found: scale_report.Report) -> None:
    names = [f"{size.workers} workers" for size in found.sizes]
    _beside(
        axes,
        names,
        {
            "floor": [size.floor_saturation.sustained for size in found.sizes],
            "pdq": [size.pdq_saturation.sustained for size in found.sizes],
        },
    )
    axes.set_ylabel("requests a second")


def _beside(axes: Axes, names: Sequence[str], sides: Mapping[str, Sequence[float]]) -> None:
    """Groups of bars, one of each side."""
    width = 0.8 / len(sides)
    for place, ((side, heights), colour) in enumerate(zip(sides.items(), (GREY, *COLOURS), strict=False)):
        at = [number + (place - (len(sides) - 1) / 2) * width for number in range(len(names))]
        axes.bar(at, list(heights), width=width, label=side, color=colour)
    axes.set_xticks(range(len(names)), list(names))
    axes.legend(fontsize="small")


def _kv(axes: Axes, found: kv_report.Report) -> None:
    for result, colour in zip(found.results, COLOURS, strict=False):
        by_tokens = result.by_tokens()
        shares = [100 * percentile([each.share for each in samples], 0.5) for samples in by_tokens.values()]
        axes.plot(list(by_tokens), shares, marker="o", label=result.mode, color=colour)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("% of the time to the first token")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _compare(axes: Axes, found: compare.Report, of: Callable[[Row], metrics.Spread]) -> None:
    """The 99th percentile of each set-up, by load. More budgets of (a) were measured under one load alone."""
    names = [name for name in loads.TITLES if any(row.load == name for row in found.rows)]
    heights = {(row.setup, row.load): of(row).p99 for row in found.rows if row.counts}
    setups = dict.fromkeys(row.setup for row in found.rows if row.counts and "-" not in row.setup)
    sides = {
        f"({setup}) {found.setups[setup]}": [heights.get((setup, name), 0.0) for name in names] for setup in setups
    }
    _beside(axes, names, sides)
    axes.set_ylabel("ms")
    axes.set_yscale("log")


def _replay(axes: Axes, found: Replays) -> None:
    orders = dict.fromkeys(each.order for replay in found.replays for each in replay.orders)
    shares = [{each.order: 100 * each.good_share for each in replay.orders} for replay in found.replays]
    sides = {order: [share.get(order, 0.0) for share in shares] for order in orders}
    _beside(axes, [replay.trace for replay in found.replays], sides)
    axes.set_ylabel("% of the requests")


PLOTS = {
    "control": Plot("control", "CPU per request, by process", _control),
    "scale_cpu": Plot("scale", "CPU per request, by process and number of workers", _scale_cpu),
    "scale_rate": Plot("scale", "Requests a second that are sustained", _scale_rate),
    "compare_itl": Plot(
        "compare",
        "p99 gap between tokens of short chats",
        lambda axes, found: _compare(axes, found, lambda row: row.itl_ms),
    ),
    "compare_ttft": Plot(
        "compare",
        "p99 time to the first token of short chats",
        lambda axes, found: _compare(axes, found, lambda row: row.ttft_ms),
    ),
    "replay": Plot("replay", "Requests that met their objectives", _replay),
    "kv": Plot("kv", "The handoff's share of the time to the first token", _kv),
}
