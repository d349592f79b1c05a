"""vLLM's parsers as decode uses them: what they give follows from the tokens, wherever an answer was cut or resumed.

Needs vLLM to import, no engine and no model: the tokenizer has a token for each byte, and for each tag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pdq.engines.base import Work
from pdq.errors import Misconfigured, Rejected, Unavailable
from pdq.log.parsed import Call, Parsed
from pdq.messages import Delta, Sampling, Tools
from pdq.settings import ModelSpec

pytest.importorskip("vllm")
pytestmark = pytest.mark.filterwarnings("default")

TAGS = ("<end>", "<think>", "</think>", "<tool_call>", "</tool_call>")
END = 256
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FUNCTIONS = json.dumps([WEATHER])
ARGUMENTS = '{"city": "Zürich 🌦"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(TAGS[0], special=True)])
    inner.add_tokens([AddedToken(tag, special=False) for tag in TAGS[1:]])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=TAGS[0])


def parsers(tokenizer: Any, **names: str) -> Any:
    from pdq.engines.parsing import Parsers

    return Parsers(ModelSpec(slug="m", id="o/m", max_model_len=4096, vocab_size=512, **names), tokenizer)


def work(*, shown: Sequence[int] = (), prompt: Sequence[int] = (1, 2), attempt: int = 1, **sampling: Any) -> Work:
    asked = Sampling(max_tokens=1000, parsed=True, **sampling)
    return Work(request=f"t.r.d{attempt}", prompt=tuple(prompt), sampling=asked, salt="", shown=tuple(shown))


def output(tokenizer: Any, ids: Sequence[int], finish: str | None = None, text: str | None = None) -> Any:
    """As vLLM's `outputs[0]`; the text of the end token is none of it."""
    text = tokenizer.decode([id for id in ids if id != END]) if text is None else text
    return SimpleNamespace(token_ids=list(ids), text=text, finish_reason=finish, stop_reason=None)


def joined(deltas: Sequence[Delta]) -> Parsed:
    whole = Parsed()
    for delta in deltas:
        whole.add(msgspec.json.decode(msgspec.json.encode(delta), type=Delta))
    return whole


def seen(parsed: Parsed) -> tuple[str, str, list[Call]]:
    return parsed.content, parsed.reasoning, parsed.calls


class Case(msgspec.Struct):
    names: dict[str, str]
    text: str
    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    tools: Tools | None = None
    prompt: str = "hello"


