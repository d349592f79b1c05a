"""A run: bursts of requests, each from zero workers, and the check of everything that came of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import yaml
from pdq import subjects, traces
from pdq.bus import Bus
from pdq.client import Client
from pdq.messages import AskedOrder, Event, StageName
from pdq.settings import LimitSettings
from pdq.telemetry.start import COLD_START

from tests.broker import free_port
from tests.chaos.asking import Asked, Asker
from tests.chaos.check import violations
from tests.chaos.plan import Ask
from tests.chaos.reference import reference
from tests.chaos.run import read
from tests.pages import ROOT
from tests.scaling.driver import Deployment, Driver, Scaling, Starter, changes, of_role, troubles, worker_seconds
from tests.scaling.keda import Scaled, of_stage
from tests.scaling.report import Burst, Report, Request
from tests.stack import MODEL, Stack

ROLES: tuple[StageName, ...] = ("prefill", "decode")
LIMITS = LimitSettings(ack_wait_s=5.0, worker_ttl_s=3.0)
SLOTS = 4
"""Half of the manifests' target: a replica has as much waiting as running, and is busy when it is told to end."""
MANIFESTS = ROOT / "infra/k8s/base/scaling.yaml"
PREFILL_START_S = 120.0
MOST_TRACES = 6
BOUND_S = 240.0
"""How long one request may take before it counts as lost: far more than any does."""
PROFILES = {"prefill": "llama2-70b-h100-tp8*4", "decode": "llama3-8b-h100*4"}
"""About 200 ms a prompt and 25 ms a token."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 7
    bursts: tuple[int, ...] = (1, 24)
    """Requests of each; the next begins when all workers are gone."""
    span_s: float = 1.0
    """A burst is submitted within so many seconds."""
    max_replicas: int = 3
    polling_s: float = 0.25
    cooldown_s: float = 1.5
    stabilization_s: float = 0.0
    """Kubernetes waits 300 s before there are fewer; without it, busy workers are told to end again and again."""
    apart: bool = False
    """Each role by its own jobs alone, whatever the manifest's formula: then decode starts after prefill."""
    idle_exit_s: float = 0.0
    """Above 0: nobody ends a worker but itself."""


def asks(plan: Plan, burst: int) -> list[Ask]:
    """The requests of one burst: prompts of some chunks, answers of 10 to 150 tokens; every third for decode alone."""
    rng = random.Random(f"{plan.seed} {burst}")
    return [
        Ask(
            request=f"z{plan.seed}-{burst}-{number:04d}",
            tenant="local",
            at_s=round(rng.uniform(0.0, plan.span_s), 3) if number else 0.0,
            shape="ids",
            prompt=tuple(rng.randrange(2048) for _ in range(rng.randrange(40, 300))),
            fields={"max_tokens": rng.randrange(10, 150), "ignore_eos": True},
            priority=rng.choice(("high", "normal", "low")),
            order="decode-only" if number % 3 == 1 else "",
            deadline_s=None,
            cancel_s=None,
            again_s=None,
            leave_s=None,
        )
        for number in range(plan.bursts[burst])
    ]


def stack_at(directory: Path, order: AskedOrder = "prefill-first") -> tuple[Stack, str]:
    """A broker and a router, no worker; and where the broker's monitoring is.

    order: the router's. With `auto` prefill's own jobs do not wake it: decode's number does, or nothing.
    """
    monitoring = f"127.0.0.1:{free_port()}"
    start_s = 0.0 if order == "auto" else PREFILL_START_S
    stack = Stack(directory, limits=LIMITS, PDQ_ROUTER_ORDER=order, PDQ_ROUTER_PREFILL_START_S=f"{start_s:g}")
    stack.broker.more = f'http: "{monitoring}"\n'
    stack.add("pdq_router")
    return stack, monitoring


def driver_of(stack: Stack, monitoring: str, plan: Plan) -> tuple[Driver, dict[StageName, Deployment]]:
    """KEDA with a ScaledObject for each role."""
    deployments = {
        role: Deployment(
            stack,
            role,
            idle_exit_s=plan.idle_exit_s,
            PDQ_WORKER_SLOTS=str(SLOTS),
            # Shorter than most answers, so that a busy worker gives back what it has.
            PDQ_WORKER_DRAIN_S="0.3",
            PDQ_ENGINE_SIM_PROFILE=PROFILES[role],
        )
        for role in ROLES
    }
    scalings = [
        Scaling.of(deployment, scaled(role, monitoring, plan), Starter() if plan.idle_exit_s else None)
        for role, deployment in deployments.items()
    ]
    return Driver(scalings), deployments


