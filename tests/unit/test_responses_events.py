"""The events of a response, from the pieces of its log: they join to the output, and are numbered without a gap."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.api.responses import StreamEvent
from pdq.log import Piece
from pdq.messages import CallDelta, Delta, ErrorInfo, KvReport, StageClaims, State, TokenLogprob, Usage
from pdq_gateway.progress import Step
from pdq_gateway.responses_making import Making, encode

ROUTED = State(event="routed", nonce="", at=1.0, submitted=7.5, model="m", order="decode-only", max_tokens=50)
CLAIMED = State(
    event="claim",
    nonce="",
    at=2.0,
    submitted=7.5,
    model="m",
    order="decode-only",
    max_tokens=50,
    decode=StageClaims(attempt=1),
)


def finished(reason: str = "stop", **more: Any) -> State:
    usage = Usage(prompt_tokens=10, completion_tokens=5, total_tokens=15)
    fields: dict[str, Any] = {"decode": StageClaims(attempt=1), "usage": usage, "finish_reason": reason, **more}
    return State(event="finished", nonce="", at=3.9, submitted=7.5, model="m", order="decode-only", **fields)


class Told:
    """A response that was made of pieces, and its events as a client reads them."""

    def __init__(self) -> None:
        self.making = Making("r-1", {"m": "org/m"}.__getitem__)
        self.events: list[Any] = []

    def take(self, state: State, *pieces: Piece) -> None:
        self._add(list(self.making.take(state, Step(1, pieces=pieces))))

    def fail(self, state: State, error: ErrorInfo) -> None:
        self._add(list(self.making.fail(state, error)))

    def _add(self, events: list[StreamEvent]) -> None:
        self.events += [json.loads(encode(event)) for event in events]

    @property
    def types(self) -> list[str]:
        return [event["type"].removeprefix("response.") for event in self.events]

    @property
    def output(self) -> Any:
        """Of the last event, which has it whole."""
        return self.events[-1]["response"]["output"]

    def joined(self) -> list[dict[str, Any]]:
        """The output, put together from the events as a client does."""
        items: list[dict[str, Any]] = []
        for event in self.events:
            match event["type"].removeprefix("response."):
                case "output_item.added":
                    assert event["output_index"] == len(items)
                    items.append(event["item"])
                case "content_part.added":
                    item = items[event["output_index"]]
                    assert item["id"] == event["item_id"] and event["content_index"] == len(item["content"]) == 0
                    item["content"].append(event["part"])
                case "output_text.delta":
                    part = items[event["output_index"]]["content"][0]
                    part["text"] += event["delta"]
                    part["logprobs"] += event["logprobs"]
                case "reasoning_text.delta":
                    items[event["output_index"]]["content"][0]["text"] += event["delta"]
                case "function_call_arguments.delta":
                    items[event["output_index"]]["arguments"] += event["delta"]
                case "output_text.done" | "reasoning_text.done":
                    assert event["text"] == items[event["output_index"]]["content"][0]["text"]
                case "function_call_arguments.done":
                    assert event["arguments"] == items[event["output_index"]]["arguments"]
                case "output_item.done":
                    items[event["output_index"]]["status"] = event["item"]["status"]
                    without = [{**each, "logprobs": None} for each in event["item"].get("content", [])]
                    assert without == [
                        {**each, "logprobs": None} for each in items[event["output_index"]].get("content", [])
                    ]
        return items


def plain(*texts: str) -> list[Piece]:
    return [Piece(index, (index,), text) for index, text in enumerate(texts)]


def parsed(*deltas: Delta) -> list[Piece]:
    return [Piece(2 * index, (1, 2), "<markup>", delta=delta) for index, delta in enumerate(deltas)]


def told(*pieces: Piece, end: State | None = None) -> Told:
    found = Told()
    found.take(ROUTED)
    found.take(CLAIMED)
    for piece in pieces:
        found.take(CLAIMED, piece)
    found.take(end or finished())
    assert [event["sequence_number"] for event in found.events] == list(range(len(found.events)))
    return found


def piece_of_call(index: int, arguments: str, name: str = "") -> CallDelta:
    return CallDelta(index=index, id=f"call_{index}" if name else "", name=name, arguments=arguments)


def test_a_text() -> None:
    found = told(*plain("Hel", "", "lo"))
    assert found.types == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [found.events[at]["response"]["status"] for at in (0, 1, -1)] == ["queued", "in_progress", "completed"]
    (message,) = found.output
    assert (message["id"], message["status"], message["content"][0]["text"]) == ("msg_r-1_0", "completed", "Hello")
    assert found.joined() == found.output


def test_the_response_that_is_told_at_the_end() -> None:
    kv = KvReport(promised_tokens=8, loaded_tokens=3, local_tokens=4)
    response = told(*plain("x"), end=finished(kv=kv, max_tokens=50)).events[-1]["response"]
    assert (response["id"], response["model"], response["created_at"]) == ("resp_r-1", "org/m", 7)
    assert (response["completed_at"], response["max_output_tokens"], response["error"]) == (3, 50, None)
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }


def test_thoughts_then_a_text_then_calls() -> None:
    found = told(
        *parsed(
            Delta(reasoning="\n"),
            Delta(reasoning="hm"),
            Delta(reasoning="m", content="\n\nI "),
            Delta(content="call."),
            Delta(tool_calls=(piece_of_call(0, '{"a"', "f"),)),
            Delta(tool_calls=(piece_of_call(0, ": 1}"), piece_of_call(1, "{}", "g")), content="\n"),
            Delta(content="\n"),
        )
    )
    thoughts, message, first, second = found.output
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "\nhmm"}] and thoughts["summary"] == []
    assert message["content"][0]["text"] == "\n\nI call."
    assert (first["name"], first["call_id"], first["arguments"]) == ("f", "call_0", '{"a": 1}')
    assert (second["id"], second["name"], second["arguments"]) == ("fc_r-1_3", "g", "{}")
    assert [item["status"] for item in found.output] == ["completed"] * 4
    assert found.joined() == found.output
    assert found.events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 6


def test_an_answer_that_is_cut_is_incomplete_where_it_ends() -> None:
    found = told(*parsed(Delta(reasoning="hm", content="I "), Delta(content="say")), end=finished("length"))
    assert found.types[-1] == "incomplete"
    response = found.events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found.output] == ["completed", "incomplete"]
    assert found.joined() == found.output and response["completed_at"] is None


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([], [""]),
        (plain("\n", "  "), ["\n  "]),
        (plain("\n", "x"), ["\nx"]),
        (parsed(Delta(reasoning="hm", content="\n")), []),
        (parsed(Delta(content=" "), Delta(tool_calls=(piece_of_call(0, "{}", "f"),)), Delta(content=" ")), []),
    ],
)
def test_white_space_is_a_message_only_where_there_is_nothing_else(pieces: list[Piece], texts: list[str]) -> None:
    found = told(*pieces)
    assert [item["content"][0]["text"] for item in found.output if item["type"] == "message"] == texts
    assert found.joined() == found.output


def test_a_request_that_fails_after_it_began() -> None:
    found = Told()
    found.take(ROUTED)
    found.take(CLAIMED, *plain("Hel"))
    expired = State(event="expired", nonce="", at=9, submitted=7.5, model="m", order="decode-only")
    found.fail(expired, ErrorInfo(code="deadline_exceeded", message="messages came too late", param="messages"))
    response = found.events[-1]["response"]
    assert (found.types[-1], response["status"], response["usage"]) == ("failed", "failed", None)
    assert response["error"] == {
        "code": "server_error",
        "message": "input came too late",
        "param": "input",
        "type": "deadline_exceeded",
    }
    assert [item["status"] for item in response["output"]] == ["incomplete"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("rate_limit_exceeded", "rate_limit_exceeded"),
        ("queue_full", "rate_limit_exceeded"),
        ("context_length_exceeded", "invalid_prompt"),
        ("cancelled", "server_error"),
        ("engine_failed", "server_error"),
    ],
)
def test_an_error_has_one_of_the_codes_that_clients_know(code: str, kind: str) -> None:
    found = Told()
    found.fail(State(event="failed", nonce="", at=9, model="m"), ErrorInfo(code=code, message="x"))
    assert found.types == ["failed"] and found.events[0]["sequence_number"] == 0
    assert (found.events[0]["response"]["error"]["code"], found.events[0]["response"]["error"]["type"]) == (kind, code)


def test_log_probabilities_come_with_the_text() -> None:
    """Those of tokens whose characters are not whole yet come with the next text, or at the end."""
    tokens = [TokenLogprob(token=token, logprob=-1.0) for token in ("H", "\ufffd", "\ufffd", "!")]
    pieces = [
        Piece(0, (1,), "H", (tokens[0],)),
        Piece(1, (2,), "", (tokens[1],)),
        Piece(2, (3,), "é", (tokens[2],)),
        Piece(3, (4,), "", (tokens[3],)),
    ]
    found = told(*pieces)
    deltas = [event for event in found.events if event["type"] == "response.output_text.delta"]
    assert [len(delta["logprobs"]) for delta in deltas] == [1, 2]
    shown = found.output[0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in shown] == [token.token for token in tokens]
    assert [entry["bytes"] for entry in shown] == [[72], [], [], [33]]


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Deltas in any order that a log may have: calls begin in order, each with its name."""
    deltas, begun = [], 0
    text = st.text("ab \n", max_size=3)
    for _ in range(draw(st.integers(0, 8))):
        calls = []
        for index in draw(st.lists(st.integers(0, begun), max_size=3)):
            calls.append(piece_of_call(index, draw(text), "f" if index == begun else ""))
            begun += index == begun
        deltas.append(Delta(content=draw(text), reasoning=draw(text), tool_calls=tuple(calls)))
    return deltas


