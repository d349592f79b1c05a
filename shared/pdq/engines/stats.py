"""The newest numbers of vLLM's scheduler, for /metrics."""

from __future__ import annotations

from typing import Any


class LatestStats:
    """`factory` is what vLLM takes as a stat logger."""

    def __init__(self) -> None:
        self._latest: Any = None

    def factory(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        owner = self

        class Logger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self) -> None: ...

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                owner._latest = scheduler_stats or owner._latest

            def log_engine_initialized(self) -> None: ...

        return Logger()

    def numbers(self) -> dict[str, float]:
        """Requests running and waiting, and the share of KV blocks in use (0 to 1)."""
        latest = self._latest
        if latest is None:
            return {"running": 0, "waiting": 0, "kv_usage": 0.0}
        waiting = latest.num_waiting_reqs + latest.num_skipped_waiting_reqs
        return {"running": latest.num_running_reqs, "waiting": waiting, "kv_usage": latest.kv_cache_usage}
