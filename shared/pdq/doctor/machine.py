"""This machine's memory and disks, and the processes of a stack that runs on it."""

from __future__ import annotations

from collections.abc import Iterator

from pdq.doctor.facts import Facts
from pdq.doctor.finding import Finding, fail, ok, warn

LOW_MEMORY = 1 << 30
NO_MEMORY = 256 << 20
LOW_DISK = 2 << 30
NO_DISK = 256 << 20


def memory(facts: Facts) -> Iterator[Finding]:
    total, available = facts.machine.memory_total, facts.machine.memory_available
    if not total:
        return
    text = f"{_gib(available)} of {_gib(total)} memory available"
    if available >= LOW_MEMORY:
        yield ok("machine.memory", text, value=available, limit=LOW_MEMORY)
        return
    judge = fail if available < NO_MEMORY else warn
    yield judge(
        "machine.memory",
        text,
        value=available,
        limit=LOW_MEMORY,
        trap="an engine is killed in the middle of its work when memory runs out",
        cure="less PDQ_ENGINE_KV_CACHE_BYTES or PDQ_KV_SERVER_MEMORY_GB, fewer workers, or more memory",
    )


def disks(facts: Facts) -> Iterator[Finding]:
    if facts.machine.error:
        yield fail(
            "machine.disk",
            facts.machine.error,
            trap="a disk that hangs holds up the broker's store, the logs and the start of every service",
            cure="is a network file system away (`mount`, `dmesg`)? PDQ_HOME on a local disk",
        )
    for disk in facts.machine.disks:
        text = f"{_gib(disk.free)} of {_gib(disk.total)} free"
        if disk.free >= LOW_DISK:
            yield ok("machine.disk", text, subject=disk.path, value=disk.free, limit=LOW_DISK)
            continue
        judge = fail if disk.free < NO_DISK else warn
        yield judge(
            "machine.disk",
            text,
            subject=disk.path,
            value=disk.free,
            limit=LOW_DISK,
            trap="a full disk stops the broker's store, the KV's lower tier and the logs",
            cure="free the disk, or move it (PDQ_HOME for a local stack)",
        )


def processes(facts: Facts) -> Iterator[Finding]:
    """The local stack as its supervisor sees it."""
    if facts.stack is None:
        return
    ill = [process for process in facts.stack.processes if process.state != "ready" or process.restarts]
    for process in ill:
        judge = warn if process.state == "ready" else fail
        yield judge(
            "machine.process",
            f"{process.name} is {process.state} and was restarted {process.restarts} times",
            subject=process.name,
            value=f"{process.state}, {process.restarts} restarts",
            limit="ready, no restart",
            trap="it dies, or does not become ready: requests are retried or wait",
            cure=f"the end of {facts.stack.directory}/logs/{process.name}.log",
        )
    if not ill:
        count = len(facts.stack.processes)
        yield ok("machine.process", f"{count} processes of the local stack are ready, none was restarted", value=count)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
