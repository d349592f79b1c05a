"""What must hold of every request, whatever happened. Pure: from a log, a reader's copy and the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pdq.log import Transcript
from pdq.messages import Event, State, pack_ids

from tests.chaos.asking import Asked
from tests.chaos.reference import Reference

MOST_SHOWN = 200


def violations(asked: Asked, reference: Reference, stored: Sequence[Event]) -> list[str]:
    """Everything that is wrong with one request; empty when all is well. `stored`: its whole log, in order."""
    found = [asked.error] if asked.error else []
    states = [event.state for event in stored if event.state is not None]
    found += _one_end(states) + _one_way(states)
    if states and states[-1].ended:
        transcript = Transcript()
        for event in stored:
            transcript.feed(event)
        found += _end(asked, reference, transcript, states[-1])
        found += _seen(asked.seen, stored)
    return found


def _one_end(states: list[State]) -> list[str]:
    ends = [state.event for state in states if state.ended]
    if not states:
        return ["lost: its log is empty"]
    found = []
    if len(ends) != 1:
        found.append(f"{len(ends)} terminal events: {ends}")
    elif not states[-1].ended:
        found.append(f"{states[-1].event} follows the end, {ends[0]}")
    unseen = [state.event for state in states] == ["cancelled"]
    if sum(state.event == "accepted" for state in states) != 1 and not unseen:
        found.append("not accepted exactly once")
    return found


def _one_way(states: list[State]) -> list[str]:
    """A prompt is prefilled once: by prefill, or by decode in its place."""
    ways = [state.event for state in states if state.event in ("prefilled", "local")]
    return [f"prefilled more than once: {ways}"] if len(ways) > 1 else []


def _end(asked: Asked, reference: Reference, transcript: Transcript, end: State) -> list[str]:
    found = []
    if not transcript.complete():
        found.append(f"incomplete: {len(transcript.ids)} tokens, the end names {end.num_tokens}, or another digest")
    if end.event == "finished":
        found += _finished(reference, transcript, end)
    elif end.event == "cancelled" and asked.ask.cancel_s is not None:
        found += _cut_short(reference, transcript, end)
    elif end.event == "expired" and asked.ask.may_expire:
        found += _cut_short(reference, transcript, end)
    else:
        found.append(f"ended as {end.event}: {end.error}")
    reply = asked.cancelled.state if asked.cancelled is not None else None
    if reply is not None and reply.event != end.event:
        found.append(f"the cancel was answered with {reply.event}, but it ended as {end.event}")
    return found


def _finished(reference: Reference, transcript: Transcript, end: State) -> list[str]:
    pairs = {
        "ids": (tuple(transcript.ids), reference.ids),
        "text": (transcript.text, reference.text),
        "finish_reason": (end.finish_reason, reference.finish_reason),
        "usage": (end.usage, reference.usage),
        "logprobs": (tuple(transcript.logprobs), reference.logprobs),
        "num_tokens": (end.num_tokens, len(reference.ids)),
        "output_digest": (end.output_digest, hashlib.sha256(pack_ids(reference.ids)).hexdigest()),
    }
    return [f"{name} is {_brief(got)}, not {_brief(wanted)}" for name, (got, wanted) in pairs.items() if got != wanted]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _cut_short(reference: Reference, transcript: Transcript, end: State) -> list[str]:
    """The answer as far as it came."""
    found = []
    made = len(transcript.ids)
    if tuple(transcript.ids) != reference.ids[:made]:
        found.append(f"its {made} tokens are not the beginning of the reference")
    if not reference.text.startswith(transcript.text):
        found.append("its text is not the beginning of the reference")
    if tuple(transcript.logprobs) != reference.logprobs[: len(transcript.logprobs)]:
        found.append("its logprobs are not the beginning of the reference")
    if end.finish_reason:
        found.append(f"{end.event} with finish_reason {end.finish_reason}")
    if made and (end.usage is None or end.usage.completion_tokens != end.num_tokens):
        found.append(f"{end.event} after {made} tokens with usage {end.usage} and num_tokens {end.num_tokens}")
    return found


def _seen(seen: Sequence[Event], stored: Sequence[Event]) -> list[str]:
    """A live reader saw what is stored up to the end: all of it, once, in order."""
    last = next(event.seq for event in reversed(stored) if event.state is not None)
    wanted = [event for event in stored if event.seq <= last]
    if list(seen) == wanted:
        return []
    missed = sorted({event.seq for event in wanted} - {event.seq for event in seen})
    seqs = [event.seq for event in seen]
    again = sorted({seq for seq in seqs if seqs.count(seq) > 1})
    return [f"the live reader saw {len(seen)} events of {len(wanted)}: missed {missed}, saw again {again}"]
