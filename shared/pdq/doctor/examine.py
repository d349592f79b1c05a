"""Ask everything at once, within a bound; then let every check look at what came back."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from pdq import settings
from pdq.bus import Bus
from pdq.doctor import broker, clocks, contracts, environment, link, lmcache, machine, models, streams, versions
from pdq.doctor.facts import Broker, Facts, Machine, ModelFiles
from pdq.doctor.finding import Finding, Report
from pdq.doctor.probes import broker as ask_broker
from pdq.doctor.probes import lmcache as ask_lmcache
from pdq.doctor.probes import machine as look
from pdq.doctor.probes.aside import aside
from pdq.errors import Misconfigured, PdqError
from pdq.settings import Group, KvSettings, LimitSettings, Models, ModelSpec, WorkerSettings
from pdq.up.layout import Layout
from pdq.up.machine import HOST
from pdq.up.record import Record

BROKER_S = 8.0
"""Until a broker must have answered everything, its connection included."""
DISK_S = 5.0
"""The same for a disk: those of other machines may hang."""

CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    broker.reachable,
    broker.jetstream,
    broker.payload,
    broker.replicas,
    broker.sync,
    broker.store,
    broker.exposure,
    streams.streams,
    streams.consumers,
    streams.log_age,
    streams.fill,
    contracts.workers_agree,
    contracts.keys_agree,
    contracts.tiers_meet,
    contracts.models_file_agrees,
    contracts.chunks_fit_blocks,
    lmcache.reachable,
    lmcache.chunk_size,
    lmcache.hash_algorithm,
    lmcache.memory,
    lmcache.shared_memory,
    lmcache.exposure,
    lmcache.routes,
    lmcache.waits,
    lmcache.leases,
    link.bandwidth,
    clocks.this_machine,
    clocks.workers,
    versions.nats_server,
    versions.workers,
    versions.messages,
    versions.lmcache_servers,
    versions.installed,
    versions.neighbours,
    models.file,
    models.directories,
    models.digests,
    models.context,
    environment.key_file,
    environment.variables,
    environment.bytecode,
    environment.hash_seed,
    machine.memory,
    machine.disks,
    machine.processes,
)
"""In the order of the report."""

Connect = Callable[[], AbstractAsyncContextManager[Bus]]
S = TypeVar("S", bound=Group)


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is examined. `connect`: to its broker; None when none is known, with the reason in `why`."""

    environ: Mapping[str, str]
    layout: Layout
    place: str = ""
    stack: Record | None = None
    models_path: Path
    connect: Connect | None = None
    why: str = ""
    named: bool = False
    """The broker was asked for by name, or is a running stack's: one that does not answer is a failure."""
    monitor: str = ""
    """URL of the broker's monitoring port; empty: it is not asked."""


async def examine(subject: Subject) -> Report:
    """Everything that can be found out in about BROKER_S at most. Raises nothing for what is not there."""
    began_at, began = time.time(), time.perf_counter()
    facts = await gather(subject)
    findings = tuple(finding for check in CHECKS for finding in check(facts))
    return Report(at=began_at, broker=subject.place, took_s=time.perf_counter() - began, findings=findings)


async def gather(subject: Subject) -> Facts:
    """All probes: broker and machine side by side, then the LMCache servers that the workers name."""
    limits, key = _loaded(LimitSettings, subject), _loaded(KvSettings, subject).key_file
    known, models_error = _models(subject.models_path)
    files = asyncio.create_task(_files(known))
    seen = asyncio.create_task(_here(subject))
    found, why = await _broker(subject, limits, known)
    here = await seen
    addresses = ask_lmcache.of_stack(subject.stack, HOST)
    addresses |= ask_lmcache.of_workers(found.workers if found else (), here.hostname)
    return Facts(
        environ=subject.environ,
        setting_errors=tuple(_setting_errors(subject)),
        limits=limits,
        work=_loaded(WorkerSettings, subject),
        models=known,
        models_error=models_error,
        stack=subject.stack,
        broker=found,
        broker_error=why,
        broker_named=subject.named,
        caches=await ask_lmcache.ask(addresses),
        machine=here,
        files=await files,
        key_file=look.key_file(key or _key_of_stack(subject)),
        installed=look.installed(),
        pins=look.pins(),
    )


def _loaded(group: type[S], subject: Subject) -> S:
    """A group as the environment has it; its defaults where that cannot be."""
    try:
        return settings.load(group, subject.environ)
    except Misconfigured:
        return group()


def _setting_errors(subject: Subject) -> Iterator[str]:
    for group in settings.GROUPS:
        try:
            settings.load(group, subject.environ)
        except Misconfigured as exc:
            yield str(exc)


def _models(path: Path) -> tuple[Models | None, str]:
    if not path.exists():
        return None, ""
    try:
        return settings.load_models(path), ""
    except Misconfigured as exc:
        return None, str(exc)


async def _here(subject: Subject) -> Machine:
    try:
        return await aside(partial(look.look, _directories(subject)), DISK_S)
    except TimeoutError:
        return Machine(hostname=socket.gethostname(), error=f"the disks do not answer within {DISK_S:g} s")


async def _files(known: Models | None) -> dict[str, ModelFiles]:
    """Those of each model that names a directory."""
    specs = known.by_slug.values() if known is not None else ()
    wanted = [spec for spec in specs if spec.path and spec.tokenizer == "hf"]
    return dict(zip((spec.slug for spec in wanted), await asyncio.gather(*map(_files_of, wanted)), strict=True))


async def _files_of(spec: ModelSpec) -> ModelFiles:
    try:
        return await aside(partial(look.model_files, spec), DISK_S)
    except TimeoutError:
        return ModelFiles(path=spec.path, error=f"{spec.path} could not be read within {DISK_S:g} s")


def _directories(subject: Subject) -> dict[str, Path]:
    home = subject.layout.root.parent
    return {"store": subject.layout.nats_store} if subject.stack is not None else {"home": home}


def _key_of_stack(subject: Subject) -> str:
    key = subject.layout.kv_key
    return str(key) if subject.stack is not None and key.exists() else ""


async def _broker(subject: Subject, limits: LimitSettings, known: Models | None) -> tuple[Broker | None, str]:
    if subject.connect is None:
        return None, subject.why
    try:
        async with asyncio.timeout(BROKER_S), subject.connect() as bus:
            slugs = sorted(known.by_slug) if known is not None else []
            return await ask_broker.ask(bus, limits, slugs, subject.monitor), ""
    except TimeoutError:
        return None, f"the broker at {subject.place} has not answered everything within {BROKER_S:g} s"
    except PdqError as exc:
        return None, str(exc)
