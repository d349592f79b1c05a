"""What came of a run of `tests.bench.kv`, for people and for machines. All arithmetic on its times is here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.bench.stats import Spread, percentile, ratios, spread

MB = 1e6
LEGEND = (
    "out, waited: the store, and what is not yet readable when prefill's steps end; a pool is written to meanwhile",
    "out, readable: from the store's begin until decode can read it; prompts of one step",
    "in: decode's lookup, which brings KV near, and its load; share of handoff: waited and in, of the whole time",
)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, computed on decode alone and handed over, and its bytes by other ways. Times in seconds."""

    tokens: int
    bytes: int
    """Of KV, in whole chunks: what was moved."""
    plain_s: float
    """To the first token when decode computes the prompt itself."""
    ttft_s: float
    """To the first token by way of prefill, without the queues between the stages."""
    compute_s: float
    """Prefill's steps, less what they spent on stores."""
    store_s: float
    """From the prefill engine to its server's memory; part of its steps."""
    confirm_s: float
    """From the end of prefill's steps until decode can read all of it."""
    readable_s: float | None
    """From the begin of the store until then; None where there were several steps, with compute in between."""
    fetch_s: float
    """Decode's lookup, in which its server brings the KV from the pool or the peer."""
    load_s: float
    """From the decode server's memory to the engine."""
    first_s: float
    """Decode's step for the first token: what no whole chunk held, at least one token."""
    memcpy_s: float
    raw_out_s: float | None
    """Writing the same chunks to the bare store; None where the mode has none."""
    raw_in_s: float | None
    """Reading them."""

    @property
    def out_s(self) -> float:
        return self.store_s + self.confirm_s

    @property
    def in_s(self) -> float:
        return self.fetch_s + self.load_s

    @property
    def handoff_s(self) -> float:
        return self.out_s + self.in_s

    @property
    def rest_s(self) -> float:
        """Of `ttft_s`, what no part has: prefill's lookup, and processes that wake each other."""
        return self.ttft_s - self.compute_s - self.handoff_s - self.first_s

    @property
    def share(self) -> float:
        """The handoff's share of the time to the first token, 0 to 1."""
        return self.handoff_s / self.ttft_s


class ModeResult(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    load: float
    """One-minute load average when it was done."""
    samples: list[Sample]
    """In the order they were taken."""

    def by_tokens(self) -> dict[int, list[Sample]]:
        """The repeats of each prompt length."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.tokens, []).append(sample)
        return found


class Report(msgspec.Struct, frozen=True, kw_only=True):
    load_before: float
    """One-minute load average before the run."""
    load_after: float
    cores: int
    model: str
    kv_bytes_per_token: int
    repeats: int
    hops_s: list[float]
    """Two durable hops, published, acknowledged and delivered, one after the other; by repeat."""
    results: list[ModeResult]

    def lines(self) -> list[str]:
        """The summary as text."""
        return [
            f"load average {self.load_before:.1f} before, {self.load_after:.1f} after, on {self.cores} cores",
            f"{self.model}, {self.kv_bytes_per_token:,} B of KV per token; each engine on one core",
            f"medians of {self.repeats} repeats, in brackets the least and the most; a ratio is that of one repeat",
            *LEGEND,
            *(line for result in self.results for line in ("", *_transfers(result), "", *_first_tokens(result))),
            "",
            *self._hops(),
        ]

    def _hops(self) -> list[str]:
        ms = spread([1e3 * each for each in self.hops_s])
        line = f"two durable hops: {ms.median:.1f} ms ({ms.min:.1f} … {ms.max:.1f} of {len(self.hops_s)})"
        ttfts: dict[int, list[float]] = {}
        for sample in (sample for result in self.results for sample in result.samples):
            ttfts.setdefault(sample.tokens, []).append(sample.ttft_s)
        shares = [f"{hops_share(self.hops_s, each):.2%} at {tokens} tokens" for tokens, each in ttfts.items()]
        return [f"{line}; of the whole time to the first token, {', '.join(shares)}"]


def hops_share(hops_s: Sequence[float], ttft_s: Sequence[float]) -> float:
    """The median hops' share of a median time to the first token that they are added to, 0 to 1."""
    hops = percentile(hops_s, 0.5)
    return hops / (hops + percentile(ttft_s, 0.5))


def _transfers(result: ModeResult) -> list[str]:
    title = f"{result.mode} (load {result.load:.1f})"
    lines = [
        f"{title:<25}{'MB':>5}{'ms':>8}{'MB/s':>7}{'memcpy MB/s':>13}{'its time':>19}{'bare MB/s':>11}{'its time':>19}"
    ]
    for tokens, samples in result.by_tokens().items():
        raw_out, raw_in = [each.raw_out_s for each in samples], [each.raw_in_s for each in samples]
        lines.append(_transfer(f"{tokens} tokens out, waited", samples, [each.out_s for each in samples], raw_out))
        readable = [each.readable_s for each in samples if each.readable_s is not None]
        if readable:
            lines.append(_transfer("out, readable", samples, readable, raw_out))
        lines.append(_transfer("in", samples, [each.in_s for each in samples], raw_in))
    return lines


def _transfer(name: str, samples: Sequence[Sample], times: Sequence[float], raw_s: Sequence[float | None]) -> str:
    """A way's times by repeat, beside those of memcpy and of the bare store."""
    num_bytes, memcpy = samples[0].bytes, [each.memcpy_s for each in samples]
    raw = [each for each in raw_s if each is not None]
    return (
        f"{name:>25}{num_bytes / MB:>5.1f}{_ms(times):>8}{_rate(num_bytes, times):>7}{_rate(num_bytes, memcpy):>13}"
        f"{_ratio(ratios(times, memcpy)):>19}"
        f"{_rate(num_bytes, raw) if raw else '-':>11}{_ratio(ratios(times, raw)) if raw else '-':>19}"
    )


def _first_tokens(result: ModeResult) -> list[str]:
    names = ("compute", "store", "confirm", "fetch", "load", "first", "rest")
    lines = [
        f"{'ms to the first token':<25}{'alone':>8}{'handed':>8}{'ratio':>19}"
        + "".join(f"{name:>8}" for name in names)
        + f"{'share of handoff %':>20}"
    ]
    for tokens, samples in result.by_tokens().items():
        plain, ttft = [each.plain_s for each in samples], [each.ttft_s for each in samples]
        parts = "".join(f"{_ms([getattr(each, f'{name}_s') for each in samples]):>8}" for name in names)
        lines.append(
            f"{f'{tokens} tokens':>25}{_ms(plain):>8}{_ms(ttft):>8}{_ratio(ratios(ttft, plain)):>19}{parts}"
            f"{_ratio(spread([100 * each.share for each in samples])):>20}"
        )
    return lines


def _ms(seconds: Sequence[float]) -> str:
    return _figure(1e3 * percentile(seconds, 0.5))


def _rate(num_bytes: int, seconds: Sequence[float]) -> str:
    return _figure(num_bytes / MB / percentile(seconds, 0.5))


def _ratio(ratio: Spread | None) -> str:
    if ratio is None:
        return "-"
    return f"{_figure(ratio.median)} ({_figure(ratio.min)} … {_figure(ratio.max)})"


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
