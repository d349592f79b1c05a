"""What `pdq bench compare` does."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdq import settings
from pdq.bench import metrics, plots
from pdq.bench.compare import hardware, loads, pace, setups
from pdq.bench.compare import plots as pictures
from pdq.bench.compare.loads import Kind, Sizes
from pdq.bench.compare.pace import Pace, Rates
from pdq.bench.compare.report import Report, report
from pdq.bench.compare.rows import Run
from pdq.bench.compare.run import Comparison, Plan
from pdq.bench.compare.setups import Setup
from pdq.bench.compare.topologies import Common
from pdq.bench.records import Record
from pdq.cli import exits, output
from pdq.cli.compare_progress import shown
from pdq.cli.running import Stopped, run
from pdq.errors import Misconfigured, Rejected
from pdq.up import model as models
from pdq.up.model import EngineKind

GATEWAY_PORT = settings.variable(settings.GatewaySettings, "port")
KV_MEMORY_GB = settings.variable(settings.KvServerSettings, "memory_gb")
MEMORY_GB = "2"
"""Of each KV server, unless it is said otherwise. What a local stack gives it has less room than two long prompts and
their encrypted form take, once it is so full that it evicts: KV is then not loaded."""
SIM_RATES = Rates(0.6, 7.0, 1.4)
"""A sim engine's pace is a setting: there is nothing to measure."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A comparison, as the command line describes it. "" and None: not said; rates are then what one half can bear."""

    setups: str
    budgets: str
    rounds: int
    seconds: float
    warm_up_s: float
    chat_rate: float | None
    long_every_s: float | None
    short_rate: float | None
    seed: int
    goodput: tuple[str, ...]
    model: str
    engine: EngineKind
    timeout_s: float
    start_timeout_s: float
    logs: Path | None
    plot: Path | None
    save: Path | None

    def chosen(self) -> tuple[Setup, ...]:
        """The set-ups. Raises Rejected."""
        names = self.setups or ",".join(setups.SIM if self.engine == "sim" else setups.LETTERS)
        found = setups.wanted(names, self.budgets)
        if self.engine == "sim" and (real := [each.name for each in found if each.name not in setups.SIM]):
            raise Rejected(f"set-up {real[0]!r} needs vLLM: leave --engine sim out", code="usage", param="setups")
        return tuple(found)

    def plan(self, rates: Rates) -> Plan:
        """Raises Rejected."""
        sizes = Sizes(
            seconds=self.seconds,
            warm_up_s=self.warm_up_s,
            chat_rate=rates.chat_rate,
            long_every_s=rates.long_every_s,
            short_rate=rates.short_rate,
        )
        plan = Plan(setups=self.chosen(), rounds=self.rounds, sizes=sizes, seed=self.seed, timeout_s=self.timeout_s)
        for load in loads.TITLES:
            for number in range(plan.rounds):
                plan.load(load, number)
        return plan


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `--save`."""

    setup: str
    load: str
    round: int
    kind: Kind
    record: Record


def run_compare(wanted: Wanted, as_json: bool, environ: Mapping[str, str] = os.environ) -> int:
    """Run it, report, and return the exit code. Raises PdqError, OSError and OutputClosed."""
    settings.check_environment(environ)
    wanted.chosen()  # What is no set-up is refused before anything is fetched or measured.
    slos = metrics.slos(wanted.goodput)
    if wanted.plot is not None:
        plots.check()
    common = _common(wanted, environ)
    code, before = exits.OK, os.getloadavg()[0]
    with _directory(wanted.logs) as directory:
        rates, measured = _rates(wanted, common, directory)
        plan = wanted.plan(rates)
        with shown(plan.num_requests) as progress:
            comparison = Comparison(plan, common, directory, progress)
            try:
                run(comparison.run)
            except Stopped as exc:
                code = 128 + exc.number
    if code:
        output.note("stopped: this is what was measured so far")
    told = report(plan, comparison.found, slos, _machine(common, before), measured)
    _report(wanted, told, comparison.found, as_json)
    return code or (exits.OK if any(row.counts for row in told.rows) else exits.FAILED)


def _common(wanted: Wanted, environ: Mapping[str, str]) -> Common:
    """Raises Misconfigured. No signal is handled yet: Ctrl-C ends a download at once."""
    file = models.default_models_file(settings.models_path(environ))
    spec = models.resolve(wanted.model, wanted.engine, file, settings.home(environ), output.note)
    longest = loads.LONG_INPUT[1] + loads.LONG_OUTPUT
    if spec.max_model_len < longest:
        raise Misconfigured(f"model {spec.slug} takes {spec.max_model_len} tokens; long prompts have up to {longest}")
    places = hardware.find(environ) if wanted.engine == "vllm" else hardware.ANYWHERE
    passed = {KV_MEMORY_GB: MEMORY_GB, **environ, GATEWAY_PORT: "0"}
    return Common(spec, wanted.engine, places, passed, wanted.start_timeout_s)


def _rates(wanted: Wanted, common: Common, directory: Path) -> tuple[Rates, Pace | None]:
    """Those that are given, and for others what one half can bear; None where nothing was measured for it.

    Raises PdqError and Stopped.
    """
    given = (wanted.chat_rate, wanted.long_every_s, wanted.short_rate)
    measured, allowed = None, SIM_RATES
    if None in given and wanted.engine == "vllm":
        with shown(pace.NUM_REQUESTS) as progress:
            measured = run(lambda: pace.measure(common, directory, wanted.timeout_s, progress))
        allowed = pace.rates(measured, wanted.chat_rate)
        output.note(f"one half: {measured}")
    chosen = (one if one is not None else other for one, other in zip(given, allowed, strict=True))
    return Rates(*chosen), measured


@contextlib.contextmanager
def _directory(logs: Path | None) -> Iterator[Path]:
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        yield logs.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="pdq-compare-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _machine(common: Common, load_before: float) -> dict[str, Any]:
    return {
        "model": f"{common.model.id} {common.model.dtype}",
        "engine": common.engine,
        "first": str(common.hardware.first),
        "second": str(common.hardware.second),
        "load average before": round(load_before, 2),
    }


def _report(wanted: Wanted, told: Report, runs: list[Run], as_json: bool) -> None:
    if as_json:
        output.json(msgspec.to_builtins(told))
    else:
        output.line("\n".join(told.lines()))
    if wanted.save is not None:
        _save(wanted.save, runs)
    if wanted.plot is not None:
        pictures.write(wanted.plot, told, runs)


def _save(path: Path, runs: list[Run]) -> None:
    with open(path, "wb") as out:
        for each in runs:
            for record in sorted(each.records, key=lambda record: record.planned_s):
                line = Saved(setup=each.setup, load=each.load, round=each.round, kind=loads.kind(record), record=record)
                out.write(msgspec.json.encode(line) + b"\n")
