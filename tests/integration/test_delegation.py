"""What a decode worker does about the prefill that it has delegated, where the broker or its live copies fail it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry import trace
from pdq import subjects
from pdq.bus import Bus
from pdq.client import new_request_id
from pdq.errors import Interrupted
from pdq.log import RequestLog, first, follow
from pdq.messages import DecodeJob, ErrorInfo, Promise, Sampling, StageClaims, State, WorkerBeat, encode_json, pack_ids
from pdq.settings import LimitSettings
from pdq.stage import Run
from pdq.stage.delegation import Delegation, leave_to_decode
from pdq.stage.watch import Watch
from pdq.stage.work import ClaimedJob
from pdq.telemetry import Metrics, StageSpan

from tests.integration.test_lifecycle import until
from tests.stack import MODEL

CONTRACT = "a contract"
BOUND_S = 20.0


def delegation(bus: Bus, contract: str = CONTRACT) -> Delegation:
    """Of a worker that hears nothing: its watch has not been started."""
    return Delegation(bus, Watch(bus), Metrics([MODEL]), "d", contract)


async def missing() -> int:
    return 32


async def promised(bus: Bus, work: ClaimedJob, contract: str = CONTRACT) -> Promise | None:
    return await asyncio.wait_for(delegation(bus, contract).promise(work, Run(), missing), BOUND_S)


async def beat(bus: Bus) -> None:
    """A prefill worker is alive."""
    said = WorkerBeat(worker="p", stage="prefill", model=MODEL, contract=CONTRACT, slots=1)
    await bus.publish(subjects.worker_key("prefill", MODEL, "p"), encode_json(said))


async def claimed(bus: Bus) -> ClaimedJob:
    """A decode-first job that decode has claimed."""
    job = DecodeJob(
        request=new_request_id(),
        tenant="local",
        model=MODEL,
        deadline=2e9,
        prompt=pack_ids(range(40)),
        sampling=Sampling(max_tokens=1),
        prefill_wait_s=5.0,
    )
    mine = StageClaims(attempt=1, owner="d")
    state = first("claim", order="decode-first", stage="decode", decode=mine)
    entry = await RequestLog(bus).append("local", job.request, None, state)
    delivery: Any = None
    return ClaimedJob(job, 1, entry, delivery, StageSpan(trace.INVALID_SPAN_CONTEXT, 0.0))


async def append(bus: Bus, work: ClaimedJob, event: Any, **fields: Any) -> None:
    def after(newest: Any) -> State:
        return follow(newest.state, event, **fields)

    await RequestLog(bus).update("local", work.job.request, after)


async def queued(bus: Bus) -> int:
    info = await bus.stream_info(subjects.PREFILL)
    assert info is not None
    return int(info["state"]["messages"])


async def test_a_promise_that_is_not_heard_is_read_from_the_log(bus: Bus) -> None:
    await beat(bus)
    work = await claimed(bus)
    waiting = asyncio.create_task(promised(bus, work))
    await until(lambda: is_queued(bus))
    await append(bus, work, "prefilled", promise=Promise(tokens=32))
    assert await waiting == work.state.promise == Promise(tokens=32)
    assert work.state.event == "prefilled" and not work.delegated


async def is_queued(bus: Bus) -> bool:
    return await queued(bus) == 1


@pytest.mark.parametrize(
    ("event", "fields", "cause"),
    [
        ("expired", {}, "ended"),
        ("cancelling", {"cause": "client"}, "cancelled"),
        ("claim", {"stage": "decode", "decode": StageClaims(attempt=2, owner="e")}, "fenced"),
    ],
)
async def test_what_ends_the_wait_and_is_not_heard(bus: Bus, event: str, fields: dict[str, Any], cause: str) -> None:
    await beat(bus)
    work = await claimed(bus)
    await append(bus, work, event, **fields)
    with pytest.raises(Interrupted) as lost:
        await promised(bus, work)
    assert lost.value.cause == cause
    # The job is queued: whoever ends the request takes it back.
    assert work.delegated and await queued(bus) == 1


async def test_a_late_prefill_job_is_taken_back(bus: Bus) -> None:
    await beat(bus)
    work = await claimed(bus)
    assert await promised(bus, work) is None
    assert (work.state.event, work.state.local, work.delegated) == ("local", "late", False)
    assert await queued(bus) == 0


async def test_a_second_attempt_queues_no_second_job_and_looks_at_nothing(bus: Bus) -> None:
    await beat(bus)
    work = await claimed(bus)
    await append(bus, work, "claim", stage="prefill", prefill=StageClaims(attempt=1, owner="p"))
    await append(bus, work, "claim", stage="decode", decode=StageClaims(attempt=2, owner="d"))
    entry = await RequestLog(bus).current("local", work.job.request)
    assert entry is not None
    second = ClaimedJob(work.job, 2, entry, work.delivery, work.span)

    async def never() -> int:
        raise AssertionError("a prefill runs already")

    waiting = asyncio.create_task(delegation(bus).promise(second, Run(), never))
    await until(lambda: is_queued(bus))
    await append(bus, second, "prefilled", promise=Promise(tokens=32))
    assert await asyncio.wait_for(waiting, BOUND_S) == Promise(tokens=32)


async def test_a_prefill_worker_of_another_contract_is_none(bus: Bus) -> None:
    await beat(bus)
    work = await claimed(bus)
    assert await promised(bus, work, "another contract") is None
    assert work.state.local == "no_prefill_worker" and await queued(bus) == 0


async def test_a_full_prefill_queue_is_no_reason_to_fail(bus: Bus) -> None:
    config = next(one for one in subjects.streams(LimitSettings().of_streams()) if one["name"] == subjects.PREFILL)
    await bus.ensure_stream({**config, "max_msgs": 1})
    await bus.publish(subjects.job("prefill", MODEL, "normal", "local", "another"), b"")
    await beat(bus)
    work = await claimed(bus)
    assert await promised(bus, work) is None
    assert work.state.local == "queue_full" and await queued(bus) == 1


async def test_a_prefill_job_that_is_given_up_is_left_to_decode(bus: Bus) -> None:
    log, metrics = RequestLog(bus), Metrics([MODEL])
    error = ErrorInfo(code="too_many_deliveries", message="m")
    request = (await claimed(bus)).job.request
    assert await leave_to_decode(log, metrics, "local", request, error)
    entry = await log.current("local", request)
    assert entry is not None and (entry.state.event, entry.state.local) == ("local", "prefill_failed")
    assert entry.state.decode.owner == "d", "the request is still that of decode"
    assert await leave_to_decode(log, metrics, "local", request, error)
    again = await log.current("local", request)
    assert again is not None and again.seq == entry.seq, "told once"
    assert b'pdq_order_fallbacks_total{cause="prefill_failed"} 1.0' in metrics.text()


async def test_any_other_prefill_job_that_is_given_up_is_not(bus: Bus) -> None:
    log, metrics = RequestLog(bus), Metrics([MODEL])
    request = new_request_id()
    await log.append("local", request, None, first("routed", order="prefill-first"))
    assert not await leave_to_decode(log, metrics, "local", request, ErrorInfo(code="broken", message="m"))
    entry = await log.current("local", request)
    assert entry is not None and entry.state.event == "routed"
