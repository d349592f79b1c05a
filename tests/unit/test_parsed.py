"""Answers as their deltas make them, and what one has beyond another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.log.parsed import Parsed
from pdq.messages import CallDelta, Delta

TEXT = st.text("ab", max_size=3)


@st.composite
def deltas(draw: st.DrawFn) -> list[Delta]:
    made, calls = [], 0
    for _ in range(draw(st.integers(0, 8))):
        pieces = []
        for _ in range(draw(st.integers(0, 2))):
            if calls and draw(st.booleans()):
                pieces.append(CallDelta(index=draw(st.integers(0, calls - 1)), arguments=draw(TEXT)))
            else:
                pieces.append(CallDelta(index=calls, id=f"c{calls}", name="f", arguments=draw(TEXT)))
                calls += 1
        made.append(Delta(content=draw(TEXT), reasoning=draw(TEXT), tool_calls=tuple(pieces)))
    return made


def joined(parts: list[Delta]) -> Parsed:
    parsed = Parsed()
    for part in parts:
        parsed.add(part)
    return parsed


def shown(parsed: Parsed) -> tuple[object, ...]:
    return parsed.content, parsed.reasoning, parsed.calls


@given(deltas(), st.integers(0, 8))
def test_what_readers_lack_makes_the_whole_of_what_they_have(parts: list[Delta], had: int) -> None:
    whole, reader = joined(parts), joined(parts[:had])
    reader.add(whole.since(reader))
    assert shown(reader) == shown(whole)
    assert whole.since(reader) == Delta()


@given(deltas(), st.integers(0, 8))
def test_what_is_behind_has_nothing_to_show(parts: list[Delta], had: int) -> None:
    assert joined(parts[:had]).since(joined(parts)) == Delta()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Delta(content="ab"), Delta(content="b")),
        (Delta(reasoning="ab"), Delta(reasoning="aa")),
        (
            Delta(tool_calls=(CallDelta(index=0, id="c", name="f"),)),
            Delta(tool_calls=(CallDelta(index=0, id="c", name="g"),)),
        ),
        (
            Delta(tool_calls=(CallDelta(index=0, id="c", name="f", arguments="{a"),)),
            Delta(tool_calls=(CallDelta(index=0, id="c", name="f", arguments="{b"),)),
        ),
    ],
)
def test_two_answers_are_never_spliced(one: Delta, other: Delta) -> None:
    with pytest.raises(ValueError):
        joined([one]).since(joined([other]))


def test_a_piece_needs_its_call() -> None:
    with pytest.raises(ValueError, match="call 1 comes before call 0"):
        joined([Delta(tool_calls=(CallDelta(index=1, id="c", name="f"),))])