def scaled(role: StageName, monitoring: str, plan: Plan) -> Scaled:
    """The ScaledObject of infra/k8s, in shorter times."""
    manifests = {one["metadata"]["name"]: one for one in yaml.safe_load_all(MANIFESTS.read_text("utf-8")) if one}
    whole = Scaled.of(manifests[role], monitoring, "$G", MODEL)
    return msgspec.structs.replace(
        whole,
        formula=of_stage(role, MODEL, monitoring).formula if plan.apart else whole.formula,
        max_replicas=plan.max_replicas,
        polling_s=plan.polling_s,
        cooldown_s=plan.cooldown_s,
        stabilization_s=plan.stabilization_s,
    )


async def run(plan: Plan, stack: Stack, monitoring: str) -> Report:
    """Carry out a plan on a stack that runs. No worker is left behind."""
    driver, deployments = driver_of(stack, monitoring, plan)
    driving = asyncio.create_task(driver.run())
    bus = await stack.connect()
    report = Report(plan_seed=plan.seed)
    try:
        for number in range(len(plan.bursts)):
            report.bursts.append(await _burst(plan, number, bus, stack, driver, report))
        report.troubles += await _left(bus)
    finally:
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
        await driver.stop()
        await bus.close()
    report.began, report.rows = driver.began, driver.rows
    report.troubles += troubles(deployments)
    report.changes = {role: changes(driver.rows, role) for role in ROLES}
    report.worker_s = {role: round(worker_seconds(driver.rows, role), 1) for role in ROLES}
    report.troubles += [] if plan.idle_exit_s else too_soon(report)
    return report


async def _burst(plan: Plan, number: int, bus: Bus, stack: Stack, driver: Driver, report: Report) -> Burst:
    began = time.monotonic()
    asked = [Asked(ask) for ask in asks(plan, number)]
    asker = Asker(Client(bus, "local"), BOUND_S)
    await asyncio.gather(*(asker.run(one, began) for one in asked))
    ended = time.monotonic()
    if not await driver.at_zero(BOUND_S):
        report.troubles.append(f"burst {number}: workers are left")
    zero_s = time.monotonic() - ended
    logs = [await read(bus, one.ask) for one in asked]
    for one, events in zip(asked, logs, strict=True):
        report.failures += [f"{one.ask.request}: {found}" for found in violations(one, reference(one.ask), events)]
        report.requests.append(await _request(bus, plan, one, events, number))
    return Burst(
        requests=len(asked),
        lasted_s=round(ended - began, 2),
        to_zero_s=round(zero_s, 2),
        first_token_s=min((one.first_token_s for one in report.requests if one.burst == number), default=0.0),
        cold_starts_s=cold_starts(stack.directory, [one.ask.request for one in asked[:MOST_TRACES]]),
    )


async def _request(bus: Bus, plan: Plan, asked: Asked, events: Sequence[Event], burst: int) -> Request:
    """What its log tells, by the broker's clock."""
    states = [event.state for event in events if event.state is not None]
    first = await bus.first(subjects.LOG, subjects.out(asked.ask.tenant, asked.ask.request))
    submitted, ended = states[0].submitted, states[-1].at
    prefilled = next((state.at for state in states if state.event == "prefilled"), submitted)
    return Request(
        request=asked.ask.request,
        burst=burst,
        submitted=submitted,
        needs={"prefill": (submitted, prefilled), "decode": (prefilled if plan.apart else submitted, ended)},
        first_token_s=round((first.time_s if first is not None else ended) - submitted, 3),
        lasted_s=round(ended - submitted, 3),
        given_back=sum(state.event == "released" and state.cause == "drain" for state in states),
        outcome=states[-1].event,
        order=f"{states[-1].order} ({states[-1].reason})",
    )


def cold_starts(directory: Path, requests: Sequence[str]) -> dict[str, float]:
    """The longest span that tells of a start, seconds, by service."""
    found: dict[str, float] = {}
    for trace in (one for request in requests for one in traces.find(directory, request)):
        for span in (one for one in trace.spans if one.name == COLD_START):
            found[span.service] = max(found.get(span.service, 0.0), round((span.end_ns - span.start_ns) / 1e9, 3))
    return found


async def _left(bus: Bus) -> list[str]:
    """What should not be in the broker when all is done."""
    streams = (subjects.SUBMIT, subjects.PREFILL, subjects.DECODE, subjects.DEAD)
    infos = {stream: await bus.stream_info(stream) for stream in streams}
    counts = {stream: (info or {}).get("state", {}).get("messages", 0) for stream, info in infos.items()}
    return [f"{count} messages left in {stream}" for stream, count in counts.items() if count]


def too_soon(report: Report) -> list[str]:
    """Roles that were put to zero while some request needed them: had the scaler's number not told of it."""
    return [
        f"{role} was put to zero at {row.at_s:g} s, and {one.request} needed it"
        for role in ROLES
        for before, row in pairwise(of_role(report.rows, role))
        if before.replicas and not row.replicas
        for one in report.requests
        if one.needs[role][0] < report.began + row.at_s < one.needs[role][1]
    ]
