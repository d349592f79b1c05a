"""The one worker loop, what a claim may do, and the settlement table.

A service is a handler: it gets an `Attempt` at a job and an engine, and returns what came of it. It knows
no NATS and no OpenTelemetry.
"""

from pdq.stage.attempt import Answer, Attempt, Handler, Handoff, Outcome
from pdq.stage.loop import Admit, Loop
from pdq.stage.run import Run
from pdq.stage.worker import StageWorker

__all__ = ["Admit", "Answer", "Attempt", "Handler", "Handoff", "Loop", "Outcome", "Run", "StageWorker"]
