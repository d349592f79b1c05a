"""Telemetry: one trace per request, and bounded metrics. The only importer of the OpenTelemetry SDK.

Everything is passed by object: no global provider, no registry of the process, no "current" span. A span
that was made current and kept across a yield is detached in another task when a stream is aborted, which
fills the log with errors; so spans have explicit parents, and nothing is ever attached.

Attribute names without a dot are pdq's own: `span.set(attempt=2)` is `pdq.attempt`. Prompts, answers and
keys never enter a span or a metric.
"""

from pdq.telemetry.metrics import Metrics
from pdq.telemetry.provider import Telemetry
from pdq.telemetry.spans import Span, StageSpan
from pdq.telemetry.start import Start

__all__ = ["Metrics", "Span", "StageSpan", "Start", "Telemetry"]
