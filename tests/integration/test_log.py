"""The request log against a real broker: exactly one end, whoever writes; tokens without gap or repeat."""

from __future__ import annotations

import asyncio
import random

import pytest
from pdq import subjects
from pdq.bus import Bus, Outbox
from pdq.client import Client, Follower
from pdq.errors import Rejected, Unavailable, WrongSequence
from pdq.log import Entry, OutputWriter, RequestLog, Transcript, first, follow, to_event
from pdq.log.parsed import Parsed
from pdq.messages import CallDelta, CancelReply, Delta, Output, ReadRequest, State, StateEvent, decode_json, encode_json

from tests.broker import Broker, live_copy


async def test_racing_writers_leave_exactly_one_end(bus: Bus) -> None:
    log = RequestLog(bus)
    ends = ("finished", "failed", "cancelled", "expired")

    async def race(request: str, event: str) -> Entry | None:
        def change(newest: Entry | None) -> State | None:
            return None if newest is None or newest.state.ended else follow(newest.state, event)  # type: ignore[arg-type]

        await asyncio.sleep(random.random() * 0.01)
        return await log.update("t", request, change)

    async def one(request: str) -> None:
        await log.append("t", request, None, first("accepted"))
        seen = await asyncio.gather(*(race(request, event) for event in ends))
        assert len({entry.seq for entry in seen if entry}) == 1
        page = await log.read("t", request)
        stored = [e.state.event for e in page.events if e.state]
        assert stored[0] == "accepted" and len(stored) == 2 and stored[1] in ends

    await asyncio.gather(*(one(f"r{i}") for i in range(100)))


async def test_a_writer_knows_its_own_record_after_a_lost_acknowledgement(bus: Bus) -> None:
    log = RequestLog(bus)
    state = first("accepted")
    stored = await log.append("t", "r", None, state)
    again = await log.append("t", "r", None, state)
    assert again.seq == stored.seq
    with pytest.raises(WrongSequence):
        await log.append("t", "r", None, first("accepted"))


