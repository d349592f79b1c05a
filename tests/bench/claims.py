"""What is claimed of pdq, and whether the figures bear it out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pdq.bench.compare import report as compare

from tests.bench import kv_report, report, scale_report, tokens, up
from tests.bench.stats import percentile, spread

LATENCY, CPU, TOKENS, READY, AUTO = 2.0, 1.5, 30_000, 0.5, 0.95
RATIOS = {
    "chats' p99 ITL, mixed: (a) default by (d)": (3.0, True),
    "chats' p99 ITL, mixed: (a) best budget by (d)": (0.0, True),
    "chats' p99 ITL of (d): mixed by chats alone": (1.3, False),
}
"""Of `pdq bench compare`: the bound, 0 where there is none, and whether it is the least."""


class Claim(NamedTuple):
    """found: in words; met: whether it holds. None, both: it was not measured."""

    what: str
    wanted: str
    found: str | None
    met: bool | None


def claims(figures: Mapping[str, Any]) -> list[Claim]:
    """All of them, whatever was run. figures: of the benchmarks that were, by name."""
    return [claim for name, made in MADE.items() for claim in made(figures.get(name))]


def nothing(found: object) -> Iterator[Claim]:
    """Of a benchmark from which nothing is claimed."""
    yield from ()


def _control(found: report.Report | None) -> Iterator[Claim]:
    for what, wanted, kind, row in (
        ("Latency to the end over the floor, p50", LATENCY, "latency", "end p50"),
        ("Latency to the first token over the floor, p50", LATENCY, "latency", "first token p50"),
        ("CPU per request over the floor", CPU, "cpu", report.TOTAL),
    ):
        told = f"at most {wanted:g} times"
        for result in found.results if found else []:
            ratio = next(each.ratio for each in getattr(result, kind) if each.name == row)
            assert ratio is not None
            found_told = f"{ratio.median:.2f} times ({ratio.min:.2f} … {ratio.max:.2f})"
            yield Claim(f"{what}, {result.at_once} at a time", told, found_told, ratio.median <= wanted)
        if found is None:
            yield Claim(what, told, None, None)


def _scale(found: scale_report.Report | None) -> Iterator[Claim]:
    what, wanted = "CPU per request from 10 to 1,000 workers", f"within {scale_report.FLAT - 1:.0%}"
    if found is None:
        yield Claim(what, wanted, None, None)
        return
    growth = f"the dearest takes {found.growth:.2f} times the cheapest; of the floor {found.floor_growth:.2f} times"
    yield Claim(what, wanted, growth, found.flat)
    for size in found.sizes:
        if size.pdq_saturation.trials:
            told = f"{size.pdq_saturation.sustained:.0f}; the floor {size.floor_saturation.sustained:.0f}"
            yield Claim(f"Requests a second that {size.workers} workers sustain", "told", told, True)


def _tokens(found: tokens.Report | None) -> Iterator[Claim]:
    what, wanted = "Tokens a second from one decode process to one reader", f"at least {TOKENS:,}"
    if found is None:
        yield Claim(what, wanted, None, None)
        return
    rate = spread([each.tokens_per_s for each in found.rounds["pdq"]])
    yield Claim(what, wanted, f"{rate.median:,.0f}", rate.median >= TOKENS)


def _kv(found: kv_report.Report | None) -> Iterator[Claim]:
    what, wanted = "The handoff's share of the time to the first token", "told"
    if found is None:
        yield Claim(what, wanted, None, None)
        return
    for result in found.results:
        shares = {
            tokens: percentile([each.share for each in samples], 0.5) for tokens, samples in result.by_tokens().items()
        }
        told = ", ".join(f"{share:.1%} at {tokens:,}" for tokens, share in shares.items())
        yield Claim(f"{what}, {result.mode}, by prompt tokens", wanted, told, True)


def _compare(found: compare.Report | None) -> Iterator[Claim]:
    values = {each.name: each.value for each in found.ratios} if found else {}
    for name, (bound, least) in RATIOS.items():
        wanted = f"at {'least' if least else 'most'} {bound:g}" if bound else "told"
        if name not in values:
            yield Claim(name, wanted, None, None)
        else:
            met = values[name] >= bound if least else values[name] <= bound
            yield Claim(name, wanted, f"{values[name]:.2f}", met)


def _up(found: up.Report | None) -> Iterator[Claim]:
    what, wanted = "`pdq up` to ready, over its first landing", f"at most {READY:g}"
    if found is None:
        yield Claim(what, wanted, None, None)
        return
    ready = percentile([run["ready"] for run in found.ups], 0.5)
    floor = percentile([run["two_engines"] for run in found.floors], 0.5)
    told = f"ready in {ready:.1f} s; two bare engines alone take {floor:.1f} s"
    if not found.against:
        yield Claim("`pdq up` to ready", "told", told, True)
        return
    ratio = ready / percentile([run["ready"] for run in found.against], 0.5)
    yield Claim(what, wanted, f"{ratio:.2f}; {told}", ratio <= READY)


def _replay(found: Any) -> Iterator[Claim]:
    what, wanted = "Goodput of auto over the best other order", f"at least {AUTO:g}"
    if found is None:
        yield Claim(what, wanted, None, None)
        return
    for replay in found.replays:
        ratio = replay.auto_over_best
        if ratio is None:
            yield Claim(f"{what}, {replay.trace}", wanted, None, None)
        else:
            yield Claim(f"{what}, {replay.trace}", wanted, f"{ratio:.3f}", ratio >= AUTO)


MADE: dict[str, Callable[[Any], Iterator[Claim]]] = {
    "control": _control,
    "scale": _scale,
    "tokens": _tokens,
    "kv": _kv,
    "compare": _compare,
    "up": _up,
    "replay": _replay,
}
