"""Clocks: a deadline is set by the broker's clock and kept by a worker's."""

from __future__ import annotations

from collections.abc import Iterator

from pdq.doctor.facts import Facts
from pdq.doctor.finding import Finding, fail, ok, warn

WARN_S = 2.0
"""A beat may take up to this long from its writing to its being stored: less is no skew that can be seen."""
FAIL_S = 10.0
TRAP = "deadlines come from the broker's clock and are kept by the worker's: requests end early, or run on too long"
CURE = "synchronise the clock (chrony, systemd-timesyncd): `timedatectl set-ntp true`"


def this_machine(facts: Facts) -> Iterator[Finding]:
    if facts.broker is None or facts.broker.skew_s is None:
        return
    skew_s, rtt_s = facts.broker.skew_s, facts.broker.rtt_s
    text = f"this machine's clock is {_said(skew_s)} the broker's (± {rtt_s / 2 * 1e3:.0f} ms)"
    yield _judged("clock.machine", "this machine", skew_s, text)


def workers(facts: Facts) -> Iterator[Finding]:
    """By what a worker wrote into its newest beat, and when the broker stored it."""
    skews = {worker.name: worker.beat.at - worker.stored_s for worker in facts.workers if worker.beat.at}
    wrong = {name: skew_s for name, skew_s in skews.items() if abs(skew_s) > WARN_S}
    for name, skew_s in sorted(wrong.items()):
        yield _judged("clock.worker", name, skew_s, f"its clock is {_said(skew_s)} the broker's")
    if skews and not wrong:
        largest = max(skews.values(), key=abs)
        yield ok(
            "clock.worker",
            f"the clocks of {len(skews)} workers are within {abs(largest):.1f} s of the broker's",
            value=f"{largest:.1f} s",
            limit=f"{WARN_S:g} s",
        )


def _judged(check: str, subject: str, skew_s: float, text: str) -> Finding:
    value, limit = f"{skew_s:.1f} s", f"{WARN_S:g} s"
    if abs(skew_s) <= WARN_S:
        return ok(check, text, subject=subject, value=value, limit=limit)
    judge = fail if abs(skew_s) > FAIL_S else warn
    return judge(check, text, subject=subject, value=value, limit=limit, trap=TRAP, cure=CURE)


def _said(skew_s: float) -> str:
    return f"{abs(skew_s):.1f} s {'ahead of' if skew_s >= 0 else 'behind'}"