async def test_an_id_is_accepted_once(bus: Bus) -> None:
    log = RequestLog(bus)
    results = await asyncio.gather(
        *(log.append("t", "r", None, first("accepted")) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(r, Entry) for r in results) == 1


async def test_what_a_writer_takes_for_the_newest_record_is_never_believed_without_the_broker(bus: Bus) -> None:
    log = RequestLog(bus)
    seen: list[str | None] = []

    def cancel(newest: Entry | None) -> State | None:
        seen.append(newest and newest.state.event)
        if newest is None:
            return first("accepted")
        return None if newest.state.ended else follow(newest.state, "cancelled")

    accepted = await log.update("t", "r", cancel, known=None)
    assert accepted is not None and seen == [None]
    routed = await log.append("t", "r", accepted, follow(accepted.state, "routed"))
    # Behind by one record, and by all: both are refused, and decide again by what is there.
    seen.clear()
    ended = await log.update("t", "r", cancel, known=accepted)
    assert ended is not None and seen == ["accepted", "routed"] and ended.state.event == "cancelled"
    assert await log.update("t", "r", cancel, known=None) == ended
    # A record that lets nothing be written may be out of date too.
    seen.clear()
    wrong = Entry(routed.seq, follow(routed.state, "finished"))
    assert await log.update("t", "r", cancel, known=wrong) == ended and seen == ["finished", "cancelled"]


async def test_tokens_survive_a_killed_broker_in_order(bus: Bus, broker: Broker) -> None:
    outbox = Outbox(bus)
    await outbox.start()
    log = RequestLog(bus)
    claim = await log.append("t", "r", None, follow(first("accepted"), "claim"))
    entry = await log.append("t", "r", claim, with_attempt(claim.state, 1))
    writer = OutputWriter(outbox, "t", "r", 1, Transcript())
    for index in range(200):
        await writer.write([index], f" {index}", None)
        if index == 80:
            broker.kill()
            await asyncio.sleep(0.3)
            broker.start()
        await asyncio.sleep(0.001)
    await writer.flush()
    fields = {"num_tokens": writer.num_tokens, "output_digest": writer.digest()}
    await log.append("t", "r", entry, follow(entry.state, "finished", **fields))
    transcript = Transcript()
    stored = await bus.read(subjects.LOG, subjects.log_of("t", "r"), limit=1000)
    for record in stored:
        transcript.feed(to_event(record))
    await outbox.close()
    assert transcript.ids == list(range(200)) and transcript.complete()


async def test_a_second_attempt_compares_before_it_goes_on(bus: Bus) -> None:
    outbox = Outbox(bus)
    await outbox.start()
    shown = Transcript()
    shown.ids, shown.text = [1, 2, 3], "abc"
    writer = OutputWriter(outbox, "t", "same", 2, shown)
    await writer.write([1, 2], "ab", None)
    await writer.write([3, 4], "cd", None)
    await writer.write([5], "e", None)
    await writer.flush()
    stored = await bus.read(subjects.LOG, subjects.out("t", "same"))
    outs = [to_event(s).out for s in stored]
    assert [(o.index, o.text, o.token_ids()) for o in outs if o] in (
        [(3, "d", [4]), (4, "e", [5])],
        [(3, "de", [4, 5])],
    )
    other = OutputWriter(outbox, "t", "other", 2, shown)
    with pytest.raises(Rejected, match="token 2") as caught:
        await other.write([1, 2, 9, 10], "abxy", None)
    assert caught.value.code == "diverged"
    await other.flush()
    assert await bus.read(subjects.LOG, subjects.out("t", "other")) == []
    assert (other.num_tokens, other.digest()) == (3, shown.digest())
    short = OutputWriter(outbox, "t", "short", 2, shown)
    await short.write([1, 2], "ab", None)
    with pytest.raises(Rejected):
        short.check_end()
    await outbox.close()


async def test_a_second_attempt_shows_what_of_the_parsed_answer_was_not(bus: Bus) -> None:
    """It counts from the answer's start, in batches of its own; readers get each piece once."""
    outbox = Outbox(bus)
    await outbox.start()
    shown = Transcript()
    shown.ids, shown.text, shown.parsed = [1, 2], "ab", Parsed()
    shown.parsed.add(Delta(content="a", tool_calls=(CallDelta(index=0, id="c", name="f", arguments="{"),)))
    writer = OutputWriter(outbox, "t", "parsed", 2, shown, (1, 1))
    await writer.write([2], "b", None, False, Delta(content="a"))
    call = CallDelta(index=0, id="c", name="f", arguments="{}")
    await writer.write([3, 4], "cd", None, False, Delta(tool_calls=(call,), reasoning="r"))
    await writer.write([5], "e", None, False, Delta())
    await writer.flush()
    outs = [to_event(stored).out for stored in await bus.read(subjects.LOG, subjects.out("t", "parsed"))]
    deltas = [out.delta for out in outs if out]
    assert deltas[0] == Delta(reasoning="r", tool_calls=(CallDelta(index=0, arguments="}"),))
    assert set(deltas[1:]) <= {Delta()}, "every record has one"
    other = OutputWriter(outbox, "t", "other", 2, shown)
    with pytest.raises(Rejected) as caught:
        await other.write([1], "a", None, False, Delta(content="x"))
    assert caught.value.code == "diverged"
    await outbox.close()


async def test_read_up_to_refuses_to_guess(bus: Bus) -> None:
    log = RequestLog(bus)
    entry = await log.append("t", "r", None, first("accepted"))
    assert [e.seq for e in await log.read_up_to("t", "r", entry.seq)] == [entry.seq]
    with pytest.raises(Unavailable):
        await log.read_up_to("t", "r", entry.seq + 100)


async def test_live_copies_come_in_order_with_their_sequences(bus: Bus) -> None:
    log = RequestLog(bus)
    client = Client(bus, "t")
    async with client.follow("r", catch_up=False) as follower:
        entry = await log.append("t", "r", None, first("accepted"))
        for _ in range(5):
            entry = await log.append("t", "r", entry, follow(entry.state, "claim"))
        await log.append("t", "r", entry, follow(entry.state, "finished"))
        seen = [event.seq async for event in follower.events(10)]
    assert seen == [e.seq for e in (await log.read("t", "r")).events]


def with_attempt(state: State, attempt: int) -> State:
    from pdq.messages import StageClaims

    return follow(state, "claim", decode=StageClaims(attempt=attempt, owner="w"))


async def test_a_follower_that_missed_the_last_tokens_reads_them_before_the_end(bus: Bus) -> None:
    log, client = RequestLog(bus), Client(bus, "t")
    answered = asyncio.Event()

    async def serve_reads(subject: str, data: bytes) -> bytes:
        answered.set()
        request = decode_json(data, ReadRequest)
        return encode_json(await log.read("t", "r", after=request.after, limit=request.limit))

    await bus.serve(subjects.READ_ALL, "", serve_reads)
    entry = await log.append("t", "r", None, with_attempt(first("accepted"), 1))
    follower = Follower(client, "r", 0, catch_up=False)
    for stored in await bus.read(subjects.LOG, subjects.log_of("t", "r")):
        follower.take(stored)
    await bus.publish(subjects.out("t", "r"), encode_json(Output.of(1, 0, [7, 8], "hi")))
    whole = Transcript()
    whole.ids = [7, 8]
    end = follow(entry.state, "finished", num_tokens=2, output_digest=whole.digest())
    last = await log.append("t", "r", entry, end)
    stored_end = await bus.get(subjects.LOG, last.seq)
    assert stored_end is not None
    # The copy of the tokens is lost: the follower gets the end alone.
    follower.take(live_copy(stored_end, before=entry.seq))
    transcript = Transcript()
    async for event in follower.events(10):
        transcript.feed(event)
    assert transcript.complete() and transcript.text == "hi" and answered.is_set()


@pytest.mark.parametrize("after", ["the start", "the claim"])
@pytest.mark.parametrize("state", ["released", "finished"])
async def test_tokens_whose_copy_was_lost_come_before_the_state_that_follows_them(
    bus: Bus, after: str, state: StateEvent
) -> None:
    log, client = RequestLog(bus), Client(bus, "t")

    async def serve_reads(subject: str, data: bytes) -> bytes:
        request = decode_json(data, ReadRequest)
        return encode_json(await log.read("t", "r", after=request.after, limit=request.limit))

    await bus.serve(subjects.READ_ALL, "", serve_reads)
    entry = await log.append("t", "r", None, with_attempt(first("accepted"), 1))
    follower = Follower(client, "r", entry.seq if after == "the claim" else 0, catch_up=False)
    for stored in await bus.read(subjects.LOG, subjects.log_of("t", "r")):
        follower.take(stored)
    await bus.publish(subjects.out("t", "r"), encode_json(Output.of(1, 0, [7, 8], "hi")))
    whole = Transcript()
    whole.ids = [7, 8]
    story: list[StateEvent] = [state] if state == "finished" else [state, "finished"]
    for event in story:
        end = follow(entry.state, event, num_tokens=2, output_digest=whole.digest())
        before, entry = entry, await log.append("t", "r", entry, end)
        stored_state = await bus.get(subjects.LOG, entry.seq)
        assert stored_state is not None
        follower.take(live_copy(stored_state, before=before.seq))
    events = [event async for event in follower.events(10)]
    told = [event.out.text if event.out else event.state.event for event in events if event.out or event.state]
    assert told == ([] if after == "the claim" else ["claim"]) + ["hi", *story]


async def test_a_follower_that_missed_a_claim_reads_it_before_its_tokens(bus: Bus) -> None:
    """As when the leader of a cluster goes right after it has stored the claim."""
    log, client = RequestLog(bus), Client(bus, "t")

    async def serve_reads(subject: str, data: bytes) -> bytes:
        request = decode_json(data, ReadRequest)
        return encode_json(await log.read("t", "r", after=request.after, limit=request.limit))

    await bus.serve(subjects.READ_ALL, "", serve_reads)
    entry = await log.append("t", "r", None, first("accepted"))
    claim = await log.append("t", "r", entry, with_attempt(entry.state, 1))
    await bus.publish(subjects.out("t", "r"), encode_json(Output.of(1, 0, [7, 8], "hi")))
    whole = Transcript()
    whole.ids = [7, 8]
    end = follow(claim.state, "finished", num_tokens=2, output_digest=whole.digest())
    last = await log.append("t", "r", claim, end)
    follower = Follower(client, "r", 0, catch_up=False)
    before = {entry.seq: 0, claim.seq + 1: 0, last.seq: claim.seq}
    for stored in await bus.read(subjects.LOG, subjects.log_of("t", "r")):
        if stored.seq in before:  # as the live copies of each subject tell it
            follower.take(live_copy(stored, before=before[stored.seq]))
    transcript, seen = Transcript(), list[int]()
    async for event in follower.events(10):
        transcript.feed(event)
        seen.append(event.seq)
    assert transcript.complete() and transcript.text == "hi"
    assert seen == [entry.seq, claim.seq, claim.seq + 1, last.seq]


async def test_a_request_that_is_abandoned_is_cancelled_once_somebody_is_there_to_do_it(bus: Bus) -> None:
    """A router that starts again as a client leaves."""
    cancelled: list[str] = []

    async def serve_cancels(subject: str, data: bytes) -> bytes:
        cancelled.append(subject)
        return encode_json(CancelReply(state=first("cancelled")))

    abandoning = asyncio.create_task(Client(bus, "t").abandon("r"))
    await asyncio.sleep(0.3)
    assert not abandoning.done()
    await bus.serve(subjects.CANCEL_ALL, "", serve_cancels)
    await abandoning
    assert cancelled == [subjects.cancel("t", "r")]
