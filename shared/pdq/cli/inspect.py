"""What `pdq status` tells: of the stack and its queues, or of one request."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from pdq import subjects
from pdq.bus import Bus
from pdq.cli import output
from pdq.messages import LANES, Lane, StageClaims, StageName, State, WorkerBeat
from pdq.up.machine import HOST, listening
from pdq.up.plan import answers
from pdq.up.record import ProcessRecord, Record


class Queue(NamedTuple):
    """Jobs of one stage, model and priority: `waiting` for a worker, `running` at one."""

    stage: StageName
    model: str
    priority: Lane
    waiting: int
    running: int


async def queues(bus: Bus) -> list[Queue]:
    """Every queue that `pdq init` has made. Raises Unavailable."""
    found = []
    for stage, stream in subjects.STAGE_STREAM.items():
        if await bus.stream_info(stream) is None:
            continue
        for name in (await bus.api(f"CONSUMER.NAMES.{stream}")).get("consumers") or []:
            model, _, priority = name.rpartition("-")
            info = await bus.consumer_info(stream, name) or {}
            found.append(Queue(stage, model, priority, info.get("num_pending", 0), info.get("num_ack_pending", 0)))
    return sorted(found, key=lambda queue: (queue.model, queue.stage == "decode", LANES.index(queue.priority)))


async def site(bus: Bus) -> dict[str, int] | None:
    """How many requests wait at a site for its hub; None where there is no site. Raises Unavailable."""
    info = await bus.stream_info(subjects.EDGE)
    return None if info is None else {"waiting": int(info["state"]["messages"])}


def worker(beat: WorkerBeat) -> dict[str, Any]:
    """One worker as JSON has it."""
    return {name: getattr(beat, name) for name in ("worker", "stage", "model", "contract", "slots", "busy")}


async def processes(record: Record) -> list[dict[str, Any]]:
    """The stack's processes with their memory (and that of their children), and whether they are ready now."""
    rows = [_row("supervisor", record.state, record.pid, {}, 0, True, rss_bytes(record.pid, children=False))]
    ready = await asyncio.gather(*(is_ready(process) for process in record.processes))
    for process, is_up in zip(record.processes, ready, strict=True):
        memory = rss_bytes(process.pid, children=True)
        rows.append(_row(process.name, process.state, process.pid, process.ports, process.restarts, is_up, memory))
    return rows


def _row(
    name: str, state: str, pid: int, ports: dict[str, int], restarts: int, ready: bool, rss: int
) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "ready": ready,
        "pid": pid,
        "ports": ports,
        "restarts": restarts,
        "rss_bytes": rss,
    }


async def is_ready(process: ProcessRecord) -> bool:
    """Ask the process itself."""
    if not process.pid:
        return False
    if "nats" in process.ports:
        return await listening(process.ports["nats"])
    path = "healthcheck" if process.name.startswith("lmcache") else "readyz"
    path = "healthz" if process.name == "coordinator" else path
    return await answers(f"http://{HOST}:{process.ports['http']}/{path}")


def rss_bytes(pid: int, *, children: bool) -> int:
    """Resident memory, bytes; 0 when there is no such process."""
    import psutil

    if not pid:
        return 0
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *(root.children(recursive=True) if children else [])]:
            with contextlib.suppress(psutil.Error):
                total += int(process.memory_info().rss)
    return total


def request(name: str, state: State) -> dict[str, Any]:
    """One request's state as JSON has it."""
    plain = msgspec.to_builtins(state)
    dropped = {"v", "nonce", "digest", "event", "inputs"}
    fields = {key: value for key, value in plain.items() if key not in dropped}
    attempts = {"prefill": state.prefill.attempt, "decode": state.decode.attempt}
    return {"id": name, "state": state.event, "attempts": attempts} | fields


def request_rows(name: str, state: State) -> list[tuple[str, str]]:
    """One request's state for people."""
    usage, kv = state.usage, state.kv
    rows = {
        "id": name,
        "state": f"{state.event}, {state.finish_reason}" if state.finish_reason else state.event,
        "error": f"{state.error.code}: {state.error.message}" if state.error else "",
        "model": state.model,
        "priority": state.priority,
        "route": f"{state.order} ({state.reason})" if state.order else "",
        "submitted": _clock(state.submitted),
        "deadline": _clock(state.deadline),
        "prefill": _claims(state.prefill),
        "decode": _claims(state.decode),
        "tokens": f"{state.prompt_tokens} + {usage.completion_tokens if usage else '...'}",
        "kv": output.kv(kv) if kv else "",
        "trace": state.trace,
        "times": ", ".join(f"{stage} {ms:,.1f} ms" for stage, ms in state.timings_ms.items()),
    }
    return [(label, text) for label, text in rows.items() if text]


def _claims(claims: StageClaims) -> str:
    if not claims.attempt:
        return ""
    failures = f", {claims.failures} failed" if claims.failures else ""
    return f"attempt {claims.attempt}{failures}" + (f", at {claims.owner}" if claims.owner else "")


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds") if seconds else ""
