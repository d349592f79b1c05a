"""The body of a submit: OpenAI's chat (`messages`) or completions (`prompt`) shape, strictly.

Every field that is served stands in `ChatBody` and `CompletionBody`; anything else is refused by its name, so
that no option is dropped in silence and nothing internal (transfer parameters, salts) comes in from outside.
A field that is null counts as absent. `stream`, `stream_options`, `user` and `metadata` are accepted for the
sake of OpenAI's clients and never used: the answer always streams, and the tenant comes from the subject.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdq.api.chat import MOST_TOOLS, NULLS, Choice, Message, Strict, Tool, tool_use
from pdq.api.format import ResponseFormat
from pdq.api.reading import decode_object, explained, unknown_field
from pdq.api.refusals import hidden, refuse, shown
from pdq.messages import Tools

LONGEST_STOP_CHARS = 1024
MOST_STOP_TOKEN_IDS = 64
MOST_LOGIT_BIASES = 300
"""Well below what vLLM holds per request (128 and 1024); beyond that its worker dies."""

Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP_CHARS)]


class StreamOptions(Strict, frozen=True, kw_only=True):
    include_usage: bool = False
    """Over HTTP: one more chunk at the end tells the tokens used."""


class _Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both shapes share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    """vLLM's: above 1 against what is in the prompt or in the answer by now. 1 is none."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    """vLLM's: sample from so many of the likeliest tokens; 0 or -1: from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """vLLM's: sample from tokens that are at least so likely, as a share of the likeliest one's probability."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] = []
    stop_token_ids: Annotated[list[int], Meta(max_length=MOST_STOP_TOKEN_IDS)] = []
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, Any], Meta(max_length=MOST_LOGIT_BIASES)] = {}
    """Token id in decimal digits → -100..100; checked by `bias`."""
    n: int = 1
    """Answers wanted; more than one only over HTTP, where each becomes a request of its own."""
    response_format: ResponseFormat | None = None

    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    metadata: dict[str, Any] = {}

    def limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value in tokens."""
        return "max_tokens", self.max_tokens

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def guide(self) -> str:
        """As `Sampling.guide`. Raises Rejected, naming the place in a schema."""
        return self.response_format.guide() if self.response_format else ""

    def bias(self) -> dict[int, float]:
        """`logit_bias` by token id. Raises Rejected, naming the entry."""
        return {_bias_id(key): _bias_value(key, value) for key, value in self.logit_bias.items()}


class ChatBody(_Common, frozen=True, kw_only=True):
    messages: list[Message]
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] = []
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit()

    def tool_use(self) -> Tools | None:
        """As `Sampling.tools`. Raises Rejected, naming the place."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def num_logprobs(self) -> int | None:
        """As `Sampling.logprobs`: None = none, 0 = the sampled token's only."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(_Common, frozen=True, kw_only=True):
    prompt: str | list[int]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    def num_logprobs(self) -> int | None:
        return self.logprobs


Body = ChatBody | CompletionBody

NOT_SERVED = frozenset(
    "audio best_of echo function_call functions modalities parallel_tool_calls prediction reasoning_effort suffix "
    "tool_choice tools".split()
)
"""Fields of OpenAI's and vLLM's APIs that people will try: refused as `unsupported`, not as unknown."""


def parse_body(raw: bytes, *, most_choices: int = 1) -> Body:
    """A submitted body, checked as far as it can be without a model; its `n` is at most `most_choices`.

    Raises Rejected, and nothing else.
    """
    document = decode_object(raw)
    fields = {name: value for name, value in document.items() if value is not None}
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [_sent_back(message) for message in fields["messages"]]
    kind = _kind(fields)
    _refuse_unknown(document, kind)
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as exc:
        # Not chained: msgspec's message holds the value in full.
        raise explained(fields, str(exc)) from None
    _check(body, most_choices)
    return body


def _sent_back(message: Any) -> Any:
    """An assistant's message as OpenAI's clients send it back: what it did not do is null, and what the clients add to
    it (`parsed`, `parsed_arguments`; a call's `index`) is there besides."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    fields = {name: value for name, value in message.items() if value is not None or name not in NULLS}
    fields.pop("parsed", None)
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_call_sent_back(call) for call in fields["tool_calls"]]
    return fields


def _call_sent_back(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    function = {name: value for name, value in function.items() if name != "parsed_arguments"}
    return {name: value for name, value in call.items() if name != "index"} | {"function": function}


def _kind(fields: dict[str, Any]) -> type[ChatBody] | type[CompletionBody]:
    if "messages" in fields and "prompt" in fields:
        raise refuse("invalid_value", "prompt", "body has both messages and prompt; expected one of them")
    if "messages" not in fields and "prompt" not in fields:
        raise refuse("missing_field", "messages", "body has neither messages nor prompt; expected one of them")
    return ChatBody if "messages" in fields else CompletionBody


def _refuse_unknown(document: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    for name in document:
        if name in kind.__struct_fields__:
            continue
        if name in NOT_SERVED:
            raise refuse("unsupported", name, f"{name} is not served")
        raise unknown_field("", name)


def _check(body: Body, most_choices: int) -> None:
    """Rules between fields, and those of one value only."""
    if not 1 <= body.n <= most_choices:
        expected = "only 1 is served" if most_choices == 1 else f"expected 1 to {most_choices}"
        raise refuse("unsupported", "n", f"n is {shown(body.n)}; {expected}")
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif not body.prompt:
        raise refuse("empty_prompt", "prompt", "prompt is empty; expected at least one character or token id")
    body.bias()
    _check_held(body)


def _check_held(body: Body) -> None:
    """An answer that is held to a form ends where that does."""
    tools = body.tool_use() if isinstance(body, ChatBody) else None
    field = "response_format" if body.guide() else "tool_choice" if tools is not None and tools.guided else ""
    for name in ("ignore_eos", "min_tokens"):
        if field and (value := getattr(body, name)):
            raise refuse("invalid_value", name, f"{name} is {shown(value)}; with {field}, the answer's form ends it")


def _check_chat(body: ChatBody) -> None:
    for index, turn in enumerate(body.messages):
        turn.check(f"messages[{index}]")
    if not any(message.text.strip() for message in body.messages):
        message = f"messages is {hidden(body.messages)}, none with text; expected at least one"
        raise refuse("empty_prompt", "messages", message)
    if body.top_logprobs is not None and not body.logprobs:
        raise refuse("invalid_value", "top_logprobs", f"top_logprobs is {body.top_logprobs}; it needs logprobs: true")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = (
            f"max_tokens is {shown(body.max_tokens)}; max_completion_tokens is {shown(body.max_completion_tokens)}"
        )
        raise refuse("invalid_value", "max_tokens", f"{message}: expected one of them, or both equal")


def _bias_id(key: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
        raise refuse("invalid_value", "logit_bias", f"logit_bias has the key {shown(key)}; expected a token id")
    return int(key)


def _bias_value(key: str, value: Any) -> float:
    param = f"logit_bias.{key}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse("invalid_type", param, f"{param} is {shown(value)}; expected a number from -100 to 100")
    if not -100 <= value <= 100:
        raise refuse("invalid_value", param, f"{param} is {shown(value)}; expected a number from -100 to 100")
    return float(value)
