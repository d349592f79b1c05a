"""What must hold of a stream, however often it was cut. Pure: from its events, those of another run of the same request
that nothing happened to, and what the log gives again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.resume.asking import Asked
from tests.resume.told import DONE, Told
from tests.sse import Frame

MOST_SHOWN = 200


def violations(asked: Asked, calm: Told, stored: Sequence[Frame]) -> list[str]:
    """Everything that is wrong with one; empty when all is well.

    calm: the answer to the same request when nothing happened. stored: this one's stream, read again in one go.
    """
    found = [asked.error] if asked.error else []
    found += _ended(asked.frames) + _forward(asked.frames)
    told, again = asked.told, Told(stored)
    found += _differ("usage", told.usages, calm.usages)
    found += _differ("choices", sorted(told.said), sorted(calm.said))
    for index in sorted(told.said.keys() & calm.said.keys() & again.said.keys()):
        said, before = told.said[index], calm.said[index]
        for name in ("text", "reasoning", "calls", "logprobs", "ends"):
            found += _differ(f"choice {index}: {name}", getattr(said, name), getattr(before, name))
        found += [] if len(said.ends) == 1 else [f"choice {index} ends {len(said.ends)} times"]
        found += _differ(f"choice {index}: chunks", said.data, again.said[index].data)
    if len(told.said) == 1:
        found += _differ("bytes", [frame.raw for frame in asked.frames], [frame.raw for frame in stored])
    return found


def cancelled(asked: Asked, stored: Sequence[Frame]) -> list[str]:
    """As `violations`, of a request whose client left for good."""
    found = [asked.error] if asked.error else []
    seen = [frame.raw for frame in asked.frames]
    found += _differ("bytes", seen, [frame.raw for frame in stored[: len(seen)]])
    if len(stored) <= len(seen) or '"code":"cancelled"' not in stored[-1].data:
        found.append(f"the last event is {_brief(stored[-1].data if stored else None)}")
    return found


def _ended(frames: Sequence[Frame]) -> list[str]:
    places = [place for place, frame in enumerate(frames) if frame.data == DONE]
    return [] if places == [len(frames) - 1] else [f"[DONE] is at {places} of {len(frames)} events"]


def _forward(frames: Sequence[Frame]) -> list[str]:
    """Each event is further in the log than the one before it."""
    places = [_place(frame.id) for frame in frames if frame.data != DONE]
    return [
        f"event {number} is at {after}, after {before}"
        for number, (before, after) in enumerate(pairwise(places), 1)
        if before == after or any(new < old for old, new in zip(before, after, strict=True))
    ]


def _place(id: str) -> tuple[int, ...]:
    """Per choice, then whether all is told."""
    seqs = id.removesuffix(".end")
    return (*map(int, seqs.split(".")), int(id != seqs))


def _differ(name: str, got: object, wanted: object) -> list[str]:
    return [] if got == wanted else [f"{name}: {_brief(got)}, not {_brief(wanted)}"]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]}...{text[-MOST_SHOWN // 2 :]}"
