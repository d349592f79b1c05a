"""`pdq up`: one local stack, from nothing to ready, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator

from pdq import settings
from pdq.errors import PdqError
from pdq.messages import ErrorInfo
from pdq.settings import ModelSpec
from pdq.up import model as models
from pdq.up import record as records
from pdq.up.copies import Template
from pdq.up.plan import Options, Plan
from pdq.up.process import GUARD_PATIENCE_S, Guard, Spec
from pdq.up.record import ModelName, Record, SiteRecord
from pdq.up.site import NAME
from pdq.up.stale import end_stale
from pdq.up.supervisor import Recorder, Show, Supervisor, together, unready

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(options: Options, show: Show) -> None:
    """Run the stack in this process until a signal stops it. `show` sees every change.

    Raises AlreadyRunning, Misconfigured, StackFailed or Unavailable; nothing is left running then either.
    """
    layout = options.layout
    layout.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with records.claim(layout, wait_s=3 * GUARD_PATIENCE_S) as lock:
        end_stale(layout)
        layout.prepare()
        started = records.process_started(os.getpid()) or 0.0
        record = Record(pid=os.getpid(), started=started, engine=options.engine, directory=str(layout.root))
        recorder = Recorder(layout, record, show)
        with _remembered(recorder):
            spec = _model(options, recorder)
            asyncio.run(_Stack(options, Plan(options, spec), recorder, Guard(lock)).run())


@contextlib.contextmanager
def _remembered(recorder: Recorder) -> Iterator[None]:
    """An error stays in the record, where whoever waits for the stack finds it; a stack that was stopped
    leaves no record."""
    try:
        yield
    except BaseException as exc:
        code, message = (exc.code, str(exc)) if isinstance(exc, PdqError) else ("internal_error", type(exc).__name__)
        recorder.set(state="failed", note="", error=ErrorInfo(code=code, message=message))
        raise
    recorder.set(state="stopped")
    records.remove(recorder.layout)


def _model(options: Options, recorder: Recorder) -> ModelSpec:
    """The model, its files fetched. No signal is handled yet: Ctrl-C ends a download at once."""
    file = models.default_models_file(settings.models_path(options.environ))
    home = settings.home(options.environ)
    spec = models.resolve(options.model, options.engine, file, home, lambda line: recorder.set(note=line))
    models.write(spec, options.layout.models)
    recorder.set(note="", models=(ModelName(slug=spec.slug, id=spec.id),))
    return spec


class _Stack:
    """The asynchronous part: from the first process to the last."""

    def __init__(self, options: Options, plan: Plan, recorder: Recorder, guard: Guard) -> None:
        self._options = options
        self._plan = plan
        self._recorder = recorder
        self._guard = guard
        self._supervisor = Supervisor(options.layout, recorder, guard)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._serve())
        told = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            serving.cancel()
            await asyncio.wait({serving})
            await self._stop()
        if not serving.cancelled():
            serving.result()

    def _on_signal(self) -> None:
        """The first asks for an orderly stop, the second ends everything at once."""
        if self._stopping.is_set():
            self._supervisor.kill()
        self._stopping.set()

    async def _serve(self) -> None:
        self._supervisor.expect(*self._options.processes)
        try:
            async with asyncio.timeout(self._options.timeout_s):
                await self._start()
        except TimeoutError:
            raise unready(self._recorder.record, self._options.timeout_s) from None
        self._recorder.set(state="ready")
        await self._supervisor.watch()

    async def _start(self) -> None:
        brokers, tiers = self._plan.brokers(), self._tiers()
        # Engines take the longest, and their tiers ask for no broker. What starts last stops first.
        with self._template() as template:
            await together(self._start_services(brokers, template), self._supervisor.start(*tiers))

    async def _start_services(self, brokers: list[Spec], template: Template | None) -> None:
        await self._supervisor.start(brokers)
        await self._plan.init()
        self._recorder.set(nats_url=self._plan.nats_url, site=self._site())
        asking = [self._plan.router(), self._plan.gateway(), *self._plan.at_site()]
        await together(self._supervisor.start(asking), self._start_workers(template))

    @contextlib.contextmanager
    def _template(self) -> Iterator[Template | None]:
        """What the workers are copied from, importing from now on, where there can be one."""
        with contextlib.ExitStack() as stack:
            template = None
            if (environment := self._plan.template()) is not None:
                with contextlib.suppress(OSError):
                    template = Template(environment, self._options.layout.log("template"), self._guard)
                    stack.callback(template.close)
            yield template

    def _tiers(self) -> list[list[Spec]]:
        if self._options.engine == "vllm":
            return self._plan.caches()
        shutil.rmtree(self._options.layout.sim_kv, ignore_errors=True)
        self._options.layout.sim_kv.mkdir()
        return []

    async def _start_workers(self, template: Template | None) -> None:
        if template is not None and await template.imported():
            await self._supervisor.start_copies(self._plan.workers(), template)
        else:
            await self._supervisor.start(self._plan.workers())

    def _site(self) -> SiteRecord | None:
        made = self._plan.site
        return SiteRecord(name=NAME, nats_url=made.nats_url) if made is not None else None

    async def _stop(self) -> None:
        self._recorder.set(state="stopping")
        await self._supervisor.stop()
        await asyncio.to_thread(self._guard.close)
