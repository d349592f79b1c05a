"""What a request's events amount to, whatever was lost, repeated or overtaken on the way to the reader."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pdq.log import Transcript, first, follow
from pdq.messages import Event, Output, StageClaims, State

IDS = list(range(100, 140))


def claim(seq: int, attempt: int) -> Event:
    return Event(seq=seq, state=first("claim", decode=StageClaims(attempt=attempt, owner="w")))


def out(seq: int, attempt: int, index: int, count: int) -> Event:
    ids = IDS[index : index + count]
    return Event(seq=seq, out=Output.of(attempt, index, ids, "".join(f"<{i}>" for i in ids)))


def end(seq: int, transcript_ids: list[int], event: str = "finished") -> Event:
    full = Transcript()
    full.ids = transcript_ids
    state = follow(first("claim"), event, num_tokens=len(transcript_ids), output_digest=full.digest())  # type: ignore[arg-type]
    return Event(seq=seq, state=state)


@st.composite
def published(draw: st.DrawFn) -> list[Event]:
    """One attempt's records as a stream may hold them: batches of any size, some stored twice, some late."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    batches, index = [], 0
    for size in sizes:
        if index + size > len(IDS):
            break
        batches.append((index, size))
        index += size
    repeated = draw(st.lists(st.sampled_from(batches), max_size=6))
    order = draw(st.permutations(batches + repeated))
    return [out(seq, 1, *batch) for seq, batch in enumerate(order, start=2)]


@given(published())
def test_any_order_and_repeats_give_the_same_answer(events: list[Event]) -> None:
    total = max(e.out.index + len(e.out.token_ids()) for e in events if e.out)
    transcript = Transcript()
    transcript.feed(claim(1, 1))
    pieces = [piece for event in events for piece in transcript.feed(event)]
    assert transcript.ids == IDS[:total]
    assert "".join(piece.text for piece in pieces) == transcript.text == "".join(f"<{i}>" for i in IDS[:total])
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    transcript.feed(end(99, IDS[:total]))
    assert transcript.complete()


def test_tokens_stored_after_a_newer_claim_do_not_count() -> None:
    transcript = Transcript()
    for event in (claim(1, 1), out(2, 1, 0, 2), claim(3, 2), out(4, 1, 2, 2), out(5, 2, 2, 3)):
        transcript.feed(event)
    assert transcript.ids == IDS[:5]
    late = Transcript()
    for event in (claim(1, 1), out(2, 1, 0, 2), claim(3, 2), out(4, 1, 2, 2)):
        late.feed(event)
    assert late.ids == IDS[:2]


def test_what_was_held_ahead_of_a_gap_is_dropped_by_a_newer_claim() -> None:
    transcript = Transcript()
    for event in (claim(1, 1), out(2, 1, 3, 2), claim(3, 2), out(4, 2, 0, 3)):
        transcript.feed(event)
    assert transcript.ids == IDS[:3]


def test_an_event_seen_twice_changes_nothing() -> None:
    transcript = Transcript()
    transcript.feed(claim(1, 1))
    assert len(transcript.feed(out(2, 1, 0, 2))) == 1
    assert transcript.feed(out(2, 1, 0, 2)) == []


def test_a_missing_token_or_a_wrong_one_is_not_complete() -> None:
    transcript = Transcript()
    for event in (claim(1, 1), out(2, 1, 0, 3), end(3, IDS[:4])):
        transcript.feed(event)
    assert transcript.ended and not transcript.complete()
    wrong = Transcript()
    for event in (claim(1, 1), out(2, 1, 0, 3), end(3, [1, 2, 3])):
        wrong.feed(event)
    assert not wrong.complete()


def test_an_end_in_a_dead_workers_place_names_a_prefix() -> None:
    transcript = Transcript()
    for event in (claim(1, 1), out(2, 1, 0, 3), out(3, 1, 3, 2), end(4, IDS[:3], "cancelled")):
        transcript.feed(event)
    assert transcript.complete()
    finished = Transcript()
    for event in (claim(1, 1), out(2, 1, 0, 3), out(3, 1, 3, 2), end(4, IDS[:3])):
        finished.feed(event)
    assert not finished.complete()


def test_a_failure_before_any_token_is_complete() -> None:
    transcript = Transcript()
    transcript.feed(Event(seq=1, state=State(event="failed", nonce="n", at=0.0)))
    assert transcript.complete() and transcript.text == ""