HERMES = {"tool_parser": "hermes"}
AUTO = Tools(functions=FUNCTIONS)
CASES = {
    "content": Case(HERMES, "It is <b>warm</b> in Zürich 🌦.", "It is <b>warm</b> in Zürich 🌦.", tools=AUTO),
    "a call": Case(HERMES, f"I look. {CALL}", "I look. ", calls=(("weather", ARGUMENTS),), tools=AUTO),
    "two calls": Case(
        HERMES, f"{CALL}\n{SECOND}", "", calls=(("weather", ARGUMENTS), ("weather", '{"city": "Rome"}')), tools=AUTO
    ),
    "one call at most": Case(
        HERMES,
        f"{CALL}\n{SECOND}",
        "",
        calls=(("weather", ARGUMENTS),),
        tools=Tools(functions=FUNCTIONS, parallel=False),
    ),
    "reasoning": Case({"reasoning_parser": "deepseek_r1"}, "Ü is odd.</think>It is 🌦.", "It is 🌦.", "Ü is odd."),
    "reasoning, begun": Case({"reasoning_parser": "deepseek_r1"}, "<think>Hm.</think>Yes.", "Yes.", "Hm."),
    "qwen3": Case({"reasoning_parser": "qwen3"}, "<think>Hm, Ü.</think>Yes 🌦.", "Yes 🌦.", "Hm, Ü."),
    "qwen3 and hermes": Case(
        HERMES | {"reasoning_parser": "qwen3"},
        f"<think>A place.</think>{CALL}",
        "",
        "A place.",
        (("weather", ARGUMENTS),),
        AUTO,
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    named: Case = request.param
    if named.names.get("reasoning_parser") == "qwen3":
        pytest.importorskip("mistral_common", reason="vLLM's newer parsers import it; the CPU set lacks it")
    return named


def read(tokenizer: Any, case: Case, cuts: Sequence[int], shown: int = 0, attempt: int = 1) -> tuple[Parsed, str]:
    """The case's text with an end token, in outputs that end at `cuts`; the first `shown` tokens came earlier."""
    ids = [*tokenizer.encode(case.text), END]
    prompt = tokenizer.encode(case.prompt)
    asked = work(shown=ids[:shown], prompt=prompt, attempt=attempt, tools=case.tools)
    reading = parsers(tokenizer, **case.names).reading(asked)
    ends = [*(cut for cut in cuts if cut > shown), len(ids)]
    if shown:
        reading.resume("stop" if shown == len(ids) else None)
    begins = [shown, *ends[:-1]]
    outputs = [
        output(tokenizer, ids[begin:end], "stop" if end == len(ids) else None)
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    ]
    return joined([reading.take(each) for each in outputs]), reading.reason("stop")


def test_an_answer_cut_at_every_token(tokenizer: Any, case: Case) -> None:
    length = len(tokenizer.encode(case.text)) + 1
    one_by_one, reason = read(tokenizer, case, range(1, length))
    assert (one_by_one.content, one_by_one.reasoning) == (case.content, case.reasoning)
    assert tuple((call.name, call.arguments) for call in one_by_one.calls) == case.calls
    assert reason == ("tool_calls" if case.calls else "stop")
    for cut in range(length):
        assert seen(read(tokenizer, case, [cut])[0]) == seen(one_by_one), f"cut at {cut}"


def test_another_attempt_that_goes_on_after_any_token(tokenizer: Any, case: Case) -> None:
    ids = [*tokenizer.encode(case.text), END]
    whole, reason = read(tokenizer, case, [])
    for shown in range(1, len(ids)):
        assert seen(read(tokenizer, case, [], shown, attempt=2)[0]) == seen(whole), f"after {shown}"
    # All of it was shown: nothing is left to publish, but how it ended is known.
    nothing, again = read(tokenizer, case, [], len(ids), attempt=2)
    assert again == reason and seen(nothing) == ("", "", [])


def test_names_of_calls_are_the_requests_own(tokenizer: Any) -> None:
    ids = [call.id for call in read(tokenizer, CASES["two calls"], [])[0].calls]
    assert ids == [call.id for call in read(tokenizer, CASES["two calls"], [], attempt=3)[0].calls]
    assert len(set(ids)) == 2 and all(re.fullmatch(r"call_[0-9a-f]{24}", id) for id in ids)


def test_a_call_that_is_cut_is_not_a_call_made(tokenizer: Any) -> None:
    """By max_tokens, at every token: its finish reason is `length`, and its arguments are a beginning of the whole."""
    ids = tokenizer.encode(f"I look. {CALL}")
    for end in range(1, len(ids) + 1):
        reading = parsers(tokenizer, **HERMES).reading(work(tools=AUTO))
        parsed = joined([reading.take(output(tokenizer, ids[:end], "length"))])
        assert reading.reason("length") == "length"
        assert all(ARGUMENTS.startswith(call.arguments) for call in parsed.calls)
        assert "I look. ".startswith(parsed.content)


def test_an_end_in_mid_call_is_no_call_made(tokenizer: Any) -> None:
    ids = tokenizer.encode('<tool_call>{"name": "weather", "arguments": {"city": "Zü')
    reading = parsers(tokenizer, **HERMES).reading(work(tools=AUTO))
    parsed = joined([reading.take(output(tokenizer, [*ids, END], "stop"))])
    assert [call.arguments for call in parsed.calls] == ['{"city": "Zü']
    assert reading.reason("stop") == "stop"


def test_what_a_stop_string_cuts_off_is_not_parsed(tokenizer: Any) -> None:
    """vLLM holds back what may become a stop string, and never shows one."""
    text, stop = "It is warm. STOP and more", "STOP"
    ids, shown = tokenizer.encode(text[: text.index(stop) + len(stop)]), text[: text.index(stop)]
    reading = parsers(tokenizer, **HERMES).reading(work(tools=AUTO, stop=(stop,)))
    deltas, told = [], 0
    for end in range(1, len(ids)):
        upto = max(0, min(end, len(shown) + len(stop)) - (len(stop) - 1))
        deltas.append(reading.take(output(tokenizer, [ids[end - 1]], None, shown[told:upto])))
        told = max(told, upto)
        assert joined(deltas).content == shown[: min(told, len(shown))]
    last = output(tokenizer, [ids[-1]], "stop", shown[told:])
    last.stop_reason = stop
    assert joined([*deltas, reading.take(last)]).content == shown


def test_forced_and_strict_calls_are_held_to_a_grammar(tokenizer: Any) -> None:
    model = parsers(tokenizer, **HERMES)
    strict = json.dumps([{**WEATHER, "function": {**WEATHER["function"], "strict": True}}])  # type: ignore[dict-item]
    for tools in (
        Tools(functions=FUNCTIONS, choice="required"),
        Tools(functions=FUNCTIONS, choice="named", name="weather"),
        Tools(functions=strict, strict=True),
    ):
        guide = model.reading(work(tools=tools)).guide()
        assert "city" in (guide.structural_tag or guide.json)
    assert model.reading(work(tools=AUTO)).guide() is None
    assert model.reading(work(tools=Tools(functions=FUNCTIONS, parallel=False))).guide() is None
    held = model.reading(work(tools=AUTO, guide='{"type":"object"}')).guide()
    assert json.loads(held.json) == {"type": "object"}


def test_a_grammar_waits_for_the_end_of_reasoning(tokenizer: Any) -> None:
    model = parsers(tokenizer, reasoning_parser="deepseek_r1")
    think, end = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
    assert model.reading(work(prompt=[1, think])).reasoning_ended is False
    assert model.reading(work(prompt=[1, think, end])).reasoning_ended is True


def test_a_parser_that_fails_leaves_the_rest_as_content(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    reading = parsers(tokenizer, **HERMES).reading(work(tools=AUTO))
    reading._parser.parse_delta = lambda *args, **kwargs: 1 / 0
    ids = tokenizer.encode("secret text")
    assert joined([reading.take(output(tokenizer, ids))]).content == "secret text"
    assert caplog.text.count("a parser failed") == 1 and "secret" not in caplog.text


def test_parsers_that_cannot_be_used_are_named(tokenizer: Any) -> None:
    for names in ({"tool_parser": "nonesuch"}, {"reasoning_parser": "nonesuch"}, {"reasoning_parser": "mistral"}):
        with pytest.raises(Misconfigured, match=next(iter(names))):
            parsers(tokenizer, **names)
    with pytest.raises(Unavailable, match=r"models\.toml"):
        parsers(tokenizer).reading(work())


def test_tools_that_no_grammar_can_be_made_of_are_refused(tokenizer: Any) -> None:
    odd = json.dumps([{"type": "function", "function": {"name": "f", "parameters": 3}}])
    with pytest.raises((Rejected, ValueError)):
        parsers(tokenizer, **HERMES).reading(work(tools=Tools(functions=odd, choice="required")))
