"""What the replays amount to: goodput by order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from pdq.bench import metrics
from pdq.bench.metrics import Spread
from pdq.bench.records import INTERRUPTED, Record

from tests.bench.replay_setup import TPOT_TIMES, TTFT_TIMES, Setup

AUTO = "auto"


class Verdict(msgspec.Struct, frozen=True):
    """Whether a request met its objectives. What still ran at the end is judged by its pace up to then."""

    ttft: bool
    tpot: bool

    @property
    def good(self) -> bool:
        return self.ttft and self.tpot


def judge(record: Record, setup: Setup) -> Verdict | None:
    """None: it still ran at the end, and had time left for its first token."""
    if record.error not in ("", INTERRUPTED):
        return Verdict(False, False)
    most_s = TTFT_TIMES * setup.prompt_ms(record.input_tokens) / 1e3
    if not record.chunks:
        return None if record.end_s - record.sent_s <= most_s else Verdict(False, True)
    most_tpot_s = TPOT_TIMES * setup.token_ms(record.input_tokens + record.output_tokens // 2) / 1e3
    return Verdict(metrics.ttft_s(record) <= most_s, pace_s(record) <= most_tpot_s)


def pace_s(record: Record) -> float:
    """Seconds a token after the first, up to the last that came."""
    if record.succeeded:
        return metrics.tpot_s(record)
    num_tokens = sum(num for _, num in record.chunks)
    return (record.chunks[-1][0] - record.chunks[0][0]) / max(1, num_tokens - 1)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One order. Shares are of the requests that were judged."""

    order: str
    requests: int
    failed: int
    unended: int
    """They still ran at the end."""
    good_per_s: float
    good_share: float
    ttft_share: float
    tpot_share: float
    ttft_ms: Spread
    tpot_ms: Spread
    streams: float
    """Answers that a decode worker was at, at one time, on average."""
    lag_p99_ms: float
    decisions: dict[str, int]
    cpu_cores: dict[str, float]

    def line(self) -> str:
        shares = "".join(f"{100 * share:>9.1f}" for share in (self.good_share, self.ttft_share, self.tpot_share))
        ttft = f"{self.ttft_ms.p50 / 1e3:>9.2f}{self.ttft_ms.p99 / 1e3:>9.2f}"
        tpot = f"{self.tpot_ms.p50:>8.0f}{self.tpot_ms.p99:>8.0f}"
        rest = f"{self.streams:>9.1f}{sum(self.cpu_cores.values()):>7.2f}{self.failed:>8}"
        return f"  {self.order:<15}{self.good_per_s:>9.3f}{shares}{ttft}{tpot}{rest}"


HEADER = (
    f"  {'order':<15}{'good/s':>9}{'good %':>9}{'TTFT %':>9}{'TPOT %':>9}{'TTFT p50':>9}{'p99 s':>9}"
    f"{'TPOT p50':>8}{'p99 ms':>8}{'streams':>9}{'cores':>7}{'failed':>8}"
)


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """One trace. prefill_load: what its prompts take, of the time of all prefill workers. client_cores: CPU that the
    requests of all orders took here."""

    trace: str
    setup: Setup
    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int
    prefill_load: float
    ttft_times: float = TTFT_TIMES
    tpot_times: float = TPOT_TIMES
    load_average: tuple[float, float]
    """Before and after."""
    client_cores: float
    orders: list[Figures]

    @property
    def auto_over_best(self) -> float | None:
        """Goodput of `auto` over that of the best other order."""
        good = {each.order: each.good_per_s for each in self.orders}
        auto, best = good.pop(AUTO, None), max(good.values(), default=0.0)
        return auto / best if auto is not None and best else None

    def lines(self) -> list[str]:
        setup, total = self.setup, sum(sum(each.cpu_cores.values()) for each in self.orders) + self.client_cores
        prompt, answer = self.input_tokens / self.requests, self.output_tokens / self.requests
        lines = [
            f"{self.trace}: {self.requests} requests in {self.seconds:g} s (speed {setup.speed:g}, every "
            f"{setup.every}.), {prompt:.0f} + {answer:.0f} tokens each",
            f"  {setup.prefill_workers} prefill and {setup.decode_workers} decode workers of {setup.profile}, "
            f"{setup.factor:g} times slower; prompts are {100 * self.prefill_load:.0f} % of prefill's time",
            f"  good: TTFT within {self.ttft_times:g}, TPOT within {self.tpot_times:g} times that of a request alone",
            f"  {total:.2f} cores in all, client {self.client_cores:.2f}; lag p99 "
            f"{max(each.lag_p99_ms for each in self.orders):.0f} ms; load average "
            f"{self.load_average[0]:.1f} before, {self.load_average[1]:.1f} after",
            HEADER,
            *(each.line() for each in self.orders),
        ]
        for each in self.orders:
            if each.order == AUTO:
                chosen = sorted(each.decisions.items(), key=lambda item: -item[1])
                lines.append("  auto: " + ", ".join(f"{name} {number}" for name, number in chosen))
        if (ratio := self.auto_over_best) is not None:
            lines.append(f"  auto over the best of the others: {ratio:.3f}")
        return lines


def figures(
    order: str,
    records: Iterable[Record],
    setup: Setup,
    seconds: float,
    decisions: dict[str, int],
    cpu_cores: dict[str, float],
) -> Figures:
    counted = [record for record in records if not record.warm_up]
    judged = [verdict for record in counted if (verdict := judge(record, setup)) is not None]
    heard = [record for record in counted if record.chunks]
    good = sum(verdict.good for verdict in judged)
    streaming_s = sum(record.chunks[-1][0] - record.chunks[0][0] for record in heard)
    total = max(1, len(judged))
    return Figures(
        order=order,
        requests=len(counted),
        failed=sum(record.error not in ("", INTERRUPTED) for record in counted),
        unended=sum(record.error == INTERRUPTED for record in counted),
        good_per_s=good / seconds,
        good_share=good / total,
        ttft_share=sum(verdict.ttft for verdict in judged) / total,
        tpot_share=sum(verdict.tpot for verdict in judged) / total,
        ttft_ms=metrics.spread(metrics.ttft_s(record) for record in heard),
        tpot_ms=metrics.spread(pace_s(record) for record in heard if record.output_tokens > 1),
        streams=streaming_s / seconds / setup.decode_workers,
        lag_p99_ms=metrics.spread(record.sent_s - record.planned_s for record in counted).p99,
        decisions=decisions,
        cpu_cores=cpu_cores,
    )


def table(replays: Sequence[Replay]) -> str:
    return "\n\n".join("\n".join(replay.lines()) for replay in replays)
