"""Pictures of a comparison: PNGs, and one HTML page that has them in itself and needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdq.bench import plots
from pdq.bench.compare import loads
from pdq.bench.compare.report import Report
from pdq.bench.compare.rows import Run, counted_gaps_s
from pdq.bench.compare.verdicts import MEASURES, Measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "pdq bench compare"


def write(directory: Path, told: Report, runs: Sequence[Run]) -> list[Path]:
    """The distribution of gaps under the mixed load, three measures by load, and `index.html`; returns their files.
    Raises OSError."""
    figures: dict[str, plots.Figure] = {
        "itl": ("Gaps between tokens of short chats, while long prompts arrive", lambda axes: _itl(axes, told, runs)),
        "itl-loads": ("p99 inter-token latency of short chats", lambda axes: _bars(axes, told, MEASURES[0])),
        "ttft-loads": ("p99 time to first token of short chats", lambda axes: _bars(axes, told, MEASURES[3])),
        "tokens-loads": ("Tokens a second", lambda axes: _bars(axes, told, MEASURES[-1])),
    }
    return plots.write_page(directory, TITLE, figures, "\n".join(told.lines()))


def _itl(axes: Axes, told: Report, runs: Sequence[Run]) -> None:
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of gaps that are longer")
    for row in told.rows:
        gaps = sorted(_gaps(run for run in runs if (run.setup, run.load) == (row.setup, "mixed")))
        if row.load == "mixed" and row.counts and gaps:
            rest = [1 - place / len(gaps) for place in range(len(gaps))]
            axes.plot([1000 * gap for gap in gaps], rest, label=f"({row.setup}) {told.setups[row.setup]}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axhline(0.01, color=plots.GREY, linestyle="--")
    axes.legend(fontsize="small")


def _gaps(runs: Iterable[Run]) -> list[float]:
    chats = (record for run in runs for record in run.records if loads.kind(record) == "chat")
    return [gap for record in chats for gap in counted_gaps_s(record) if gap > 0]


def _bars(axes: Axes, told: Report, measure: Measure) -> None:
    """A group of bars for each load."""
    names = list(told.setups)
    found = {(row.setup, row.load): measure.of(row) for row in told.rows if row.counts}
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        at = [group - 0.4 + width * (place + 0.5) for group in range(len(loads.TITLES))]
        heights = [found.get((name, load), 0.0) for load in loads.TITLES]
        axes.bar(at, heights, width, label=f"({name}) {told.setups[name]}")
    axes.set_xticks(range(len(loads.TITLES)), [str(load) for load in loads.TITLES])
    axes.set_ylabel(measure.unit or measure.name)
    if measure.low and any(found.values()):
        axes.set_yscale("log")
    axes.legend(fontsize="small")
