"""One claimed job while it is worked on: what the settlement needs to know of it."""

from __future__ import annotations

from typing import Any

from pdq.bus import Delivery
from pdq.engines.base import Phase
from pdq.log import Entry, OutputWriter
from pdq.messages import Job, State, Usage
from pdq.stage.attempt import Outcome
from pdq.stage.jobs import stage_of
from pdq.telemetry import StageSpan


class ClaimedJob:
    """A job, the claim on it, its span, and (decode) the writer of its tokens."""

    def __init__(self, job: Job, attempt: int, entry: Entry, delivery: Delivery, span: StageSpan) -> None:
        self.job = job
        self.attempt = attempt
        self.entry = entry
        self.delivery = delivery
        self.span = span
        self.writer: OutputWriter | None = None
        self.delegated = False
        """A prefill job of ours may be queued."""
        self._phases: list[Phase] = []

    def took(self, phase: Phase) -> None:
        """A phase of the stage itself, not of its engine."""
        self.span.phase(phase)
        self._phases.append(phase)

    @property
    def state(self) -> State:
        """The register as of our claim, or of what we waited for since."""
        return self.entry.state

    def output_fields(self) -> dict[str, Any]:
        """What a terminal record says of the answer so far; nothing before decode."""
        if self.writer is None:
            return {}
        prompt = len(self.job.prompt) // 4
        made = self.writer.num_tokens
        return {
            "num_tokens": made,
            "output_digest": self.writer.digest(),
            "usage": Usage(prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made),
        }

    def timings_ms(self, outcome: Outcome) -> dict[str, float]:
        """Milliseconds by part of this stage (`prefill_queue`, `prefill_kv_store`, `prefill`, ...), added to
        those of the stages before."""
        stage = stage_of(self.job)
        made = {f"{stage}_queue": self.span.queue_wait_s * 1e3}
        for phase in (*self._phases, *outcome.phases):
            part = phase.name.removeprefix("engine.").replace(".", "_")
            made[part if part == stage else f"{stage}_{part}"] = phase.duration_ms
        first = first_token_ns(outcome.phases)
        if first and self.state.submitted:
            made["ttft"] = first / 1e6 - self.state.submitted * 1e3
        return self.state.timings_ms | {name: round(ms, 3) for name, ms in made.items()}


def first_token_ns(phases: tuple[Phase, ...]) -> int:
    """Unix nanoseconds of the first output token; 0 when there was none."""
    return next((at for phase in phases for event, at in phase.events if event == "first_token"), 0)
