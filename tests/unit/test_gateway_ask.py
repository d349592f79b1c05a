"""From an HTTP request to what is submitted; names and places."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdq.api.body import ChatBody, CompletionBody, parse_body
from pdq.client import idempotent_id
from pdq.errors import PdqError
from pdq.settings import Models, ModelSpec
from pdq_gateway.ask import Ask, read_ask
from pdq_gateway.naming import MOST_CHOICES, Name, Place

MODELS = Models({"sim": ModelSpec(slug="sim", id="pdq/sim", tokenizer="bytes", max_model_len=64, vocab_size=256)})


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "sim", "messages": [{"role": "user", "content": "é"}], **fields}).encode()


def ask(raw: bytes, **headers: str) -> Ask:
    return read_ask(raw, {name.replace("_", "-"): value for name, value in headers.items()}, ChatBody, MODELS)


def test_one_choice_is_submitted_as_it_came() -> None:
    raw = body(temperature=0.5)[:-1] + b"   }"
    asked = ask(raw)
    assert asked.bodies == (raw,) and asked.name.requests == (asked.name.request,)
    assert not asked.named and asked.after is None
    assert ask(raw).name != asked.name


def test_a_key_names_the_request() -> None:
    asked = ask(body(), Idempotency_Key="a key")
    assert asked.named and asked.name == Name(idempotent_id("a key"))


def test_each_of_several_choices_has_a_body_of_its_own() -> None:
    asked = ask(body(n=3, seed=2**63 - 2, temperature=0.1, metadata={"mine": "1"}))
    found = [json.loads(each) for each in asked.bodies]
    assert [each["seed"] for each in found] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert all("n" not in each and each["temperature"] == 0.1 for each in found)
    assert all(each["metadata"]["mine"] == "1" for each in found)
    assert all(isinstance(parse_body(each), ChatBody) for each in asked.bodies), "a router takes them"


def test_a_body_with_another_n_is_another_body() -> None:
    first = {each.bodies[0] for each in (ask(body()), ask(body(n=2)), ask(body(n=3)))}
    assert len(first) == 3
    assert ask(body(n=3)).bodies == ask(body(n=3)).bodies


def test_choices_without_a_seed_are_left_to_their_names() -> None:
    assert all("seed" not in json.loads(each) for each in ask(body(n=2)).bodies)


@pytest.mark.parametrize(
    ("raw", "headers", "code"),
    [
        (body(model=None), {}, "missing_field"),
        (body(model="x" * 5000), {}, "unknown_model"),
        (json.dumps({"model": "sim", "prompt": "x"}).encode(), {}, "missing_field"),
        (body(n=MOST_CHOICES + 1), {}, "unsupported"),
        (body(stream_options={}), {}, "invalid_value"),
        (body(), {"Idempotency_Key": "é"}, "invalid_value"),
        (body(), {"Pdq_Background": "True"}, "invalid_value"),
        (body(stream=True), {"Last_Event_ID": "1", "Idempotency_Key": "k", "Pdq_Background": ""}, "invalid_value"),
        (body(stream=True, n=2), {"Last_Event_ID": "1", "Idempotency_Key": "k"}, "invalid_value"),
    ],
)
def test_what_is_refused(raw: bytes, headers: dict[str, str], code: str) -> None:
    with pytest.raises(PdqError) as refused:
        ask(raw, **headers)
    assert refused.value.code == code
    assert len(str(refused.value)) < 200


def test_an_id_is_of_its_own_shape_only() -> None:
    assert Name.parse("cmpl-r-1", "chatcmpl") is None
    assert Name.parse("chatcmpl-r-1", "cmpl") is None
    for odd in ("chatcmpl-", "chatcmpl-a.b", "chatcmpl-*", "chatcmpl-" + "x" * 65, "chatcmpl-" + "x" * 64 + "-n2", ""):
        assert Name.parse(odd, "chatcmpl") is None


@given(st.from_regex(r"[rk]-[0-9a-f]{20,32}", fullmatch=True), st.integers(1, MOST_CHOICES))
def test_an_id_tells_the_requests(request: str, choices: int) -> None:
    name = Name(request, choices)
    assert Name.parse(name.public("cmpl"), "cmpl") == name
    assert len(set(name.requests)) == choices and name.requests[0] == request


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=MOST_CHOICES), st.booleans())
def test_a_place_is_read_as_it_was_written(seqs: list[int], end: bool) -> None:
    place = Place(tuple(seqs), end)
    assert Place.parse(str(place)) == place


@pytest.mark.parametrize(
    "text", ["", ".", "1.", ".1", "1.2.end.", "end", "-1", "1e3", "١", "1 ", "1." * 8 + "1", "9" * 20]
)
def test_no_place(text: str) -> None:
    assert Place.parse(text) is None


def test_completions_have_their_own_shape() -> None:
    raw = json.dumps({"model": "pdq/sim", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}})
    asked = read_ask(raw.encode(), {"Pdq-Priority": "low"}, CompletionBody, MODELS)
    assert (asked.model, asked.stream, asked.include_usage) == ("sim", True, True)
    assert asked.headers == {"Pdq-Priority": "low"}
