"""Faults on demand: `PDQ_ENGINE_SIM_FAULTS`, a comma-separated list of `point.fault=value`.

| point | faults | what happens |
|---|---|---|
| prefill, decode | `fail`, `fail_first` | the work raises Unavailable before it begins |
| | `hang` | the work does nothing until it is stopped from outside |
| | `delay_s` | the work begins so many seconds later |
| store | `fail`, `fail_first`, `hang`, `delay_s` | no KV is stored (`store_failed`), or later (maybe `store_late`) |
| load | `fail`, `fail_first`, `delay_s` | no KV is found, or later |
| decode | `fail_after` | each decode raises Unavailable after so many tokens of its own |
| | `hang_after` | each decode goes silent after so many tokens of its own |
| | `crash_after` | the engine dies after so many tokens in all: everything raises Unavailable from then on |
| | `exit_after` | the process ends after so many tokens in all, as under `kill -9` |

`fail` and `hang` take a share in 0..1 of the executions, spread evenly and starting with the first: 0.1 is
the 1st, 11th, 21st, and 1 is each. `fail_first` takes a number of executions. So a run repeats exactly.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Literal

from pdq.errors import Misconfigured, Unavailable

Point = Literal["prefill", "decode", "store", "load"]
TokenFault = Literal["fail", "hang", "crash", "exit"]

_SHARES = frozenset({"fail", "hang"})
_COUNTS = frozenset({"fail_first", "fail_after", "hang_after", "crash_after", "exit_after"})
_KNOWN: dict[str, frozenset[str]] = {
    "prefill": frozenset({"fail", "fail_first", "hang", "delay_s"}),
    "decode": frozenset({"fail", "fail_first", "hang", "delay_s"}) | (_COUNTS - {"fail_first"}),
    "store": frozenset({"fail", "fail_first", "hang", "delay_s"}),
    "load": frozenset({"fail", "fail_first", "delay_s"}),
}


class Faults:
    """The faults of one engine, and how often each point was passed. Raises Misconfigured for what it cannot read."""

    def __init__(self, text: str = "") -> None:
        self._values = dict(_parse(entry) for entry in text.split(",") if entry.strip())
        self._passed: Counter[Point] = Counter()
        self.after_tokens = any(name.endswith("_after") for name in self._values)
        """Whether something may befall a decode after one of its tokens."""

    async def before(self, point: Point) -> None:
        """Pass a point: delayed, hung until cancelled, or refused with Unavailable, as configured."""
        if not self._values:
            return
        self._passed[point] += 1
        passed = self._passed[point]
        if delay_s := self._of(point, "delay_s"):
            await asyncio.sleep(delay_s)
        if _falls_on(passed, self._of(point, "hang")):
            await asyncio.Event().wait()
        if passed <= self._of(point, "fail_first") or _falls_on(passed, self._of(point, "fail")):
            raise Unavailable(f"fault: {point}.fail on execution {passed}")

    def after_token(self, own: int, total: int) -> TokenFault | None:
        """What befalls a decode with `own` tokens, in an engine that has made `total`."""
        if total == self._of("decode", "exit_after"):
            return "exit"
        if total == self._of("decode", "crash_after"):
            return "crash"
        if own == self._of("decode", "fail_after"):
            return "fail"
        return "hang" if own == self._of("decode", "hang_after") else None

    def _of(self, point: Point, fault: str) -> float:
        return self._values.get(f"{point}.{fault}", 0.0)


def _parse(entry: str) -> tuple[str, float]:
    name, _, text = (part.strip() for part in entry.partition("="))
    point, _, fault = name.partition(".")
    if fault not in _KNOWN.get(point, ()):
        known = ", ".join(f"{point}.{fault}" for point, faults in _KNOWN.items() for fault in sorted(faults))
        raise Misconfigured(f"PDQ_ENGINE_SIM_FAULTS has {name!r}; the faults are {known}")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = 1.0 if fault in _SHARES else math.inf
    if not 0.0 <= value <= most or value == math.inf or (fault in _COUNTS and value % 1):
        kind = "a share in 0..1" if fault in _SHARES else "a whole number" if fault in _COUNTS else "seconds"
        raise Misconfigured(f"PDQ_ENGINE_SIM_FAULTS has {name}={text!r}; it must be {kind}")
    return name, value


def _falls_on(execution: int, share: float) -> bool:
    """Whether a share of all executions includes this one (1, 2, ...), the first of each period."""
    return math.ceil(execution * share) > math.ceil((execution - 1) * share)
