"""A service with one of its guards taken out, to show that a run notices: `python -m tests.chaos.mutant GUARD MODULE`.

Nothing of this is in the services themselves: the guard is replaced in this process before the service starts.
Several guards: names joined by `+`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

from pdq.bus import Channel
from pdq.engines.sim_model import Generation
from pdq.log import OutputWriter, RequestLog
from pdq.stage import claims


def no_fence() -> None:
    """A worker writes as long as the request has not ended, whoever owns it by now."""

    def owns(newest: Any, stage: Any, attempt: int) -> str:
        return "ended" if newest is None or newest.state.ended else ""

    claims.owns = owns


def no_digest() -> None:
    """An end does not say what the answer was."""
    OutputWriter.digest = lambda self: ""  # type: ignore[method-assign]


def no_comparison() -> None:
    """A second attempt does not look at what the first one showed."""
    OutputWriter._compare = lambda self: None  # type: ignore[method-assign]


def no_recovery_read() -> None:
    """A second attempt does not read what the log holds."""

    async def nothing(self: RequestLog, tenant: str, request: str, seq: int) -> list[Any]:
        return []

    RequestLog.read_up_to = nothing  # type: ignore[method-assign]


def no_resend() -> None:
    """Tokens that the broker has not acknowledged are taken for stored."""

    async def stored(self: Channel, timeout_s: float) -> None:
        pass

    async def nothing(self: Channel, sent_before: float) -> None:
        pass

    Channel.flush = stored  # type: ignore[method-assign]
    Channel.resend = nothing  # type: ignore[method-assign]


def other_model() -> None:
    """Not a guard: an engine that answers otherwise, as after an upgrade that nobody noticed."""
    candidate = Generation._candidate
    Generation._candidate = (  # type: ignore[method-assign]
        lambda self, state, attempt: candidate(self, state[::-1], attempt)
    )


MUTATIONS: dict[str, Callable[[], None]] = {
    "no-fence": no_fence,
    "no-digest": no_digest,
    "no-comparison": no_comparison,
    "no-recovery-read": no_recovery_read,
    "no-resend": no_resend,
    "other-model": other_model,
}


def main() -> None:
    guards, module = sys.argv[1:]
    for guard in guards.split("+"):
        MUTATIONS[guard]()
    sys.argv[1:] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
