"""What came of a run, for people and for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from pdq.log import Transcript
from pdq.messages import Event

from tests.chaos.plan import ROLES, FaultKind


class Failure(msgspec.Struct, frozen=True):
    """One request that is not as it must be."""

    request: str
    violations: list[str]
    log: list[str]


class Report(msgspec.Struct, kw_only=True):
    seed: int
    requests: int
    duration_s: float = 0.0
    outcomes: dict[str, int] = {}
    faults: dict[str, dict[str, int]] = {}
    """Done, by kind, then by role."""
    skipped: int = 0
    """Faults whose target was down, or in the hands of another fault."""
    attempts: dict[str, int] = {}
    """Requests by what their second attempts were: `prefill again`, `decode again`, `shown before` (tokens were
    out when the attempt began), `from several` (the answer's tokens come from more than one attempt)."""
    orders: dict[str, int] = {}
    """Requests by order; of decode-first those whose prefill was made elsewhere (`delegated`), and those that decode
    computed after all, by cause (`local late`, ...); and those that preferred a decode worker, and ended there."""
    most_attempts: int = 0
    troubles: list[str] = []
    failures: list[Failure] = []

    @property
    def ok(self) -> bool:
        return not self.troubles and not self.failures

    def count_faults(self, done: Counter[tuple[FaultKind, str]]) -> None:
        self.faults = {}
        for (kind, role), count in sorted(done.items()):
            self.faults.setdefault(kind, {})[role] = count

    def count_logs(self, logs: Iterable[Sequence[Event]]) -> None:
        outcomes, attempts, orders = Counter[str](), Counter[str](), Counter[str]()
        for events in logs:
            newest = next((event.state for event in reversed(events) if event.state is not None), None)
            if newest is None:
                outcomes["lost"] += 1
                continue
            outcomes[newest.event if newest.ended else "open"] += 1
            orders[newest.order or "none"] += 1
            orders["delegated"] += newest.order == "decode-first" and newest.promise is not None
            orders["preferring a worker"] += bool(newest.prefer)
            orders["met it"] += bool(newest.prefer) and newest.decode.owner == newest.prefer
            if newest.local:
                orders[f"local {newest.local}"] += 1
            self.most_attempts = max(self.most_attempts, newest.prefill.attempt, newest.decode.attempt)
            attempts["prefill again"] += newest.prefill.attempt > 1
            attempts["decode again"] += newest.decode.attempt > 1
            attempts["shown before"] += shown_before(events)
            attempts["from several"] += len(_sources(events)) > 1
        self.outcomes, self.attempts, self.orders = dict(outcomes), dict(attempts), dict(orders)

    def lines(self) -> list[str]:
        """The summary as text."""
        kinds = [f"{kind} {sum(by.values())} ({_by_role(by)})" for kind, by in self.faults.items()]
        lines = [
            f"seed {self.seed}: {self.requests} requests in {self.duration_s:.0f} s: {_counts(self.outcomes)}",
            f"faults: {', '.join(kinds)}; {self.skipped} skipped",
            f"orders: {_counts(self.orders)}",
            f"attempts: {_counts(self.attempts)}; at most {self.most_attempts}",
        ]
        lines += [f"trouble: {trouble}" for trouble in self.troubles]
        for failure in self.failures:
            lines += ["", f"request {failure.request}:", *(f"  {line}" for line in failure.violations + failure.log)]
        verdict = "ok" if self.ok else f"FAILED: {len(self.failures)} requests, {len(self.troubles)} troubles"
        return [*lines, verdict]


def log_lines(events: Sequence[Event]) -> list[str]:
    """A request's log, a line a record."""
    return [_line(event) for event in events]


def _line(event: Event) -> str:
    if event.out is not None:
        out = event.out
        return f"{event.seq:>7}     out attempt {out.attempt} [{out.index}+{len(out.token_ids())}] {out.text[:60]!r}"
    assert event.state is not None
    state = event.state
    more = f"{state.stage} {state.worker} {state.cause} {state.error.code if state.error else ''}".split()
    claims = f"prefill {state.prefill.attempt} {state.prefill.owner} decode {state.decode.attempt} {state.decode.owner}"
    ended = f" {state.num_tokens} tokens" if state.ended else ""
    return f"{event.seq:>7} {state.at:.3f} {state.event} {' '.join(more)} ({claims}){ended}"


def shown_before(events: Sequence[Event]) -> bool:
    transcript = Transcript()
    for event in events:
        before = transcript.attempt
        transcript.feed(event)
        if transcript.attempt > before and transcript.ids:
            return True
    return False


def _sources(events: Sequence[Event]) -> set[int]:
    """Attempts whose tokens are part of the answer."""
    transcript, sources = Transcript(), set[int]()
    for event in events:
        if transcript.feed(event):
            sources.add(transcript.attempt)
    return sources


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _by_role(by: dict[str, int]) -> str:
    return ", ".join(f"{role} {by[role]}" for role in (*ROLES, "client", "broker") if role in by)
