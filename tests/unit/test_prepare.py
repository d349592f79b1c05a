"""From a submit message to a job's contents: limits of the context, models, seeds, headers."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pdq import subjects
from pdq.errors import Rejected
from pdq.messages import Sampling, pack_ids
from pdq.settings import Models, ModelSpec
from pdq_router.prepare import (
    Prepared,
    began_s,
    check_arrived,
    deadline_s,
    derived_seed,
    prepare,
    priority,
    request_id,
    requested_order,
    sequence_id,
)
from pdq_router.tokens import load_tokenizer

unhurried = hypothesis_settings(deadline=None)

SIM = ModelSpec(slug="sim", id="org/sim.model", tokenizer="bytes", max_model_len=100, vocab_size=512)
OTHER = ModelSpec(slug="other", id="org/other", tokenizer="bytes", max_model_len=50, vocab_size=300)
MODELS = Models({"sim": SIM, "other": OTHER})
TOKENIZERS = {slug: load_tokenizer(spec) for slug, spec in MODELS.by_slug.items()}


def prepared(subject_model: str = "sim", request: str = "r-1", **body: Any) -> Prepared:
    raw = json.dumps({"prompt": "hello"} | body if "messages" not in body else body).encode()
    return prepare_raw(raw, subject_model, request)


def prepare_raw(raw: bytes, subject_model: str = "sim", request: str = "r-1") -> Prepared:
    return prepare(
        raw,
        subject_model=subject_model,
        request=request,
        models=MODELS,
        tokenizers=TOKENIZERS,
        default_max_tokens=20,
    )


def rejected(*named: str, subject_model: str = "sim", **body: Any) -> tuple[str, str | None]:
    with pytest.raises(Rejected) as caught:
        prepared(subject_model, **body)
    message = str(caught.value)
    for part in named:
        assert part in message
    assert message.isprintable() and len(message) < 250
    return caught.value.code, caught.value.param


def test_a_body_becomes_ids_and_sampling() -> None:
    result = prepared(
        prompt="hé",
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        top_k=40,
        min_p=0.1,
        seed=3,
        stop="x",
        stop_token_ids=[511],
        ignore_eos=True,
        logit_bias={"511": 4},
        logprobs=2,
    )
    assert result.prompt == (104, 0xC3, 0xA9)
    assert result.spec is SIM
    assert result.sampling == Sampling(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        top_k=40,
        min_p=0.1,
        seed=3,
        seeded=True,
        stop=("x",),
        stop_token_ids=(511,),
        ignore_eos=True,
        logit_bias={511: 4.0},
        logprobs=2,
    )


def test_a_chat_goes_through_the_template() -> None:
    result = prepared(messages=[{"role": "user", "content": "hi", "name": "Jo"}])
    assert bytes(result.prompt).decode() == "<|user|>\nhi\n<|assistant|>\n"


def test_token_ids_pass_as_they_are() -> None:
    assert prepared(prompt=[0, 511, 7]).prompt == (0, 511, 7)


# models


@pytest.mark.parametrize("name", [None, "sim", "org/sim.model"])
def test_the_body_may_name_the_subject_s_model(name: str | None) -> None:
    assert prepared(model=name).spec is SIM


@pytest.mark.parametrize("name", ["other", "org/other", "SIM", "", "x" * 5000, "a\nb"])
def test_another_model_in_the_body_is_a_mismatch(name: str) -> None:
    assert rejected("sim or org/sim.model", model=name) == ("model_mismatch", "model")


def test_a_subject_may_hold_the_slug_of_a_public_name() -> None:
    assert prepared(subjects.slug("org/sim.model")).spec is SIM


def test_an_unknown_model_names_those_there_are() -> None:
    assert rejected("'gpt-4'", "other, sim", subject_model="gpt-4") == ("unknown_model", "model")


# the context: 100 tokens, prompt and answer together


def test_at_the_exact_limit_one_token_can_be_produced() -> None:
    assert prepared(prompt="a" * 99).sampling.max_tokens == 1
    assert prepared(prompt="a" * 99, max_tokens=1).sampling.max_tokens == 1
    assert prepared(prompt="a" * 60, max_tokens=40).sampling.max_tokens == 40


@pytest.mark.parametrize(("tokens", "over"), [(100, 1), (101, 2), (1000, 901)])
def test_a_prompt_longer_than_the_context_says_by_how_much(tokens: int, over: int) -> None:
    named = (f"has {tokens} tokens", f"{over} more than the 99", "context of sim is 100")
    assert rejected(*named, prompt="a" * tokens) == ("context_length_exceeded", "prompt")
    assert rejected(*named, prompt=[5] * tokens) == ("context_length_exceeded", "prompt")


def test_a_chat_longer_than_the_context_says_by_how_much() -> None:
    messages = [{"role": "user", "content": "a" * 100}]
    assert rejected("has 124 tokens, 25 more", messages=messages) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(("asked", "over"), [(41, 1), (100, 60), (10**30, 10**30 - 40)])
def test_max_tokens_beyond_the_context_says_by_how_much(asked: int, over: int) -> None:
    named = (f"max_tokens is {asked}", f"{over} more than the 40", "prompt of 60 tokens", "context of 100")
    assert rejected(*named, prompt="a" * 60, max_tokens=asked) == ("context_length_exceeded", "max_tokens")


@pytest.mark.parametrize("asked", [0, -1, -(10**30)])
def test_max_tokens_must_be_positive(asked: int) -> None:
    assert rejected(str(asked), "1 to 95", max_tokens=asked) == ("invalid_value", "max_tokens")


def test_the_newer_name_of_max_tokens_is_the_one_blamed() -> None:
    messages = [{"role": "user", "content": "hi"}]
    field = "max_completion_tokens"
    assert prepared(messages=messages, max_completion_tokens=9).sampling.max_tokens == 9
    assert rejected("max_completion_tokens is 0", messages=messages, max_completion_tokens=0) == (
        "invalid_value",
        field,
    )


def test_absent_max_tokens_is_the_default_or_what_is_left() -> None:
    assert prepared(prompt="a" * 80).sampling.max_tokens == 20
    assert prepared(prompt="a" * 81).sampling.max_tokens == 19


def test_min_tokens_fit_into_max_tokens() -> None:
    assert prepared(max_tokens=5, min_tokens=5).sampling.min_tokens == 5
    assert rejected("6", "max_tokens, which is 5", max_tokens=5, min_tokens=6) == ("invalid_value", "min_tokens")
    assert rejected("21", "max_tokens, which is 20", min_tokens=21) == ("invalid_value", "min_tokens")


# the vocabulary: 512 ids


@pytest.mark.parametrize("bad", [-1, 512, 10**9, 2**63, 2**64])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    limit = "0 to 511"
    assert rejected(str(bad), limit, prompt=[5, bad]) == ("token_out_of_range", "prompt[1]")
    assert rejected(str(bad), limit, stop_token_ids=[bad]) == ("token_out_of_range", "stop_token_ids[0]")


@pytest.mark.parametrize("bad", ["512", "999999"])
def test_a_bias_outside_the_vocabulary(bad: str) -> None:
    assert rejected(bad, "0 to 511", logit_bias={bad: 1}) == ("token_out_of_range", f"logit_bias.{bad}")


# seeds


def test_routing_twice_gives_the_same_job() -> None:
    assert prepared(request="r-1") == prepared(request="r-1")
    assert prepared(request="r-1", temperature=0) == prepared(request="r-1", temperature=0)


def test_a_derived_seed_follows_from_the_request_s_id_alone() -> None:
    assert prepared(request="r-1").sampling.seed == prepared(request="r-1", prompt="other").sampling.seed
    assert prepared(request="r-1").sampling.seed != prepared(request="r-2").sampling.seed
    # Fixed for ever: another build of the router must route the same message to the same job.
    assert derived_seed("s-1") == 7675272512762822642


@pytest.mark.parametrize(
    ("asked", "given_on"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)]
)
def test_a_seed_is_never_negative(asked: int, given_on: int) -> None:
    assert prepared(seed=asked).sampling.seed == given_on


# headers


def test_a_request_is_named_by_its_client_or_by_its_sequence() -> None:
    assert request_id({"Pdq-Request": "r-1"}, 7) == "r-1"
    assert request_id({"Pdq-Request": "x" * 64}, 7) == "x" * 64
    assert request_id({"Pdq-Request": "e-x1"}, 7) == "e-x1"
    assert request_id({}, 7) == sequence_id({}, 7) == "s-7"


def test_a_request_that_came_by_way_of_a_site_is_named_by_its_sequence_there() -> None:
    site = {"Pdq-Site-Seq": "1795995494105"}
    assert request_id(site, 7) == sequence_id(site, 7) == "e-1795995494105"
    assert request_id({**site, "Pdq-Request": "r-1"}, 7) == "r-1"


@pytest.mark.parametrize("text", ["", "0", "-1", "007", "1.5", " 1", "1 ", "x", "*", "1\n", "١", "9" * 20])
def test_what_no_forwarder_writes_names_nothing(text: str) -> None:
    assert request_id({"Pdq-Site-Seq": text}, 7) == "s-7"


def test_a_deadline_counts_from_when_the_site_had_the_request() -> None:
    assert began_s({}, 1000.5) == 1000.5
    assert began_s({"Pdq-Site-Time": "990.123456"}, 1000.5) == 990.123456
    # A site's clock that is fast gives nobody more time than the hub does.
    assert began_s({"Pdq-Site-Time": "1001"}, 1000.5) == 1000.5


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e3", "1_0", " 1", "x", "1\n", "9" * 5000])
def test_a_time_that_no_forwarder_writes_counts_as_none(text: str) -> None:
    assert began_s({"Pdq-Site-Time": text}, 1000.5) == 1000.5


def test_a_body_that_the_hub_does_not_take_is_told_by_its_size() -> None:
    check_arrived({})
    with pytest.raises(Rejected) as caught:
        check_arrived({"Pdq-Site-Too-Large": "1048577"})
    assert (caught.value.code, "1048577 bytes" in str(caught.value)) == ("payload_too_large", True)


BAD_NAMES = [
    "",
    "a b",
    "a.b",
    "x.*.>",
    "*",
    ">",
    "a/b",
    "a\r\nb",
    "r-1\n",
    "é",
    "x" * 65,
    "x" * 5000,
    "s-1",
    "s-",
    "s-x",
    "e-1",
    "e-1795995494105",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(Rejected) as caught:
        request_id({"Pdq-Request": name}, 7)
    message = str(caught.value)
    assert (caught.value.code, caught.value.param) == ("invalid_request_id", "Pdq-Request")
    assert ascii(name[:40]) in message and message.isprintable() and len(message) < 200
    assert "reserved s-" in message if name.startswith(("s-", "e-")) else "1 to 64" in message


def test_a_deadline_is_in_seconds() -> None:
    assert deadline_s({}, default_s=600, max_s=3600) == 600
    assert deadline_s({}, default_s=600, max_s=60) == 60
    assert deadline_s({"Pdq-Deadline": "0.5"}, default_s=600, max_s=3600) == 0.5
    assert deadline_s({"Pdq-Deadline": "3600"}, default_s=600, max_s=3600) == 3600
    assert deadline_s({"Pdq-Deadline": "1e-3"}, default_s=600, max_s=3600) == 0.001


BAD_DEADLINES = ["tomorrow", "", "0", "-1", "nan", "inf", "1e999", "3600.1", "1_0", " 1", "1s", "١", "1e", "9" * 5000]


@pytest.mark.parametrize("text", BAD_DEADLINES)
def test_a_bad_deadline_is_refused(text: str) -> None:
    with pytest.raises(Rejected) as caught:
        deadline_s({"Pdq-Deadline": text}, default_s=600, max_s=3600)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "Pdq-Deadline")
    assert ascii(text[:40]) in str(caught.value) and "at most 3600" in str(caught.value)


def test_priority_and_order_are_absent_or_known() -> None:
    assert (priority({}), requested_order({})) == ("normal", None)
    assert priority({"Pdq-Priority": "high"}) == "high"
    assert requested_order({"Pdq-Order": "decode-only"}) == "decode-only"


@pytest.mark.parametrize("text", ["", "urgent", "High", "high ", "*", "x" * 5000])
def test_a_bad_priority_or_order_is_refused(text: str) -> None:
    for read, header, limit in (
        (priority, "Pdq-Priority", "high, normal, low"),
        (requested_order, "Pdq-Order", "decode-only"),
    ):
        with pytest.raises(Rejected) as caught:
            read({header: text})
        assert (caught.value.code, caught.value.param) == ("invalid_value", header)
        assert ascii(text[:40]) in str(caught.value) and limit in str(caught.value)


# everything at once

sampling_fields = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(-2, 120),
        "min_tokens": st.integers(-1, 120),
        "temperature": st.floats(-1, 3),
        "top_p": st.floats(-1, 2),
        "seed": st.integers(-(2**64), 2**64),
        "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
        "stop_token_ids": st.lists(st.integers(-1, 513), max_size=3),
        "logit_bias": st.dictionaries(st.integers(-1, 513).map(str), st.floats(-101, 101), max_size=3),
        "logprobs": st.integers(-1, 6),
        "n": st.integers(0, 2),
    },
)


@unhurried
@given(st.text(max_size=120) | st.lists(st.integers(-1, 513), max_size=120), sampling_fields)
def test_what_passes_fits_the_model(prompt: str | list[int], fields: dict[str, Any]) -> None:
    try:
        result = prepare_raw(json.dumps({"prompt": prompt, **fields}).encode())
    except Rejected:
        return
    sampling = result.sampling
    assert 1 <= len(result.prompt) and 1 <= sampling.max_tokens
    assert len(result.prompt) + sampling.max_tokens <= SIM.max_model_len
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert all(0 <= token < 512 for token in (*result.prompt, *sampling.stop_token_ids, *sampling.logit_bias))
    assert 0 <= sampling.seed < 2**63 and 0 <= sampling.temperature <= 2 and 0 < sampling.top_p <= 1
    pack_ids(result.prompt)


@unhurried
@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "model", "max_tokens", "seed", "stop"]), st.text() | st.integers()
    )
)
def test_any_body_is_prepared_or_rejected(document: dict[str, Any]) -> None:
    try:
        prepare_raw(json.dumps(document).encode())
    except Rejected as error:
        assert str(error).isprintable()


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SAYS = [{"role": "user", "content": "hello"}]


def specced(**fields: str) -> Prepared:
    spec = msgspec.structs.replace(SIM, max_model_len=1000, **fields)
    body = {"messages": SAYS, "tools": [TOOL] if "tool_parser" in fields else []}
    return prepare(
        json.dumps(body).encode(),
        subject_model="sim",
        request="r-1",
        models=Models({"sim": spec}),
        tokenizers=TOKENIZERS,
        default_max_tokens=20,
    )


def test_a_chat_s_answer_is_parsed_where_the_model_has_parsers_for_it() -> None:
    called = specced(tool_parser="hermes").sampling
    assert called.parsed and called.tools is not None and json.loads(called.tools.functions) == [TOOL]
    assert (specced(reasoning_parser="qwen3").sampling.parsed, specced().sampling.parsed) == (True, False)
    assert len(specced(tool_parser="hermes").prompt) > len(specced().prompt)


def test_tools_need_a_parser_and_the_refusal_names_its_setting() -> None:
    assert rejected("tool_parser", "models.toml", messages=SAYS, tools=[TOOL]) == ("unsupported", "tools")
    assert prepared(messages=SAYS, tools=[TOOL], tool_choice="none").sampling.tools is None


def test_what_holds_an_answer_to_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert json.loads(prepared(response_format=form).sampling.guide) == schema
    assert prepared(response_format={"type": "text"}).sampling.guide == ""
