"""A summary as text, in the lines of `vllm bench serve`: what has the same name there is the same there."""

from __future__ import annotations

from collections.abc import Iterator

from pdq.bench.metrics import Spread, Summary

WIDTH, LABEL = 50, 40
SECTIONS = (
    ("Time to First Token", "TTFT", "ttft_ms"),
    ("Time to Second Token (after the 1st)", "TTST", "ttst_ms"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot_ms"),
    ("Inter-token Latency", "ITL", "itl_ms"),
    ("Inter-token Latency (by its duration)", "gap", "gap_ms"),
    ("End-to-end Latency", "E2EL", "e2el_ms"),
    ("Schedule Lag", "lag", "lag_ms"),
)


def table(summary: Summary, rate: float = 0.0) -> str:
    """`rate`: requests a second that were asked for; 0: there is no such number."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_totals(summary, rate)]
    for title, name, field in SECTIONS:
        spread: Spread = getattr(summary, field)
        if spread.count:
            lines += [f"{title:-^{WIDTH}}", *_spread(name, spread)]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(summary: Summary, rate: float) -> Iterator[str]:
    yield _line("Successful requests:", summary.completed)
    yield _line("Failed requests:", summary.failed)
    for code, number in summary.errors.items():
        yield _line(f"  {code}:", number)
    if summary.interrupted:
        yield _line("Interrupted requests:", summary.interrupted)
    if summary.held:
        yield _line("Requests held by --max-in-flight:", summary.held)
    if rate:
        yield _line("Request rate configured (RPS):", rate)
    yield _line("Benchmark duration (s):", summary.duration_s)
    yield _line("Total input tokens:", summary.input_tokens)
    yield _line("Total generated tokens:", summary.output_tokens)
    yield _line("Request throughput (req/s):", summary.request_throughput)
    if summary.request_goodput is not None and summary.good_fraction is not None:
        yield _line("Request goodput (req/s):", summary.request_goodput)
        yield _line("Good requests (%):", 100 * summary.good_fraction)
    yield _line("Output token throughput (tok/s):", summary.output_throughput)
    yield _line("Peak output token throughput (tok/s):", summary.peak_output_throughput)
    yield _line("Peak concurrent requests:", float(summary.peak_concurrent))
    yield _line("Total token throughput (tok/s):", summary.total_token_throughput)
    yield _line("Tokens per chunk:", summary.tokens_per_chunk)


def _spread(name: str, spread: Spread) -> Iterator[str]:
    yield _line(f"Mean {name} (ms):", spread.mean)
    yield _line(f"Median {name} (ms):", spread.p50)
    for percent in (90, 95, 99):
        yield _line(f"P{percent} {name} (ms):", getattr(spread, f"p{percent}"))


def _line(label: str, value: float) -> str:
    """Whole numbers where it is an int."""
    return f"{label:<{LABEL}} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{label:<{LABEL}} {value}"
