"""Pictures of a run: PNGs, and one HTML page that has them in itself and needs nothing else."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdq.bench.metrics import Slos, Summary, by_second, gaps_s, percentile, ttft_s
from pdq.bench.records import Record
from pdq.bench.table import table
from pdq.errors import Misconfigured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES, DPI = (8.0, 4.5), 110
BLUE, ORANGE, RED, GREY = "#3465a4", "#d9822b", "#b03030", "#777777"
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:16px system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}}
img{{width:100%;height:auto}}pre{{background:#f5f5f5;padding:1rem;overflow-x:auto}}figcaption{{color:#555}}</style>
</head><body><h1>{title}</h1>
{figures}
<h2>All figures</h2><pre>{table}</pre></body></html>
"""
FIGURE = """<figure><img alt="{title}" src="data:image/png;base64,{png}"><figcaption>{title}</figcaption></figure>
"""

Draw = Callable[["Axes", Sequence[Record], Slos], None]
Figure = tuple[str, Callable[["Axes"], None]]
"""A caption, and what draws it."""


def check() -> None:
    """Raises Misconfigured where nothing can be drawn: before a load is run in vain."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Misconfigured("--plot needs matplotlib: install pdq[bench]") from None


def write(directory: Path, records: Sequence[Record], summary: Summary, slos: Slos) -> list[Path]:
    """`ttft.png`, `itl.png`, `timeline.png` and `index.html`; returns them. Raises OSError."""
    counted = [record for record in records if not record.warm_up]
    figures: dict[str, Figure] = {name: (title, _drawn(draw, counted, slos)) for name, (title, draw) in FIGURES.items()}
    return write_page(directory, "pdq bench", figures, table(summary))


def _drawn(draw: Draw, records: Sequence[Record], slos: Slos) -> Callable[[Axes], None]:
    return lambda axes: draw(axes, records, slos)


def write_page(directory: Path, title: str, figures: Mapping[str, Figure], text: str) -> list[Path]:
    """A PNG of each figure, by name, and `index.html` with all of them and a text; returns them. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    made, shown = [], []
    for name, (caption, draw) in figures.items():
        png = _png(caption, draw)
        path = directory / f"{name}.png"
        path.write_bytes(png)
        made.append(path)
        shown.append(FIGURE.format(title=html.escape(caption), png=base64.b64encode(png).decode()))
    page = directory / "index.html"
    page.write_text(PAGE.format(title=title, figures="".join(shown), table=html.escape(text)), "utf-8")
    return [*made, page]


def _png(title: str, draw: Callable[[Axes], None]) -> bytes:
    from matplotlib import figure as figures

    figure = figures.Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    draw(axes)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _distribution(axes: Axes, seconds: Sequence[float], objective_ms: float | None) -> None:
    """The share of values up to each, with the percentiles that the table has."""
    values = sorted(1000 * value for value in seconds)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share up to here")
    axes.set_ylim(0, 1.01)
    if not values:
        return
    axes.plot(values, [(place + 1) / len(values) for place in range(len(values))], color=BLUE, drawstyle="steps-post")
    if values[0] > 0:
        axes.set_xscale("log")
    for q, colour in ((50, GREY), (90, ORANGE), (99, RED)):
        value = percentile(values, q)
        axes.axvline(value, color=colour, linestyle="--", label=f"p{q} {value:,.1f} ms")
    if objective_ms is not None:
        axes.axvline(objective_ms, color="black", label=f"objective {objective_ms:g} ms")
    axes.legend()


def _ttft(axes: Axes, records: Sequence[Record], slos: Slos) -> None:
    _distribution(axes, [ttft_s(record) for record in _done(records) if record.chunks], slos.get("ttft"))


def _itl(axes: Axes, records: Sequence[Record], slos: Slos) -> None:
    _distribution(axes, [gap for record in _done(records) for gap in gaps_s(record) if gap > 0], slos.get("tpot"))


def _timeline(axes: Axes, records: Sequence[Record], slos: Slos) -> None:
    """When each request was sent and what its first token took; and how many ran."""
    done = [record for record in _done(records) if record.chunks]
    failed = [record for record in records if not record.succeeded]
    first = min((record.sent_s for record in records), default=0.0)
    axes.set_xlabel("seconds since the first request")
    axes.set_ylabel("time to first token, ms")
    at_s, took_ms = [record.sent_s - first for record in done], [1000 * ttft_s(record) for record in done]
    axes.scatter(at_s, took_ms, s=10, color=BLUE, label="first token")
    failed_s = [record.sent_s - first for record in failed]
    axes.scatter(failed_s, [0.0] * len(failed), marker="x", color=RED, label="failed")
    axes.set_ylim(bottom=0)
    running: Any = axes.twinx()
    running.set_ylabel("requests in that second")
    counts = by_second(done)[1]
    running.step(range(len(counts)), counts, where="post", color=ORANGE, alpha=0.7, label="ran in that second")
    running.set_ylim(bottom=0)
    axes.legend(handles=[*axes.get_legend_handles_labels()[0], *running.get_legend_handles_labels()[0]])


def _done(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.succeeded]


FIGURES: dict[str, tuple[str, Draw]] = {
    "ttft": ("Time to first token", _ttft),
    "itl": ("Gaps between chunks (inter-token latency)", _itl),
    "timeline": ("The run", _timeline),
}
