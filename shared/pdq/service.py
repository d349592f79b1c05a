"""What the `__main__` of every service shares: the event loop, the log, signals, and the health server.

`run("router", main)` gives `main` an event that the first SIGTERM or SIGINT sets; the service then stops
in its own order and returns. A second signal cancels it, a third ends the process at once.
Exit codes: 0 stopped as asked, 1 failed, 2 cannot start like this (`Misconfigured`). The last line of the log names
the reason of a stop: a signal, `drain`, or `idle`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Self

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pdq import logs, settings
from pdq.errors import Interrupted, Misconfigured, PdqError
from pdq.settings import Group, HttpSettings
from pdq.telemetry import Metrics
from pdq.telemetry.metrics import CONTENT_TYPE

log = logging.getLogger(__name__)

FAILED, MISCONFIGURED = 1, 2

GARBAGE = 20_000
"""Objects made and not freed before garbage is looked for. Little of what a request leaves is in cycles; with Python's
own 700, looking took a thirtieth of a service's time."""


class Stop(asyncio.Event):
    """Set once by whoever ends the service; the first reason counts."""

    reason = ""

    def because(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.set()


Main = Callable[[Stop], Coroutine[Any, Any, None]]


def run(name: str, main: Main) -> NoReturn:
    """Run a service until it returns, and exit. `name`: `router`, `prefill`, ..."""
    sys.exit(_run(name, main))


def log_settings(*groups: Group) -> None:
    """Log the settings in force, secrets hidden: one line a group."""
    for group in groups:
        log.info("settings", extra=settings.shown(group))


def _run(name: str, main: Main) -> int:
    logs.to_stderr(name)
    try:
        logs.set_level(settings.log_level())
        settings.check_environment()
        # What was imported stays, and is not looked at again.
        gc.freeze()
        gc.set_threshold(GARBAGE)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_stopped(main))
    except asyncio.CancelledError:
        log.error("stopped before all was done")
        return FAILED
    except Interrupted:
        log.info("stopped before it had started")
    except Exception as exc:
        return _exit_code(exc)
    return 0


def _exit_code(exc: Exception) -> int:
    """Expected errors are one line of log; anything else shows where it comes from."""
    causes = list(_leaves(exc))
    expected = [cause for cause in causes if isinstance(cause, PdqError)]
    if len(expected) < len(causes):
        log.critical("the service failed", exc_info=exc)
        return FAILED
    for cause in expected:
        log.critical("%s", cause, extra={"code": cause.code})
    return MISCONFIGURED if any(isinstance(cause, Misconfigured) for cause in expected) else FAILED


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc


async def _until_stopped(main: Main) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()
    task = loop.create_task(main(stop))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stop, task)
    log.info("started", extra={"pid": os.getpid()})
    await task
    log.info("stopped", extra={"reason": stop.reason} if stop.reason else {})


def _on_signal(number: signal.Signals, stop: Stop, task: asyncio.Task[None]) -> None:
    log.info("signal", extra={"signal": number.name})
    if not stop.is_set():
        stop.because(number.name)
    elif not task.cancelling():
        task.cancel()
    else:
        os._exit(128 + number)


class Check(NamedTuple):
    """One condition of readiness: `probe` returns, or raises and says why not."""

    name: str
    probe: Callable[[], Awaitable[None]]
    required: bool = True
    """False: its failure is degraded service (a KV tier that is gone), not unreadiness."""
    bound_s: float = 2.0


class HealthServer:
    """`/healthz`, `/readyz` and `/metrics` over HTTP, as an async context manager.

    `/healthz` answers 200 as long as the event loop runs. `/readyz` answers 200, or 503 while a required
    check fails or the service is stopping, and tells of each check in JSON.
    """

    def __init__(self, http: HttpSettings, metrics: Metrics, checks: Iterable[Check], stop: asyncio.Event) -> None:
        self._settings = http
        self._metrics = metrics
        self._checks = tuple(checks)
        self._stop = stop
        self._runner: web.AppRunner | None = None
        self.port = 0
        """The port it listens on, once started; 0 where the settings want none."""

    async def start(self) -> int:
        """Listen; the port is logged and returned. Raises Misconfigured when it is taken."""
        host, port = self._settings.host, self._settings.port
        if port == "off":
            return 0
        app = web.Application()
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_text),
            ]
        )
        http_log = logging.getLogger(f"{__name__}.http")
        http_log.addFilter(_not_malformed)
        self._runner = web.AppRunner(app, access_log=None, logger=http_log, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as exc:
            await self.close()
            raise Misconfigured(f"cannot serve PDQ_HTTP_HOST {host!r}, PDQ_HTTP_PORT {port}: {exc.strerror}") from exc
        self.port = self._runner.addresses[0][1]
        log.info("health server", extra={"url": f"http://{host}:{self.port}"})
        return self.port

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _readyz(self, _: web.Request) -> web.Response:
        found = dict(zip((c.name for c in self._checks), await asyncio.gather(*map(_probe, self._checks)), strict=True))
        if self._stop.is_set():
            found["stopping"] = {"ok": False, "required": True, "error": "the service is stopping"}
        failing = [check for check in found.values() if not check["ok"]]
        ready = not any(check["required"] for check in failing)
        body = {"ready": ready, "degraded": bool(failing), "checks": found}
        return web.json_response(body, status=200 if ready else 503)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})


def _not_malformed(record: logging.LogRecord) -> bool:
    """aiohttp would log, at length, what a port scanner sends; it is answered with 400, which is enough."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _probe(check: Check) -> dict[str, Any]:
    began = time.monotonic()
    error = ""
    try:
        async with asyncio.timeout(check.bound_s):
            await check.probe()
    except TimeoutError:
        error = f"no answer within {check.bound_s:g} s"
    except PdqError as exc:
        error = logs.scrub(str(exc))
    except Exception as exc:
        # Its text may hold anything; the type must do.
        error = type(exc).__name__
    took_ms = round((time.monotonic() - began) * 1e3, 1)
    verdict = {"ok": not error, "required": check.required, "took_ms": took_ms}
    return verdict | {"error": error} if error else verdict