@given(answers(), st.sampled_from(["stop", "length", "tool_calls"]))
def test_events_join_to_the_output_whatever_the_model_says(deltas: list[Delta], reason: str) -> None:
    found = told(*parsed(*deltas), end=finished(reason))
    assert found.joined() == found.output
    calls = [item for item in found.output if item["type"] == "function_call"]
    for index, call in enumerate(calls):
        pieces = [each.arguments for delta in deltas for each in delta.tool_calls if each.index == index]
        assert call["arguments"] == "".join(pieces)
    for kind, field in (("message", "content"), ("reasoning", "reasoning")):
        shown = "".join(item["content"][0]["text"] for item in found.output if item["type"] == kind)
        said = "".join(getattr(delta, field) for delta in deltas)
        assert "".join(shown.split()) == "".join(said.split())
    open_items = {event["output_index"] for event in found.events if event["type"] == "response.output_item.added"}
    done = {event["output_index"] for event in found.events if event["type"] == "response.output_item.done"}
    assert open_items == done == set(range(len(found.output)))


@given(st.lists(st.text("ab \n", max_size=4), max_size=6))
def test_a_plain_text_is_shown_whole(texts: list[str]) -> None:
    found = told(*plain(*texts))
    (message,) = found.output
    assert message["content"][0]["text"] == "".join(texts)
    assert found.joined() == found.output
